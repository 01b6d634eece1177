"""Execution of parameter selectors: which parameters a step trains, and at which learning rates."""
