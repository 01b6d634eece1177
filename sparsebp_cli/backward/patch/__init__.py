"""Overrides of modules' forwards, checks of their outputs, and states of random generators."""
