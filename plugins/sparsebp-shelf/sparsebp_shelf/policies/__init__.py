"""Policies of kinds that SparseBP has."""
