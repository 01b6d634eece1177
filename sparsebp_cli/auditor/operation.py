"""One operator that ran inside a backward pass, and which of them worked for a gradient that autograd dropped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparsebp_cli.auditor.reach import UNKNOWN

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.auditor.saved import Kept

DGRAD, WGRAD, OTHER, AGAIN = "dgrad", "wgrad", "other", "again"


@dataclass
class Operation:
    """One operator.

    Args:
        reads: Storages that it reads.
        writes: Storages that it makes or changes.
        module: To which it belongs.
        leaves: That its result leads to.
        kind: ``dgrad``, ``wgrad``, ``other``, or ``again`` for a forward that runs again.
        parameter: Whose product it is; empty for none.
        flops: That it executed.
        num_rows: Rows of the gradient that it multiplies; 0 when they were not looked at.
        zero_N: Which of them are zero, one truth value a row; None when they were not looked at.
        kept: Saved activations that it reads.
        number: Of its node.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    module: str
    leaves: int
    kind: str = OTHER
    parameter: str = ""
    flops: int = 0
    num_rows: int = 0
    zero_N: Tensor | None = None
    kept: tuple[Kept, ...] = ()
    number: int = -1

    def zero_shares(self, padding_N: Tensor | None) -> tuple[float, float]:
        """Return the shares of its rows that are zero: at padding positions, and elsewhere; waits for the device.

        Args:
            padding_N: Which positions are padding; None for none.

        Returns:
            Both, in [0, 1].
        """
        if self.zero_N is None or not self.num_rows:
            return 0.0, 0.0
        zero, padding = int(self.zero_N.sum()), 0
        if padding_N is not None and padding_N.numel() == self.num_rows:
            padding = int((self.zero_N & padding_N.to(self.zero_N.device)).sum())
        return padding / self.num_rows, (zero - padding) / self.num_rows


@dataclass
class OperatorTape:
    """The operators of one backward pass in their order.

    Args:
        operations: Views apart, which compute nothing.
        references: Weak references to all that was written: no address is given away while the tape is kept.
        dropped: Weak references to what Functions returned for inputs that need no gradient, by storage.
        hides_from: Number of the first node that ran a backward pass of its own; what it leads to is not in the graph,
            and only nodes with larger numbers can lead to it. None without one.
    """

    operations: list[Operation] = field(default_factory=list)
    references: list[Any] = field(default_factory=list)
    dropped: dict[int, Any] = field(default_factory=dict)
    hides_from: int | None = None

    def hide(self, number: int) -> None:
        """Note that a node runs a backward pass of its own, as reentrant checkpointing does.

        Args:
            number: The node's.
        """
        self.hides_from = number if self.hides_from is None else min(number, self.hides_from)

    def settle(self) -> None:
        """Give what may lead to a hidden graph an unknown end; a weight's own product leads to the weight alone."""
        if self.hides_from is not None:
            for operation in self.operations:
                if operation.number >= self.hides_from and operation.kind != WGRAD:
                    operation.leaves |= UNKNOWN

    def find_dead(self) -> set[int]:
        """Return which operations worked for a dropped gradient alone, by their place on the tape.

        A value whose readers are not known (a kernel of somebody's own, the host) counts as used.
        """
        gone = {key for key, reference in self.dropped.items() if reference.expired()}
        if not gone:
            return set()
        dead: set[int] = set()
        needed: dict[int, bool] = {}  # by storage: whether a reader further on is alive
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
