"""Record the operators of a backward pass, and find those that worked for a gradient that autograd dropped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

from sparsebp_audit.auditor.reach import UNKNOWN
from sparsebp_audit.auditor.storage import has_died

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_audit.auditor.saved import Kept

DGRAD, WGRAD, OTHER, AGAIN = "dgrad", "wgrad", "other", "again"


@dataclass
class Operation:
    """One operator."""

    reads: tuple[int, ...]  # storages that it reads
    writes: tuple[int, ...]  # storages that it creates or changes
    module: str
    leaves: int  # the set of leaves to which its result leads
    kind: str = OTHER  # `again` is a repeated forward
    parameter: str = ""  # the parameter of a product; empty for none
    flops: int = 0
    num_rows: int = 0  # rows of the gradient in a product; 0 if not checked
    zero_N: Tensor | None = None  # which of these rows are zero; None if not checked
    kept: tuple[Kept, ...] = ()  # saved activations that it reads
    number: int = -1  # number of its node

    def zero_shares(self, padding_N: Tensor | None) -> tuple[float, float]:
        """Return the fractions of its rows that are zero at padding and elsewhere; synchronises with the device."""
        if self.zero_N is None or not self.num_rows:
            return 0.0, 0.0
        zero, padding = int(self.zero_N.sum()), 0
        if padding_N is not None and padding_N.numel() == self.num_rows:
            padding = int((self.zero_N & padding_N.to(self.zero_N.device)).sum())
        return padding / self.num_rows, (zero - padding) / self.num_rows


@dataclass
class OperatorTape:
    """The operators of one backward pass in order."""

    operations: list[Operation] = field(default_factory=list)  # without views, which compute nothing
    references: list[StorageWeakRef] = field(
        default_factory=list
    )  # weak references to written storages keep addresses unique
    dropped: dict[int, StorageWeakRef] = field(
        default_factory=dict
    )  # results of Functions for inputs that need no gradient
    # Number of the first node that ran a separate backward pass. The graph does not contain the leaves of that pass;
    # only nodes with larger numbers can lead to it.
    hides_from: int | None = None

    def hide(self, number: int) -> None:
        """Record that a node runs a separate backward pass, as reentrant checkpointing does."""
        self.hides_from = number if self.hides_from is None else min(number, self.hides_from)

    def mark_hidden(self) -> None:
        """Add the unknown leaf to operations that may lead to a hidden graph; a wgrad leads only to its weight."""
        if self.hides_from is not None:
            for operation in self.operations:
                if operation.number >= self.hides_from and operation.kind != WGRAD:
                    operation.leaves |= UNKNOWN

    def find_dead(self) -> set[int]:
        """Return the indices of operations that worked only for a dropped gradient. A value with unknown readers (a
        custom kernel, the host) counts as used."""
        gone = {key for key, reference in self.dropped.items() if has_died(reference)}
        if not gone:
            return set()
        dead: set[int] = set()
        needed: dict[int, bool] = {}  # by storage: a later reader is needed
        for place in range(len(self.operations) - 1, -1, -1):
            operation = self.operations[place]
            if operation.writes and all(_is_dead(key, gone, needed) for key in operation.writes):
                dead.add(place)
            _read(operation.reads, needed, is_alive=place not in dead)
        return dead


def _is_dead(key: int, gone: set[int], needed: dict[int, bool]) -> bool:
    if key in needed:
        return not needed[key]
    return key in gone


def _read(keys: Iterable[int], needed: dict[int, bool], *, is_alive: bool) -> None:
    for key in keys:
        needed[key] = needed.get(key, False) or is_alive
