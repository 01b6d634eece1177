"""Sites at linears (``sites: linears``): the outputs of a model's linears."""
