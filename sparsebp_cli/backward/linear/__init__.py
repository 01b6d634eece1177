"""Sites at the outputs of linears."""
