"""The engine: asks the policy at each site in the backward, carries its decision out, keeps all state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from sparsebp_cli.backward.binding import Binding, Work
from sparsebp_cli.backward.clock import Clock
from sparsebp_cli.backward.counter import Counter
from sparsebp_cli.backward.decision import Decision
from sparsebp_cli.backward.eager import EagerUpdate
from sparsebp_cli.backward.eager.choice import refuse_scaling
from sparsebp_cli.backward.part import Part, Reading
from sparsebp_cli.backward.report import Claim, Report, Route
from sparsebp_cli.backward.rounding import pad_up, round_up
from sparsebp_cli.backward.score.chosen import Chosen
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import GradientSelector, Selection, Site, Step

_OUTSIDE = (
    "a backward pass reached an attached model from outside: call engine.backward(loss) in place of loss.backward(), "
    "or put forward and backward inside engine.disabled() for dense gradients"
)


class Engine:
    """Carries out a policy's decisions in a model. Made by ``attach``.

    Backward passes of an attached model go through :meth:`backward`. A plain ``loss.backward()`` is refused: it would
    be neither dense nor what the policy meant at this step.

    Args:
        binding: The model's sites.
        decision: Who decides; None for dense.
        optimizer: Its steps advance the step number; None: every backward does.
        reference: Mask, then multiply densely.
        stores: Whether branches keep their linears' outputs; else their inputs, and the kept rows are multiplied again.
        seed: Of random decisions.
        num_steps: Optimizer steps of the whole training, where that is known.
        parts: What carries out the policies that are not asked at sites.
    """

    def __init__(
        self,
        binding: Binding,
        decision: Decision | None,
        *,
        optimizer: torch.optim.Optimizer | None,
        reference: bool,
        stores: bool = True,
        seed: int,
        num_steps: int | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        self.enabled, self.reference, self.notes = True, reference, dict[str, str]()
        self.stores, self.parts = stores, tuple(parts)
        self._binding, self._decision = binding, decision
        self._clock = Clock(optimizer, seed, num_steps, self._start_step)
        self._step: Step | None = None  # the backward under way
        self._counter = Counter.of(binding.names)
        self._attached = True
        self.eager = next((part for part in self.parts if isinstance(part, EagerUpdate)), None)
        binding.install(self)
        for part in self.parts:
            part.install(self)
        self._start_step(self.now())

    def backward(self, loss: Tensor, backward: Callable[..., object] | None = None, *, is_last: bool = True) -> None:
        """Run the backward pass, with the policy asked at every site.

        Args:
            loss: As for ``loss.backward()``.
            backward: What runs the pass instead of ``torch.Tensor.backward``, such as ``accelerator.backward``. Under
                ``eager_clip='exact'`` it is called twice, at first with ``retain_graph=True`` as well.
            is_last: Of the micro-batches whose gradients one step adds up. Under ``update='eager'`` parameters change
                in this one's pass; else it does not matter.

        Raises:
            UsageError: The engine is detached, or a backward is under way.
        """
        if not self._attached:
            raise UsageError("this engine is detached: attach the model again")
        if self._step is not None:
            raise UsageError("engine.backward was called inside engine.backward")
        self._counter.start_backward()
        self._step = self.now()
        try:
            if self.eager is None:
                self._differentiate(loss, backward)
            else:
                refuse_scaling(backward)
                # A probe changes nothing.
                updates = is_last and not self._clock.draw
                self.eager.run(loss, partial(self._differentiate, loss, backward), updates=updates)
        finally:
            self._step = None
        self._counter.num_backwards += 1
        self._clock.count_backward()

    def _differentiate(self, loss: Tensor, backward: Callable[..., object] | None, **options: Any) -> None:
        with self._binding.around(loss) as instead:
            (backward or torch.Tensor.backward)(loss if instead is None else instead, **options)

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

    def decide(self, site: Site, grad_NO: Tensor, work: Work) -> tuple[Tensor, Selection | None]:
        """Ask the policy, and count. Called by the sites.

        Args:
            site: Where.
            grad_NO: The gradient of the site's output.
            work: What the site's dense backward is.

        Returns:
            The gradient to go on with, and what is kept of it; None for everything.

        Raises:
            UsageError: The backward did not go through this engine.
        """
        if not self.enabled:
            return grad_NO, None
        self.check_inside()
        assert self._step is not None
        call = self._counter.next_call(site.name)
        policy, selection = self.policy_at(site), None
        if policy is not None and self._decision is not None and grad_NO.numel() > 0:
            step = replace(self._step, call=call)
            grad_NO, selection = self._decision.take(policy, grad_NO, site, step)
        kind, budget = (None, 1.0) if policy is None else (policy.selection, policy.budget)
        claim, most = work.claim(kind, budget), budget
        if self._clock.draw and grad_NO.numel() > 0:  # training does not wait for what only a probe reads
            padded = pad_up(selection, len(grad_NO), site.num_examples) if work.pads else 0.0
            most = max(padded, round_up(budget, selection, grad_NO))
        allowed = claim.claimed_flops if most == budget else work.claim(kind, most).claimed_flops
        self._counter.add(site, grad_NO, claim, allowed, selection)
        return grad_NO, selection

    def columns(self, **columns: Tensor) -> None:
        """Give token policies what a script's own loss takes out of the batch before the model sees it.

        Args:
            **columns: By name, each (B, T): ``labels``, and what the policy reads. They count until the next call.
        """
        for part in self.parts:
            if isinstance(part, Reading):
                part.give(**columns)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run forward and backward densely, as if no policy were attached; nothing is counted. Segments stay.

        Yields:
            None: As long as the model is dense.
        """
        before = self.enabled
        self._enable(False)
        try:
            yield
        finally:
            self._enable(before)

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
        clock = self._clock
        before = self._counter, clock.index, clock.micro_batch, clock.draw
        cut = {} if self._decision is None else dict(self._decision.cut)
        self._counter, clock.draw = Counter.of(self._binding.names), draw
        if self._decision is not None and not feedback:
            self._decision.cut = {}
        try:
            yield
        finally:
            self._counter, clock.index, clock.micro_batch, clock.draw = before
            if self._decision is not None:
                self._decision.cut = cut

    def report(self) -> Report:
        """Return what happened so far at every site; waits for the device.

        Returns:
            Plain numbers.
        """
        kept, entries = self._counter.kept()
        return Report(
            sites=tuple(counter.report(name) for name, counter in self._counter.sites.items()),
            not_covered=self._binding.not_covered,
            excluded=self._binding.excluded,
            kept_share=kept / entries if entries else None,
            num_backwards=self._counter.num_backwards,
            notes=tuple(self.notes.values()),
            route=self._counter.route,
            chosen=self._counter.chosen.total,
        )

    def claim(self) -> Claim:
        """Return the last backward's FLOPs at the sites, dense and as the policy claims, from shapes alone.

        Returns:
            Both counts.
        """
        return Claim(self._counter.last_dense_flops, self._counter.last_claimed_flops)

    def take_kept_share(self) -> float | None:
        """Return the share of gradient entries kept since this was last called; waits for the device.

        Returns:
            The share over all sites; None when no gradient arrived since.
        """
        return self._counter.take_kept_share()

    def add_route(self, route: Route) -> None:
        """Count where a router let the gradient go. Called by the binding.

        Args:
            route: Of one backward.
        """
        self._counter.add_route(route)

    def add_chosen(self, chosen: Chosen) -> None:
        """Count what was chosen of a batch before its forward. Called by the parts.

        Args:
            chosen: Of one forward.
        """
        self._counter.chosen.add(chosen)

    def take_chosen(self) -> Chosen | None:
        """Return what was chosen of the batches since this was last called.

        Returns:
            All forwards since together; None when nothing was chosen.
        """
        return self._counter.chosen.take()

    def take_route(self) -> Route | None:
        """Return where a router let the gradient go since this was last called.

        Returns:
            All backward passes since together; None without a router.
        """
        return self._counter.take_route()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to decide as this one would.

        Returns:
            The step number, the backward's number in it, and the tensors that error feedback will add; under an eager
            update also the norm of the last step's gradients.
        """
        cut = {} if self._decision is None else dict(self._decision.cut)
        norm = {} if self.eager is None else {"gradient_norm": self.eager.previous_norm}
        return {"index": self._clock.index, "micro_batch": self._clock.micro_batch, "cut": cut} | norm

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: From :meth:`state_dict`.

        Raises:
            UsageError: It is not such a state.
        """
        numbers = [state.get(key) for key in ("index", "micro_batch")]
        cut = state.get("cut")
        good = state.keys() == self.state_dict().keys() and all(
            type(number) is int and number >= 0 for number in numbers
        )
        if not good or not isinstance(cut, dict) or not all(isinstance(value, Tensor) for value in cut.values()):
            raise UsageError(f"not a state of the engine: {dict(state)!r}")
        self._clock.go_to(state["index"], state["micro_batch"])
        if self._decision is not None:
            self._decision.cut = dict(cut)
        if self.eager is not None:
            self.eager.previous_norm = state["gradient_norm"]

    def detach(self) -> None:
        """Give the model back as it was. Calling it again does nothing."""
        if self._attached:
            for part in reversed(self.parts):
                part.remove()
            self._binding.remove()
        self._attached = False
        self._clock.stop()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    def _enable(self, enabled: bool) -> None:
        self.enabled = enabled
        for part in self.parts:
            part.enable(enabled)

    def _start_step(self, step: Step) -> None:
        for part in self.parts:
            part.start_step(step)
