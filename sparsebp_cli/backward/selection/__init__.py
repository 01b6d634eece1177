"""Policies that select parameters, examples or tokens instead of gradients at sites."""
