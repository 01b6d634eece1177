"""Records that the verbs of this package answer with."""
