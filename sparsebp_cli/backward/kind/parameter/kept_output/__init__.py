"""Outputs of frozen layers, computed at the first visit of an example and kept for the others."""
