"""Finds the examples of a batch, and compares ways to run it with runs of its examples alone."""

from sparsebp_cli.backward.isolation.alone import compare_with_alone
from sparsebp_cli.backward.isolation.examples import Examples, NotAlone, examples_at, find_examples

__all__ = [
    "Examples",
    "NotAlone",
    "compare_with_alone",
    "examples_at",
    "find_examples",
]
