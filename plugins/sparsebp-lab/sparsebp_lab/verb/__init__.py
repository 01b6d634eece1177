"""Commands of this package; `sparsebp` finds them by their entry points."""
