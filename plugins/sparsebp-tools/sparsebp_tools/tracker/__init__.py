"""Trackers beside MLflow, as entry points of the group ``sparsebp.trackers``."""
