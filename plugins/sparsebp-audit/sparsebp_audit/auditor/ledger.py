"""Count the audit's work by module, kind of work, and the leaves that the work leads to."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from sparsebp_audit.auditor.operation import AGAIN, Operation


class Account(NamedTuple):
    """The key of work that is judged together."""

    module: str
    kind: str  # as in Operation
    parameter: str  # the parameter of a product; empty for none
    leaves: int  # the set of leaves that the work leads to


@dataclass
class AccountFlops:
    """FLOPs of one account."""

    flops: float = 0.0  # all FLOPs
    dead: float = 0.0  # for gradients that autograd dropped
    padding: float = 0.0  # of the rest, for zero gradient rows at padding positions
    zero: float = 0.0  # of the rest, for other zero rows
    whole: float = 0.0  # of the rest, for gradients that are zero in all rows; excluded from the two before

    def add(self, other: AccountFlops) -> None:
        """Add another account's work."""
        self.flops += other.flops
        self.dead += other.dead
        self.padding += other.padding
        self.zero += other.zero
        self.whole += other.whole


@dataclass
class RowCount:
    """Rows of the gradients that entered a Function."""

    ended: int = 0  # nonzero rows that entered it and that its result lacks
    all: int = 0  # nonzero rows that entered it

    def add(self, ended: int, among: int) -> None:
        """Count the rows of one call."""
        self.ended += ended
        self.all += among


@dataclass
class PassRecord:
    """One backward pass."""

    collected: int = 0  # parameters that got a gradient in it
    used: int = 0  # of them, used by an optimizer's step since
    discarded: int = 0  # of them, cleared before that
    work: dict[Account, AccountFlops] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        """Gradients neither used nor cleared so far."""
        return self.collected & ~self.used & ~self.discarded

    def add(self, operation: Operation, *, is_dead: bool, padding: float, zero: float) -> None:
        """Count an operation; ``padding`` and ``zero`` are the fractions of its rows that are zero at padding and
        elsewhere."""
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
    """All counts of an audit."""

    forward: Counter[str] = field(default_factory=Counter)  # FLOPs with gradients recorded, by module
    ungraded: Counter[str] = field(default_factory=Counter)  # FLOPs of forwards without gradients, by module
    products: Counter[str] = field(default_factory=Counter)  # forward FLOPs of products with a row for every position
    widths: dict[str, int] = field(default_factory=dict)  # width of the last product in a module's forward
    heads: dict[str, int] = field(default_factory=dict)  # modules whose output is a loss's logits, with their width
    labels: int = 0  # labels of all losses
    ignored: int = 0  # labels that a loss ignored
    positions: int = 0  # positions of all attention masks
    padded: int = 0  # padding positions
    real: int = 0  # non-padding positions, of batches with known labels or token ids
    unread: int = 0  # of them, after the last label of their example
    shared: int = 0  # of the rest, in a prefix that another example of the batch shares
    withholding: dict[int, str] = field(
        default_factory=dict
    )  # Functions that returned no gradient, by the bit of the leaf
    ended: dict[str, RowCount] = field(default_factory=lambda: defaultdict(RowCount))  # by name of the Function
    passes: list[PassRecord] = field(default_factory=list)  # outermost backward passes
    visited: set[int] = field(default_factory=set)  # numbers of nodes that a backward ran

    def use(self, leaves: int) -> None:
        """Count pending gradients as used, because other code than an optimizer read them for an unknown purpose."""
        for one in self.passes:
            one.used |= one.pending & leaves

    def total(self, *kinds: str) -> float:
        """Return the FLOPs of all backward passes for these kinds of work; without kinds, except repeated forwards."""
        return sum(
            work.flops
            for one in self.passes
            for account, work in one.work.items()
            if (account.kind in kinds if kinds else account.kind != AGAIN)
        )
