"""PUBLIC. The entry type of optimizers, the built-in entries of the group ``sparsebp.optimizers``, and a base class.

The entries include PyTorch's optimizers whose state can be sharded. SparseBP finds other PyTorch optimizers by name.
Importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparsebp_cli.policy.composition.optimizer import OptimizerEntry, find_in_torch

__all__ = [
    "OptimizerEntry",
    "SeparateOptimizer",
    "adam_step",
    "check_betas",
    "check_not_negative",
    "evaluate",
    "keep_precision",
    "refuse_complex",
    "wide_dtype",
]

if TYPE_CHECKING:
    from sparsebp_cli.optimizers.separate import (
        SeparateOptimizer,
        adam_step,
        check_betas,
        check_not_negative,
        evaluate,
        keep_precision,
        refuse_complex,
        wide_dtype,
    )
else:

    def __getattr__(name):
        if name in __all__:
            return getattr(import_module(f"{__name__}.separate"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _apollo(**implied: object) -> OptimizerEntry:
    names = ("betas", "eps", "weight_decay", "rank", "scale", "scale_type", "update_proj_gap", "seed")
    return OptimizerEntry("sparsebp_cli.optimizers.apollo:Apollo", names, implied)


ADAM, ADAMAX, ADAMW, NADAM, RADAM, RMSPROP, SGD = (
    find_in_torch(name, is_sharded=True) for name in ("adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "sgd")
)
APOLLO = _apollo(scale_type="channel")
APOLLO_MINI = _apollo(scale_type="tensor", rank=1, scale=128.0)  # as in the paper: rank 1, and sqrt(128) as factor
