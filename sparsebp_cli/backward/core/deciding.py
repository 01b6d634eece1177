"""What sites and parts ask of an engine: the policy's decision at each site, and to be counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from torch import Tensor

from sparsebp_cli.backward.core.binding import Binding, Work
from sparsebp_cli.backward.core.chosen import Chosen
from sparsebp_cli.backward.core.clock import Clock
from sparsebp_cli.backward.core.counters import Counter
from sparsebp_cli.backward.core.report import Claim, Report, Route
from sparsebp_cli.backward.core.rounding import allowed_share
from sparsebp_cli.backward.core.selector_runner import Decision
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import GradientSelector, Selection, Site, Step

_OUTSIDE = (
    "a backward pass reached an attached model from outside: call engine.backward(loss) in place of loss.backward(), "
    "or put forward and backward inside engine.disabled() for dense gradients"
)


@dataclass
class ShortForward:
    """A forward that runs some positions or examples in place of all, for the count of what was left out.

    Args:
        num_rows: Positions of the batch that it was given, B*T; None: it runs all of them.
        scale: Examples of the batch over those that it runs.
    """

    num_rows: int | None = None
    scale: float = 1.0
    _called: set[str] = field(default_factory=set)

    def dense_rows(self, name: str, num_rows: int) -> int:
        """Return the rows of the dense forward that a call of a linear stands for."""
        # Of several calls for parts of the positions, the first stands for all of them.
        if self.num_rows is not None:
            num_rows = 0 if name in self._called else self.num_rows
            self._called.add(name)
        return round(num_rows * self.scale)


class Deciding:
    """Asks the policy while a backward is under way, and counts what it kept; an engine is one.

    Args:
        binding: The model's sites.
        decision: Who decides; None for dense.
        clock: Knows the step.
    """

    def __init__(self, binding: Binding, decision: Decision | None, clock: Clock) -> None:
        self.enabled, self.notes = True, dict[str, str]()
        self._binding, self._decision, self._clock = binding, decision, clock
        self._counter = Counter.of(binding.names)
        self._step: Step | None = None  # the backward under way
        # Numbers of examples in the model's last forward; empty: not known; None: nobody asks.
        self.batch_sizes: frozenset[int] | None = None if decision is None else frozenset()
        self.leaves_out = False  # whether a forward has left something out so far
        self.forward: ShortForward | None = None  # the forward under way, where it leaves something out

    def now(self) -> Step:
        """Return the step of the backward under way, or of the next one."""
        return self._clock.now()

    def check_inside(self) -> None:
        """Refuse a backward that did not go through this engine. Called by the sites.

        Raises:
            UsageError: It did not.
        """
        if self.enabled and self._step is None:
            raise UsageError(_OUTSIDE)

    def policy_at(self, site: Site) -> GradientSelector | None:
        """Return who will decide at a site in the backward under way, or the next one; None: dense there.

        Args:
            site: Where.

        Returns:
            The policy, with the share that it keeps at this step.
        """
        if self._decision is None or not self.enabled:
            return None
        return self._decision.policy_at(site, self.now())

    def decide(
        self, site: Site, grad_NO: Tensor, work: Work, dense_rows: int | None = None
    ) -> tuple[Tensor, Selection | None]:
        """Ask the policy, and count. Called by the sites.

        Args:
            site: Where.
            grad_NO: The gradient of the site's output.
            work: What the site's dense backward is.
            dense_rows: Rows of the dense backward that the gradient stands for; None: its own.

        Returns:
            The gradient to go on with, and what is kept of it; None for everything.

        Raises:
            UsageError: The backward did not go through this engine.
        """
        if not self.enabled:
            return grad_NO, None
        self.check_inside()
        assert self._step is not None
        step = replace(self._step, call=self._counter.next_call(site.name))
        policy, selection = self.policy_at(site), None
        if policy is not None and self._decision is not None and grad_NO.numel() > 0:
            grad_NO, selection = self._decision.take(policy, grad_NO, site, step)
        kind, budget = (None, 1.0) if policy is None else (policy.selection, policy.budget)
        claim = allowed = work.claim(kind, budget)
        if self._clock.draw and grad_NO.numel() > 0:  # training does not wait for what only a probe reads
            allowed = work.claim(kind, allowed_share(budget, selection, grad_NO, site, pads=work.pads))
        self._counter.add(site, grad_NO, claim, allowed.claimed_flops, selection, dense_rows)
        return grad_NO, selection

    @contextmanager
    def short_forward(self, *, num_rows: int | None = None, scale: float = 1.0) -> Iterator[None]:
        """Count sites as what a forward stands for that leaves positions or examples out. Called by the parts.

        Args:
            num_rows: B*T, where it runs some positions alone.
            scale: Examples over those that it runs.

        Yields:
            None: As long as the forward lasts.
        """
        outer, self.leaves_out = self.forward, True
        self.forward = ShortForward(num_rows, scale * (1.0 if outer is None else outer.scale))
        try:
            yield
        finally:
            self.forward = outer

    @contextmanager
    def probing(self, draw: int = 1, *, feedback: bool = True) -> Iterator[None]:
        """Apply the policy without a trace: step, report and kept share are afterwards as they were before.

        Inside, :meth:`report`, :meth:`claim`, :meth:`take_kept_share` and :meth:`take_route` speak of the probe alone.

        Args:
            draw: Of random policies; other than 0, so that training's decisions are not used up or repeated.
            feedback: Whether error feedback adds what training has cut.

        Yields:
            None: As long as the probe lasts.
        """
        decision = nullcontext() if self._decision is None else self._decision.aside(feedback=feedback)
        before, self._counter = self._counter, Counter.of(self._binding.names)
        try:
            with self._clock.aside(draw), decision:
                yield
        finally:
            self._counter = before

    def report(self) -> Report:
        """Return what happened so far at every site, as plain numbers; waits for the device."""
        return self._counter.report(self._binding, self.notes)

    def claim(self) -> Claim:
        """Return the last backward's FLOPs at the sites, dense and as the policy claims, from shapes alone."""
        return Claim(self._counter.last_dense_flops, self._counter.last_claimed_flops)

    def take_kept_share(self) -> float | None:
        """Return the share of gradient entries kept since the last call, over all sites; waits for the device.

        None when no gradient arrived since.
        """
        return self._counter.take_kept_share()

    def take_chosen(self) -> Chosen | None:
        """Return what was chosen of all batches since the last call together; None when nothing was."""
        return self._counter.chosen.take()

    def take_route(self) -> Route | None:
        """Return where a router let the gradients of all passes since the last call go; None without a router."""
        return self._counter.take_route()

    def add_chosen(self, chosen: Chosen) -> None:
        """Count what was chosen of a batch before its forward. Called by the parts."""
        self._counter.chosen.add(chosen)

    def add_route(self, route: Route) -> None:
        """Count where a router let the gradient of one backward go. Called by the binding."""
        self._counter.add_route(route)
