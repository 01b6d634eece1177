"""Models and data to fetch on request, as entry points of ``sparsebp.models`` and ``sparsebp.datasets``."""
