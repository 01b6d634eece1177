"""What was counted, by module, kind of work and the leaves that the work leads to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from sparsebp_cli.auditor.operation import AGAIN, Operation


class Account(NamedTuple):
    """Work that is judged alike.

    Args:
        module: To which it belongs.
        kind: Of :class:`~sparsebp_cli.auditor.operation.Operation`.
        parameter: Whose product it is; empty for none.
        leaves: That it leads to.
    """

    module: str
    kind: str
    parameter: str
    leaves: int


@dataclass
class AccountFlops:
    """FLOPs of one account.

    Args:
        flops: All.
        dead: Of them, for gradients that autograd dropped.
        padding: Of the others, with zero rows of the gradient at padding positions.
        zero: Of the others, with other zero rows of the gradient.
        whole: Of the others, with a gradient that is zero in all of its rows; part of neither of the two.
    """

    flops: float = 0.0
    dead: float = 0.0
    padding: float = 0.0
    zero: float = 0.0
    whole: float = 0.0

    def add(self, other: AccountFlops) -> None:
        """Add another account's work."""
        self.flops += other.flops
        self.dead += other.dead
        self.padding += other.padding
        self.zero += other.zero
        self.whole += other.whole


@dataclass
class PassRecord:
    """One backward pass.

    Args:
        collected: Parameters that it gave a gradient.
        used: Of them, those that an optimizer's step took since.
        discarded: Of them, those that were cleared before.
        work: By account.
    """

    collected: int = 0
    used: int = 0
    discarded: int = 0
    work: dict[Account, AccountFlops] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        """Gradients of which nobody knows yet what becomes of them."""
        return self.collected & ~self.used & ~self.discarded

    def add(self, operation: Operation, *, is_dead: bool, padding: float, zero: float) -> None:
        """Count an operation.

        Args:
            operation: Counted for its FLOPs.
            is_dead: Whether it worked for a dropped gradient.
            padding: Share of its rows that are zero at padding positions.
            zero: Share of its rows that are zero elsewhere.
        """
        account = Account(operation.module, operation.kind, operation.parameter, operation.leaves)
        work = self.work.setdefault(account, AccountFlops())
        work.flops += operation.flops
        if is_dead:
            work.dead += operation.flops
        elif padding + zero == 1.0:
            work.whole += operation.flops
        else:
            work.padding += operation.flops * padding
            work.zero += operation.flops * zero


@dataclass
class AuditLedger:
    """Everything that was counted.

    Args:
        forward: FLOPs where gradients were recorded, by module.
        ungraded: FLOPs of forwards without gradients, by module.
        products: Of each module's forward, FLOPs of products with a weight that have a row for every position.
        widths: Of each module, the width of the last product of its forward.
        heads: Modules whose output is a loss's logits.
        labels: Of all losses that were seen.
        ignored: Of them, those that a loss left out.
        positions: Of the attention masks that were seen.
        padded: Of them, padding.
        passes: Outermost backward passes.
        visited: Numbers of nodes that a backward ran.
    """

    forward: Counter[str] = field(default_factory=Counter)
    ungraded: Counter[str] = field(default_factory=Counter)
    products: Counter[str] = field(default_factory=Counter)
    widths: dict[str, int] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    labels: int = 0
    ignored: int = 0
    positions: int = 0
    padded: int = 0
    passes: list[PassRecord] = field(default_factory=list)
    visited: set[int] = field(default_factory=set)

    def use(self, leaves: int) -> None:
        """Note that somebody looked at gradients: what they are used for nobody knows, and so it counts as used.

        Args:
            leaves: Whose.
        """
        for one in self.passes:
            one.used |= one.pending & leaves

    def total(self, *kinds: str) -> float:
        """Return the FLOPs of all backward passes of some kinds; without any, of all but what ran again."""
        return sum(
            work.flops
            for one in self.passes
            for account, work in one.work.items()
            if (account.kind in kinds if kinds else account.kind != AGAIN)
        )
