"""The site `nodes`: the nodes of the autograd graph."""
