"""Provide policies of kinds that SparseBP's core defines."""
