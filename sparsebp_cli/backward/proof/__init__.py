"""Measurements of what a policy did, compared with what it claims."""
