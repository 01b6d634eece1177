"""Assign counted work to findings: every FLOP and every byte belongs to at most one finding."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sparsebp_audit.auditor.ledger import Account, AccountFlops, AuditLedger, PassRecord
from sparsebp_audit.auditor.operation import DGRAD, WGRAD
from sparsebp_audit.auditor.parameter import ParameterHistory
from sparsebp_audit.auditor.runner import InputGradient
from sparsebp_audit.auditor.saved import Kept
from sparsebp_audit.auditor.session import Session
from sparsebp_audit.auditor.storage import has_died

FEWEST_STEPS = 2  # the first step may have a learning rate of zero, as in schedules with warm-up
WITHHELD = "withheld"  # no finding: nothing is wasted, but a parameter that should be trained is not
EXACT = ("unheld", "zero-rate", "unread-leaf")


@dataclass
class Verdict:
    """Leaves by finding; needed leaves belong to none."""

    bits: dict[str, int] = field(default_factory=dict)  # sets of leaves by kind of finding
    names: dict[str, list[str]] = field(default_factory=dict)  # names of the parameters among them
    without_gradient: list[str] = field(default_factory=list)  # parameters of an optimizer that are in no loss
    withheld: list[str] = field(default_factory=list)  # parameters in the loss that never got a gradient
    is_judged: bool = True  # whether enough steps were seen

    @property
    def useless(self) -> int:
        """All leaves whose gradient can be omitted without changing any used result."""
        found = 0
        for kind in EXACT:
            found |= self.bits.get(kind, 0)
        return found

    def kind_of(self, leaves: int) -> str | None:
        """Return the finding that work for some leaves belongs to; None if the work is needed."""
        if leaves and not leaves & ~self.useless:
            return next(kind for kind in EXACT if leaves & self.bits.get(kind, 0))
        return next((kind for kind, bits in self.bits.items() if leaves and not leaves & ~bits), None)


def judge_leaves(session: Session) -> Verdict:
    """Judge every leaf of a session that has ended."""
    parameters, verdict = session.parameters, Verdict()
    verdict.is_judged = parameters.num_steps >= FEWEST_STEPS
    collected = 0
    for one in session.passes:
        collected |= one.collected
    if verdict.is_judged:
        for history in parameters.histories.values():
            kind = _kind_of(history, collected & ~parameters.captured, session.watch.gradient_reads.read_elsewhere)
            if history.idle_bytes:
                verdict.names.setdefault("idle-state", []).append(history.name)
            if kind == "":
                verdict.without_gradient.append(history.name)
            elif kind == WITHHELD:
                verdict.withheld.append(history.name)
            elif kind is not None:
                verdict.bits[kind] = verdict.bits.get(kind, 0) | history.bit
                verdict.names.setdefault(kind, []).append(history.name)
    unread = _find_unread(session)
    if unread:
        verdict.bits["unread-leaf"] = unread
    return verdict


def _kind_of(history: ParameterHistory, collected: int, read_elsewhere: int) -> str | None:
    """Return the finding of a parameter: None if its gradient is needed, empty if it never got one."""
    if history.steps and not history.steps_with_gradient:
        if not history.tensor.requires_grad:
            return None
        if not history.bit & collected:
            return ""
        return None if history.has_moved or history.grad_bytes else WITHHELD
    if not history.bit & collected or history.has_moved:
        return None
    if not history.steps:
        return (
            None if history.bit & read_elsewhere else "unheld"
        )  # low-precision copies of trained weights are read, not held by an optimizer
    seen = (
        ("zero-rate", history.steps_with_gradient, history.steps_with_rate),
        ("zero-gradient", history.steps_with_rate, history.steps_with_nonzero),
        ("lost-update", history.steps_with_nonzero, 0),
    )
    return next((kind for kind, steps, others in seen if steps >= FEWEST_STEPS and not others), None)


def _find_unread(session: Session) -> int:
    """Return inputs whose gradient nothing read before it was freed; the last pass's gradient may still be read."""
    died, kept = 0, 0
    by_bit: dict[int, list[InputGradient]] = {}
    for one in session.runner.inputs:
        if one.reference is not None:
            by_bit.setdefault(one.bit, []).append(one)
    for bit, found in by_bit.items():
        *earlier, last = found
        for one in found:
            if one.key in session.watch.gradient_reads.read:
                kept |= bit
            elif one.reference is not None and has_died(one.reference):
                died |= bit
            elif one is not last or any(other.key == one.key for other in earlier):
                kept |= bit
    return died & ~kept


@dataclass
class Waste:
    """Wasted work, over all steps and passes."""

    # FLOPs and saved bytes by kind of finding and module.
    flops: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    saved: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    head_share: dict[str, float] = field(default_factory=dict)  # fraction of a head's rows with a zero gradient
    body_share: float = 0.0  # the same fraction over all other products


def judge_work(session: Session, verdict: Verdict) -> Waste:
    """Judge all FLOPs and saved tensors of a session that has ended."""
    waste = Waste()
    held = sum(history.bit for history in session.parameters.histories.values() if _waits_for_step(history))
    products: dict[str, AccountFlops] = defaultdict(AccountFlops)
    _resolve_zero_gradients(session.ledger.passes)
    for one in session.ledger.passes:
        for account, work in one.work.items():
            _judge_account(session, verdict, waste, one, held, account, work)
            if account.kind in (DGRAD, WGRAD):
                products[account.module].add(work)
    _judge_rows(session, waste, products)
    _judge_saved(session, verdict, waste, products)
    _judge_prefixes(session, waste, products)
    return waste


def _waits_for_step(history: ParameterHistory) -> bool:
    """Return whether an optimizer's step uses a parameter's gradient, instead of an update inside the backward."""
    return history.steps > 0 and (history.steps_with_gradient > 0 or not history.has_moved)


