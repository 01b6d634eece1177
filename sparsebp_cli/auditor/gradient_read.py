"""Tracks reads of gradients outside of a backward pass: a gradient that code reads is used, even without an
optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sparsebp_cli.auditor.ledger import AuditLedger
from sparsebp_cli.auditor.storage import key_of

_ATEN = torch.ops.aten
_CLEARING = (_ATEN.zero_, _ATEN._foreach_zero_, _ATEN.fill_)
# Clipping measures and scales the gradients of all parameters, including those that are never updated.
_MEASURING = (
    _ATEN._foreach_norm,  # noqa: SLF001 - an operator's name
    _ATEN._foreach_mul_,
    _ATEN.linalg_vector_norm,
    _ATEN.norm,
    _ATEN.mul_,
)


class GradientReads:
    """Gradients of inputs and parameters, and which of them something has read."""

    def __init__(self, ledger: AuditLedger) -> None:
        self._ledger = ledger
        self.unread: set[int] = set()  # storages of the gradients of inputs
        self.read: set[int] = set()  # of them, those that something read
        # Unread gradients of parameters by storage: the parameter's bit, and a reference that keeps the key valid.
        self.gradients: dict[int, tuple[int, StorageWeakRef]] = {}
        self.read_elsewhere = 0  # bits of parameters whose gradient was read outside of optimizers, beyond its norm

    def record(self, operator: Any, inputs: list[Tensor], outputs: list[Tensor], *, is_updating: bool) -> None:
        """Record the reads of an operator outside of a backward pass; ``is_updating``: an optimizer runs it."""
        if not (self.unread or self.gradients):
            return
        known = {key_of(tensor) for tensor in inputs}
        self.read |= self.unread & known
        touched = known & self.gradients.keys()
        if not touched or _only_clears_or_views(operator, known, outputs):
            return
        bits = sum(self.gradients[key][0] for key in touched)
        self._ledger.use(bits)
        if not is_updating and operator.overloadpacket not in _MEASURING:
            self.read_elsewhere |= bits
            for key in touched:
                del self.gradients[key]


def _only_clears_or_views(operator: Any, known: set[int], outputs: list[Tensor]) -> bool:
    if operator._schema.is_mutable:  # noqa: SLF001 - not public elsewhere
        return operator.overloadpacket in _CLEARING
    return bool(outputs) and all(key_of(tensor) in known for tensor in outputs)
