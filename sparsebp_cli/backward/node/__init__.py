"""Sites at nodes (``sites: nodes``): the nodes of the autograd graph."""