def _resolve_zero_gradients(passes: list[PassRecord]) -> None:
    """Count gradients that are zero in all rows as waste only if they are zero in every pass: the first gradient of a
    new low-rank adapter is zero once."""
    sums: dict[Account, AccountFlops] = defaultdict(AccountFlops)
    for one in passes:
        for account, work in one.work.items():
            sums[account].add(work)
    for one in passes:
        for account, work in one.work.items():
            if sums[account].whole == sums[account].flops - sums[account].dead:
                work.zero, work.whole = work.zero + work.whole, 0.0


def _judge_account(
    session: Session, verdict: Verdict, waste: Waste, one: PassRecord, held: int, account: Account, work: AccountFlops
) -> None:
    if work.dead:
        waste.flops[_dropped_kind(session, account)][account.module] += work.dead
    rest, leaves = work.flops - work.dead, account.leaves
    if not rest:
        return
    if leaves and not leaves & ~(one.discarded & held):
        waste.flops["discarded"][account.module] += rest
        return
    kind = verdict.kind_of(leaves)
    if kind is not None:
        waste.flops[kind][account.module] += rest
    elif account.module in session.ledger.heads:
        waste.flops["ignored-logits"][account.module] += work.padding + work.zero
    else:
        waste.flops["padding"][account.module] += work.padding
        waste.flops["zero-rows"][account.module] += work.zero


def _dropped_kind(session: Session, account: Account) -> str:
    history = session.parameters.by_name.get(account.parameter)
    is_frozen = account.kind == WGRAD and history is not None and not history.tensor.requires_grad
    return "frozen-wgrad" if is_frozen else "dropped-gradient"


def _judge_rows(session: Session, waste: Waste, products: dict[str, AccountFlops]) -> None:
    """Judge the forward of rows on which the loss does not depend: in heads, and at padding."""
    ledger = session.ledger
    shares = {name: _share(work.padding + work.zero, work) for name, work in products.items()}
    body = [work for name, work in products.items() if name not in ledger.heads]
    counted = sum(work.flops - work.dead for work in body)
    waste.body_share = sum(work.padding + work.zero for work in body) / counted if counted else 0.0
    for name in ledger.heads:
        waste.head_share[name] = shares.get(name, 0.0)
        waste.flops["ignored-logits"][name] += waste.head_share[name] * ledger.forward[name]
    if ledger.unread:  # their backward has zero rows, counted above
        for name, flops in ledger.products.items():
            if name not in ledger.heads:
                waste.flops["zero-rows"][name] += ledger.unread / ledger.real * flops * (1.0 - _padded_share(ledger))
    if not ledger.padded or not any(work.padding for work in products.values()):
        return
    padded = ledger.padded / ledger.positions
    for name, flops in ledger.products.items():
        if name not in ledger.heads:
            share = _share(products[name].padding, products[name]) if name in products else padded
            waste.flops["padding"][name] += min(share, padded) * flops


def _padded_share(ledger: AuditLedger) -> float:
    return ledger.padded / ledger.positions if ledger.positions else 0.0


def _judge_prefixes(session: Session, waste: Waste, products: dict[str, AccountFlops]) -> None:
    """Judge the rows that several examples share, for products that no other finding counts."""
    ledger = session.ledger
    if not ledger.shared:
        return
    share = ledger.shared / (ledger.real - ledger.unread)
    for name, flops in ledger.products.items():
        if name not in ledger.heads:
            wasted = sum(by_module.get(name, 0.0) for by_module in waste.flops.values())
            work = flops + (products[name].flops if name in products else 0.0)
            waste.flops["shared-prefix"][name] += share * max(0.0, work - wasted)


def _share(part: float, work: AccountFlops) -> float:
    rest = work.flops - work.dead
    return part / rest if rest else 0.0


def _judge_saved(session: Session, verdict: Verdict, waste: Waste, products: dict[str, AccountFlops]) -> None:
    widths = {session.ledger.heads[name]: share for name, share in waste.head_share.items()}
    has_padding = any(work.padding for work in products.values())
    known = session.saved_of_passes()
    unread = {(kept.module, kept.shape) for kept in known if kept.alive == 0 and not kept.is_unpacked}
    for kept in known:
        kind, share = _kind_of_kept(session, verdict, waste, kept, unread), 1.0
        if kind is None and kept.need:
            if len(kept.shape) > 1 and kept.shape[-1] in widths:
                kind, share = "ignored-logits", widths[kept.shape[-1]]
            elif kept.padding_share and has_padding:
                kind, share = "padding", kept.padding_share
            elif kept.zero_share:
                kind = "ignored-logits" if kept.module in session.ledger.heads else "zero-rows"
                share = kept.zero_share
        if kind is not None and share:
            waste.saved[kind][kept.module] += kept.num_bytes * share


def _kind_of_kept(
    session: Session, verdict: Verdict, waste: Waste, kept: Kept, unread: set[tuple[str, tuple[int, ...]]]
) -> str | None:
    """Return the finding for a whole saved storage; None if needed work read it, or may read it."""
    if not kept.is_unpacked:
        if kept.alive and (kept.module, kept.shape) not in unread:
            return None  # the graph still exists, and a backward may read it
        visited = any(number in session.ledger.visited for number in kept.numbers)
        return "unread-saved" if visited else "unvisited-saved"
    if not kept.num_reads:
        return None
    if not kept.need:
        return "frozen-wgrad" if waste.flops["frozen-wgrad"][kept.module] else "dropped-gradient"
    kind = verdict.kind_of(kept.need)
    return kind if kind in ("unheld", "zero-rate", "unread-leaf") else None
