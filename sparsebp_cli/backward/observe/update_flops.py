"""Counts the arithmetic of an optimizer's update when operators reach the device's kernels.

Updates mostly run elementwise operators, so we count their FLOPs by entry: AdamW with weight decay takes 14, as a loop,
batched (foreach) or fused, which differ only in time. Norms and matrix products count as well; decompositions (of
GaLore, once in hundreds of steps) do not. Counting does not change the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebp_cli.backward.observe.flops import find_formula

if TYPE_CHECKING:
    from torch._ops import OpOverload

# FLOPs by entry, for operators with other than one FLOP.
BY_ENTRY = {
    "addcmul": 3,
    "addcdiv": 3,
    "lerp": 3,
    "linalg_vector_norm": 2,
    "norm": 2,
    "sum": 1,
    "mean": 1,
}
# FLOPs by entry of fused kernels: without weight decay and momentum, and the addition for each of the two.
FUSED = {"fused_adam": (13, 2, 0), "fused_adamw": (13, 1, 0), "fused_sgd": (2, 2, 2), "fused_adagrad": (8, 2, 0)}
# Copies, comparisons and selections: no arithmetic.
NONE = frozenset({"clone", "where", "isfinite", "isnan", "ge", "gt", "le", "lt", "eq", "ne", "logical_not"})


class UpdateFlops(TorchDispatchMode):
    """A context manager that adds the FLOPs of updates inside it to ``flops``."""

    flops: int

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := find_formula(func)) is not None:
            self.flops += int(formula(*args, **kwargs, out_val=result))
        else:
            self.flops += _by_entry(func, kwargs) * count_entries(args[0] if args else None)
        return result


def count_entries(value: object) -> int:
    """Return the entries of a tensor, or of all tensors of a list; 0 for anything else."""
    if isinstance(value, Tensor):
        return value.numel()
    return sum(map(count_entries, value)) if isinstance(value, Sequence) and not isinstance(value, str) else 0


def _by_entry(func: OpOverload, kwargs: dict[str, object]) -> int:
    name = str(func.overloadpacket.__name__).strip("_")
    batched = name.startswith("foreach_")
    name = name.removeprefix("foreach_")
    if name in NONE:
        return 0
    if name in BY_ENTRY:
        return BY_ENTRY[name]
    if name in FUSED:
        plain, decay, momentum = FUSED[name]
        return plain + decay * bool(kwargs.get("weight_decay")) + momentum * bool(kwargs.get("momentum"))
    if not batched and torch.Tag.pointwise not in func.tags:
        return 0
    scaled = name in {"add", "sub"} and kwargs.get("alpha", 1) != 1
    return 2 if scaled else 0 if name in {"copy", "zero"} else 1
