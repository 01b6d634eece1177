"""A cache for outputs of frozen layers, computed at the first visit of an example and reused at later ones."""
