"""Isolation check: compares runs of a batch with runs of its examples alone."""

from sparsebp_cli.backward.isolation.alone import compare_with_alone
from sparsebp_cli.backward.isolation.examples import Examples, NotAlone, examples_at

__all__ = [
    "Examples",
    "NotAlone",
    "compare_with_alone",
    "examples_at",
]
