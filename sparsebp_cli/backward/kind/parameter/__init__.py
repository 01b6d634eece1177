"""Execution of parameter selectors: which parameters a step trains."""
