"""The site `branches`: the outputs of a model's residual branches."""
