"""Judges whether each example of a batch is computed, and weighed by the loss, as if it were alone."""

from sparsebp_audit.isolation.judge import judge_batch
from sparsebp_audit.isolation.loss import LossReader, ScriptCall

__all__ = ["LossReader", "ScriptCall", "judge_batch"]
