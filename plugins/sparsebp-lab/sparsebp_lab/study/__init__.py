"""Plan studies: trials, stages, budget, controls, and the client that trains each trial once."""
