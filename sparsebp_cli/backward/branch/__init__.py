"""Sites at the outputs of residual branches."""
