"""The process that measures policies before training: ``python -m sparsebp_lab.worth``."""
