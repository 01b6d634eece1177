"""The site `linears`: the outputs of a model's linears."""
