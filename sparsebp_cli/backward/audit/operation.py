"""One operator that ran inside a backward pass, and which of them worked for a gradient that autograd dropped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.backward.audit.saved import Kept

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


@dataclass
class Tape:
    """The operators of one backward pass in their order.

    Args:
        operations: Views apart, which compute nothing.
        references: Weak references to all that was written: no address is given away while the tape is kept.
        dropped: Weak references to what Functions returned for inputs that need no gradient, by storage.
    """

    operations: list[Operation] = field(default_factory=list)
    references: list[Any] = field(default_factory=list)
    dropped: dict[int, Any] = field(default_factory=dict)

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
