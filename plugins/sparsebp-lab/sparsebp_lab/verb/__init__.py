"""The verbs of this package, which `sparsebp` finds by their entry points."""
