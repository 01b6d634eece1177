"""The engine: asks the policy at each site in the backward, carries its decision out, keeps all state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.counter import Counter, SiteCounter
from sparsebp_cli.backward.linear import Needs
from sparsebp_cli.backward.report import Claim, Report
from sparsebp_cli.backward.site import BoundSite, FoundSites
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import BackwardShare, GradientSelector, Selection, Site, Step

_DENSE = BackwardShare(1.0, 1.0)


class Engine:
    """Carries out a policy's decisions in a model. Made by ``attach``.

    Backward passes of an attached model go through :meth:`backward`. A plain ``loss.backward()`` is refused: it would
    be neither dense nor what the policy meant at this step.

    Args:
        found: The model's linears.
        selector: Who decides; None for dense.
        optimizer: Its steps advance the step number; None: every backward does.
        reference: Mask, then multiply densely.
        seed: Of random decisions.
    """

    def __init__(
        self,
        found: FoundSites,
        selector: GradientSelector | None,
        *,
        optimizer: torch.optim.Optimizer | None,
        reference: bool,
        seed: int,
    ) -> None:
        self.enabled, self.reference = True, reference
        self._found, self._selector, self._seed = found, selector, seed
        self._share = _DENSE if selector is None else selector.backward_share
        self._index = self._micro_batch = self._draw = 0
        self._step: Step | None = None  # the backward under way
        self._counter = self._new_counter()
        self._hook = None if optimizer is None else _register_step_hook(optimizer, self._advance)
        self._covered: list[nn.Module] = []
        for name, module, form in found.covered:
            module.forward = BoundSite(name, module, form, self)
            self._covered.append(module)

    def backward(self, loss: Tensor, backward: Callable[[Tensor], object] | None = None) -> None:
        """Run the backward pass, with the policy asked at every site.

        Args:
            loss: As for ``loss.backward()``.
            backward: What runs the pass instead of ``torch.Tensor.backward``, such as ``accelerator.backward``.

        Raises:
            UsageError: The engine is detached, or a backward is under way.
        """
        if not self._covered:
            raise UsageError("this engine is detached: attach the model again")
        if self._step is not None:
            raise UsageError("engine.backward was called inside engine.backward")
        self._counter.start_backward()
        self._step = Step(self._index, self._micro_batch, seed=self._seed, draw=self._draw)
        try:
            (backward or torch.Tensor.backward)(loss)
        finally:
            self._step = None
        self._counter.num_backwards += 1
        self._micro_batch += 1
        if self._hook is None:
            self._advance()

    def decide(self, site: Site, grad_NO: Tensor, num_inputs: int, needs: Needs) -> Selection | None:
        """Ask the policy, and count. Called by the sites.

        Args:
            site: Where.
            grad_NO: The gradient of the site's output.
            num_inputs: The layer's input width.
            needs: Which gradients autograd asks for.

        Returns:
            What is kept; None for everything.

        Raises:
            UsageError: The backward did not go through this engine.
        """
        if not self.enabled:
            return None
        if self._step is None:
            raise UsageError(
                "a backward pass reached an attached model from outside: call engine.backward(loss) in place of "
                "loss.backward(), or put forward and backward inside engine.disabled() for dense gradients"
            )
        call = self._counter.next_call(site.name)
        selection = None
        if self._selector is not None and grad_NO.numel() > 0:
            step = Step(self._step.index, self._step.micro_batch, call, self._seed, self._draw)
            selection = self._selector.select(grad_NO, site, step)
        self._counter.add(site.name, grad_NO, num_inputs, needs, selection)
        return selection

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run forward and backward densely, as if the model were not attached; nothing is counted.

        Yields:
            None: As long as the model is dense.
        """
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def probing(self, draw: int = 1) -> Iterator[None]:
        """Apply the policy without a trace: step, report and kept share are afterwards as they were before.

        Inside, :meth:`report`, :meth:`claim` and :meth:`take_kept_share` speak of the probe alone.

        Args:
            draw: Of random policies; other than 0, so that training's decisions are not used up or repeated.

        Yields:
            None: As long as the probe lasts.
        """
        before = self._counter, self._index, self._micro_batch, self._draw
        self._counter, self._draw = self._new_counter(), draw
        try:
            yield
        finally:
            self._counter, self._index, self._micro_batch, self._draw = before

    def report(self) -> Report:
        """Return what happened so far at every site; waits for the device.

        Returns:
            Plain numbers.
        """
        kept, entries = self._counter.kept()
        return Report(
            sites=tuple(counter.report(name, self._share) for name, counter in self._counter.sites.items()),
            not_covered=self._found.not_covered,
            excluded=self._found.excluded,
            kept_share=kept / entries if entries else None,
            num_backwards=self._counter.num_backwards,
        )

    def claim(self) -> Claim:
        """Return the last backward's FLOPs at the sites, dense and as the policy claims, from shapes alone.

        Returns:
            Both counts.
        """
        return self._counter.claim(self._share)

    def take_kept_share(self) -> float | None:
        """Return the share of gradient entries kept since this was last called; waits for the device.

        Returns:
            The share over all sites; None when no gradient arrived since.
        """
        return self._counter.take_kept_share()

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run needs to decide as this one would; JSON can hold it.

        Returns:
            The step number and the backward's number in it.
        """
        return {"index": self._index, "micro_batch": self._micro_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: From :meth:`state_dict`.

        Raises:
            UsageError: It is not such a state.
        """
        values = [state.get(key) for key in ("index", "micro_batch")]
        if len(state) != 2 or not all(type(value) is int and value >= 0 for value in values):
            raise UsageError(f"not a state of the engine: {dict(state)!r}")
        self._index, self._micro_batch = state["index"], state["micro_batch"]

    def detach(self) -> None:
        """Give the model back as it was. Calling it again does nothing."""
        for module in self._covered:
            del module.__dict__["forward"]
        self._covered = []
        if self._hook is not None:
            self._hook.remove()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    def _advance(self, *_: object) -> None:
        self._index, self._micro_batch = self._index + 1, 0

    def _new_counter(self) -> Counter:
        return Counter({name: SiteCounter() for name, _, _ in self._found.covered})


def _register_step_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it, and skips it while accumulating
    if not isinstance(inner, torch.optim.Optimizer):
        raise UnsupportedError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return inner.register_step_post_hook(hook)
