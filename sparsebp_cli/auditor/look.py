"""Who looks at gradients outside of a backward pass: one that somebody took is used, whoever holds its parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sparsebp_cli.auditor.ledger import AuditLedger
from sparsebp_cli.auditor.storage import key_of

_ATEN = torch.ops.aten
_CLEARING = (_ATEN.zero_, _ATEN._foreach_zero_, _ATEN.fill_)
# Clipping measures and scales the gradients of all parameters, also of those that nobody will update.
_MEASURING = (
    _ATEN._foreach_norm,  # noqa: SLF001 - an operator's name
    _ATEN._foreach_mul_,
    _ATEN.linalg_vector_norm,
    _ATEN.norm,
    _ATEN.mul_,
)


class GradientReads:
    """Gradients that nobody has looked at yet.

    Args:
        ledger: Whose passes are told.

    Attributes:
        unread: Storages of inputs' gradients.
        read: Of them, those that something read.
        gradients: Of parameters' gradients, by storage: their bit, and what keeps the number from others.
        looked_at: Bits of those that somebody outside of an optimizer took for more than their norm.
    """

    def __init__(self, ledger: AuditLedger) -> None:
        self._ledger = ledger
        self.unread: set[int] = set()
        self.read: set[int] = set()
        self.gradients: dict[int, tuple[int, StorageWeakRef]] = {}
        self.looked_at = 0

    def see(self, operator: Any, inputs: list[Tensor], outputs: list[Tensor], *, is_updating: bool) -> None:
        """Note what an operator outside of a backward pass reads.

        Args:
            operator: As ``__torch_dispatch__`` receives it.
            inputs: Of it.
            outputs: Of it.
            is_updating: Whether an optimizer runs it.
        """
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
            self.looked_at |= bits
            for key in touched:
                del self.gradients[key]


def _only_clears_or_views(operator: Any, known: set[int], outputs: list[Tensor]) -> bool:
    if operator._schema.is_mutable:  # noqa: SLF001 - the one place that tells
        return operator.overloadpacket in _CLEARING
    return bool(outputs) and all(key_of(tensor) in known for tensor in outputs)
