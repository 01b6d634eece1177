"""Judges whether each example of a batch is computed, and weighed by the loss, as if it were alone."""

from sparsebp_cli.backward.isolation.examples import Examples, NotAlone, examples_at, find_examples
from sparsebp_cli.backward.isolation.judge import compare_with_alone, judge_batch
from sparsebp_cli.backward.isolation.loss import LossReader, ScriptCall

__all__ = [
    "Examples",
    "LossReader",
    "NotAlone",
    "ScriptCall",
    "compare_with_alone",
    "examples_at",
    "find_examples",
    "judge_batch",
]
