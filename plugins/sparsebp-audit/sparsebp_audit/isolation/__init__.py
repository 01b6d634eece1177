"""Check isolation: do the examples of a batch influence each other, in the model or in the loss?"""

from sparsebp_audit.isolation.judge import judge_batch
from sparsebp_audit.isolation.loss import LossReader, ScriptCall

__all__ = ["LossReader", "ScriptCall", "judge_batch"]
