"""Models and data that are fetched on request, as entry points of ``sparsebp.models`` and ``sparsebp.datasets``."""
