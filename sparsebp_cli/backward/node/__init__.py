"""Sites at the nodes of the autograd graph."""
