"""The process that measures what policies are worth before training: ``python -m sparsebp_lab.worth``."""
