"""Isolation check: finds the examples of a batch, and compares runs of the batch with runs of its examples alone."""

from sparsebp_cli.backward.isolation.alone import compare_with_alone
from sparsebp_cli.backward.isolation.examples import Examples, NotAlone, examples_at, find_examples

__all__ = [
    "Examples",
    "NotAlone",
    "compare_with_alone",
    "examples_at",
    "find_examples",
]
