"""Measurements of policies: counted FLOPs against estimates, approximation error, and changed parameters."""
