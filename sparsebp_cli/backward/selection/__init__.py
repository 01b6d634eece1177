"""Policies that select parameters, examples or tokens rather than gradients at sites."""
