"""Provide policies that the core leaves out: references, controls, and methods that are slower than dense here."""

from sparsebp_shelf import sampling

__all__ = ["sampling"]
