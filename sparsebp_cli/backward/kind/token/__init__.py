"""Execution of token selectors: exact, or with detached positions that carry no gradient."""
