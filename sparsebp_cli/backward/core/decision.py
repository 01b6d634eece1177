"""Decisions at sites: calls the policy of a site when a gradient arrives there, and counts the kept entries.

This module implements the options that all policies share: restriction to sites and layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparsebp_cli.backward.core.allowance import round_up
from sparsebp_cli.backward.core.extension import SiteCost, SplitCost
from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.backward.core.report import FlopEstimate, SiteReport
from sparsebp_cli.backward.core.scope import Scope
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import (
    Budget,
    GradientSelector,
    InformedSelector,
    Policy,
    Reading,
    Seen,
    Selection,
    Site,
    SiteGradient,
    Split,
    Stateful,
    Step,
    returned,
)

_WHOLE = Budget(1.0, 1.0)
_OUTSIDE = (
    "loss.backward() ran through an attached model: call engine.backward(loss) instead, or put forward and "
    "backward inside engine.disabled() for dense gradients"
)


@dataclass
class SiteCounter:
    """Totals of one site: numbers on the host, and ``kept`` as a tensor where reading it would synchronise."""

    layer: int | None = None
    calls: int = 0
    rows: int = 0
    entries: int = 0
    kept: float | Tensor = 0
    dense_flops: float = 0.0
    claimed_flops: float = 0.0
    allowed_flops: float = 0.0
    arrived_flops: float = 0.0

    def report(self, name: str) -> SiteReport:
        """Return the totals as plain numbers."""
        return SiteReport(
            name=name,
            layer=self.layer,
            calls=self.calls,
            rows=self.rows,
            entries=self.entries,
            kept_share=float(self.kept) / self.entries if self.entries else None,
            dense_flops=self.dense_flops,
            claimed_flops=self.claimed_flops,
            allowed_flops=self.allowed_flops,
            arrived_flops=self.arrived_flops,
        )


@dataclass
class SiteCounters:
    """Totals of all sites, of the last backward, and since the last call of ``take_kept_share``."""

    by_name: dict[str, SiteCounter]
    last_dense_flops: float = 0.0
    last_claimed_flops: float = 0.0
    _calls: dict[str, int] = field(default_factory=dict)  # calls in this backward, by site
    _taken: tuple[float, int] = (0.0, 0)  # kept entries and all entries at the last call of take_kept_share

    @classmethod
    def of(cls, names: Iterable[str]) -> SiteCounters:
        """Return counters that list these sites even if no gradient ever arrives at them."""
        return cls({name: SiteCounter() for name in names})

    def start_backward(self) -> None:
        """Reset the numbers of the last backward."""
        self._calls = {}
        self.last_dense_flops = self.last_claimed_flops = 0.0

    def next_call(self, name: str) -> int:
        """Return the index, from 0, of this gradient among the gradients of the same site in this backward."""
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return call

    def add(
        self,
        site: Site,
        grad_NO: Tensor,
        claim: FlopEstimate,
        allowed: float,
        selection: Selection | Split | None,
        dense_rows: int | None = None,
    ) -> None:
        """Count one gradient.

        ``allowed`` is the estimate with counts rounded up. ``dense_rows`` is the number of rows that the dense backward
        has for this gradient; None: as many as the gradient.
        """
        arrived, dense_flops, num_entries = claim.dense_flops, claim.dense_flops, grad_NO.numel()
        if dense_rows is not None:
            dense_flops = arrived * dense_rows / max(1, grad_NO.shape[0])
            num_entries = dense_rows * grad_NO.shape[1]
        counter = self.by_name.setdefault(site.name, SiteCounter())
        counter.layer = site.layer
        counter.calls += 1
        counter.rows += grad_NO.shape[0]
        counter.entries += num_entries
        counter.kept = counter.kept + (grad_NO.numel() if selection is None else selection.num_kept(grad_NO))
        counter.dense_flops += dense_flops
        counter.arrived_flops += arrived
        counter.claimed_flops += claim.claimed_flops
        counter.allowed_flops += allowed
        self.last_dense_flops += claim.dense_flops
        self.last_claimed_flops += claim.claimed_flops

    def kept(self) -> tuple[float, int]:
        """Return kept entries and all entries over all sites; synchronises with the device."""
        sites = self.by_name.values()
        tensors = [site.kept.double() for site in sites if isinstance(site.kept, Tensor)]
        kept = sum(float(site.kept) for site in sites if not isinstance(site.kept, Tensor))
        for device in {tensor.device for tensor in tensors}:  # one copy for each device
            kept += float(torch.stack([tensor for tensor in tensors if tensor.device == device]).sum())
        return kept, sum(site.entries for site in sites)

    def take_kept_share(self) -> float | None:
        """Return the fraction kept since the last call; None if no gradient arrived since."""
        (kept, entries), (taken_kept, taken_entries) = self.kept(), self._taken
        self._taken = kept, entries
        return (kept - taken_kept) / (entries - taken_entries) if entries > taken_entries else None


@dataclass(frozen=True)
class _Rule:
    """The policy of a site at a step, with its properties. They are stored because a policy computes them each time."""

    selector: GradientSelector  # the user's policy
    policy: GradientSelector  # with the step's values of schedules
    selection: type[Selection] | None
    budget: Budget | None  # None: it differs between sites and steps
    has_state: bool
    step: int | None  # the step to which this applies; None: to all

    @classmethod
    def of(cls, selector: GradientSelector, step: Step) -> _Rule:
        policy = selector.at(step)
        # A policy computes its properties at each access, so read a constant budget only once. See decision 1.
        is_fixed = type(policy).budget_at is GradientSelector.budget_at
        budget = Budget.of(policy.budget) if is_fixed else None
        of_step = step.index if selector.schedules else None
        return cls(selector, policy, policy.selection, budget, isinstance(policy, Stateful), of_step)


class SiteDecisions:
    """Calls the selector of each site, and counts what it keeps.

    No site may belong to two selectors, see :meth:`check_disjoint`. ``num_layers`` is 0 for a model without known
    layers.
    """

    has_selectors: bool
    counters: SiteCounters
    states: PolicyStates

    def __init__(self, selectors: Sequence[GradientSelector], num_layers: int) -> None:
        self.has_selectors = bool(selectors)
        self.enabled = True
        self.step: Step | None = None  # the step of the running backward
        self.counters = SiteCounters({})
        self.states = PolicyStates()
        self._scopes = [(selector, Scope(selector, num_layers)) for selector in selectors]
        self._selectors: dict[str, GradientSelector | None] = {}  # by site; None: no selector names it
        self._rules: dict[str, _Rule | None] = {}
        self._checked: set[str] = set()  # sites at which the values of a selection were checked

    def check_disjoint(
        self,
        names: Sequence[str],
        layer_of: Callable[[str], int | None],
        others: Sequence[tuple[Policy, Scope]] = (),
    ) -> None:
        """Refuse a pattern that matches no site, and a site that belongs to two policies: selectors, or a selector and
        one of ``others`` (:class:`UsageError`).
        """
        for _, scope in self._scopes:
            scope.check_patterns(names)
        for name in names:
            found = [policy for policy, scope in (*self._scopes, *others) if scope.contains(name, layer_of(name))]
            if len(found) > 1:
                one, two = (type(policy).__name__ for policy in found[:2])
                raise UsageError(f"{one} and {two} cannot both act at {name!r}: separate them with where= or layers=")

    def sites_of(self, selector: GradientSelector, sites: Iterable[Site]) -> list[Site]:
        """Return the sites among ``sites`` at which a selector decides."""
        return [site for site in sites if self._selector_at(site) is selector]

    def check_inside(self) -> None:
        """Refuse a backward that does not run through the engine (:class:`UsageError`). Sites call this."""
        if self.enabled and self.step is None:
            raise UsageError(_OUTSIDE)

    def policy_at(self, site: Site, step: Step) -> GradientSelector | None:
        """Return the policy at a site, with the step's values of schedules; None if the site stays dense."""
        rule = self._rule_at(site, step)
        return None if rule is None else rule.policy

    def reads_at(self, site: Site) -> frozenset[Reading]:
        """Return the tensors that the policy at a site reads besides the gradient. Sites call this in the forward."""
        selector = self._selector_at(site)
        return selector.reads if isinstance(selector, InformedSelector) else frozenset()

    def decide(self, site: Site, seen: Seen, work: SiteCost, dense_rows: int | None = None) -> Selection | Split | None:
        """Call the policy at a site and count the result. Sites call this.

        ``work`` is the cost of the site's dense backward. ``dense_rows`` is the number of rows that the dense backward
        has for this gradient; None: as many as the gradient. Returns the selection, a :class:`Split` at linears alone;
        None keeps everything. Raises :class:`UsageError` if the backward does not run through the engine.
        """
        # This runs at each site of each backward. In a small model, Python calls take longer than the products.
        grad_NO: Tensor = seen.grad_NO
        selection: Selection | Split | None = None
        if not self.enabled:
            return None
        step = self.step
        if step is None:
            raise UsageError(_OUTSIDE)
        rule, budget, call = self._rule_at(site, step), _WHOLE, self.counters.next_call(site.name)
        if rule is not None and rule.has_state:
            step = replace(step, call=call, state=self.states.of(rule.selector))
        elif call:
            step = replace(step, call=call)
        if rule is not None:
            budget = rule.budget or Budget.of(rule.policy.budget_at(site, step))
            if grad_NO.numel() > 0:
                # A decision sees the gradient with the loss scale, a measure without it. See decision 18.
                if rule.has_state and self.states.watches(rule.selector, SiteGradient):
                    whole = replace(seen, grad_NO=self.states.unscale(grad_NO))
                    self.states.see(rule.selector, SiteGradient(site.name, whole), step)
                selection = self._ask(rule, seen, site, step)
        claim = allowed = _claim(work, rule, budget)
        if step.draw and grad_NO.numel() > 0:  # only in probes, which alone read it: it synchronises with the device
            allowed = _claim(work, rule, _allow(budget, selection, grad_NO))
        self.counters.add(site, grad_NO, claim, allowed.claimed_flops, selection, dense_rows)
        return selection

    def _selector_at(self, site: Site) -> GradientSelector | None:
        if site.name not in self._selectors:  # match patterns only once
            found = (selector for selector, scope in self._scopes if scope.contains(site.name, site.layer))
            self._selectors[site.name] = next(found, None)
        return self._selectors[site.name]

    def _rule_at(self, site: Site, step: Step) -> _Rule | None:
        name = site.name
        if name not in self._rules:
            selector = self._selector_at(site)
            self._rules[name] = None if selector is None else _Rule.of(selector, step)
        rule = self._rules[name]
        if rule is not None and rule.step not in (None, step.index):
            rule = self._rules[name] = _Rule.of(rule.selector, step)
        return rule

    def _ask(self, rule: _Rule, seen: Seen, site: Site, step: Step) -> Selection | Split | None:
        policy = rule.policy
        form: type[Selection] | type[Split] = rule.selection or Selection
        if isinstance(policy, InformedSelector):
            chosen = policy.choose(seen, site, step)
            form = form if policy.split is None else Split
        else:
            chosen = policy.select(seen.grad_NO, site, step)
        # Values are read once for each site, because this waits for the device.
        if chosen is not None and (site.name not in self._checked or not isinstance(chosen, form)):
            asked = f"{type(policy).__name__}.{'choose' if isinstance(policy, InformedSelector) else 'select'}"
            returned.require_type(f"{asked} at {site.name!r}", chosen, form, None)
            if returned.check_selection(f"{asked} at {site.name!r}", chosen, seen.grad_NO):
                self._checked.add(site.name)
        return chosen


def _claim(work: SiteCost, rule: _Rule | None, budget: Budget) -> FlopEstimate:
    """Return the estimated FLOPs under a policy, from the types and budget that it declares."""
    if rule is None:
        return work.claim(None, 1.0)
    split = rule.policy.split if isinstance(rule.policy, InformedSelector) else None
    if split is None:
        return work.claim(rule.selection, max(budget.dgrad, budget.wgrad))
    assert isinstance(work, SplitCost), "attach should have refused it"
    return work.claim_split((split.dgrad, budget.dgrad), (split.wgrad, budget.wgrad))


def _allow(budget: Budget, selection: Selection | Split | None, grad_NO: Tensor) -> Budget:
    """Return the fractions that the policy may execute without exceeding its estimate."""
    parts = selection if isinstance(selection, Split) else Split(selection, selection)
    dgrad, wgrad = (
        round_up(share, part, grad_NO, is_mean=budget.is_mean)
        for share, part in ((budget.dgrad, parts.dgrad), (budget.wgrad, parts.wgrad))
    )
    return Budget(dgrad, wgrad, budget.is_mean)
