"""Changes around a forward: overrides of modules' forwards, and states of random generators."""
