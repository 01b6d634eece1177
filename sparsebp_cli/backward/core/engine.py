"""The engine: a model's backward, in which the policies decide; its start, its end, and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.binding import Binding
from sparsebp_cli.backward.core.clock import Clock
from sparsebp_cli.backward.core.deciding import Deciding
from sparsebp_cli.backward.core.extension import Asking, Part, Reading
from sparsebp_cli.backward.core.selector_runner import Decision
from sparsebp_cli.backward.execution.eager import EagerUpdate
from sparsebp_cli.backward.execution.eager.options import refuse_scaling
from sparsebp_cli.backward.observe.example_rows import BatchNote
from sparsebp_cli.backward.observe.loss_graph import has_site
from sparsebp_cli.backward.selection.parameter import ParameterPart
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Step

_UNSEEN = (
    "no site of the attached model takes part in this loss, so its gradients would be dense without a word: run the "
    "forward of this model after attach and outside of engine.disabled(), or put the backward inside it too"
)


class Engine(Deciding):
    """Carries out a policy's decisions in a model. Made by ``attach``.

    Backward passes of an attached model go through :meth:`backward`. A plain ``loss.backward()`` is refused: it would
    be neither dense nor what the policy meant at this step.

    Args:
        binding: The model's sites.
        decision: Who decides; None for dense.
        model: That the sites are in.
        optimizer: Its steps advance the step number; None: every backward does.
        reference: Mask, then multiply densely.
        stores: Whether branches keep their linears' outputs; else their inputs, and the kept rows are multiplied again.
        seed: Of random decisions.
        num_steps: Optimizer steps of the whole training, where that is known.
        parts: What carries out the policies that are not asked at sites.
    """

    def __init__(  # noqa: PLR0913 - what attach puts together
        self,
        binding: Binding,
        decision: Decision | None,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        reference: bool,
        stores: bool = True,
        seed: int,
        num_steps: int | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        super().__init__(binding, decision, Clock(optimizer, seed, num_steps, self._start_step))
        self._model = model
        self.reference, self.stores, self.parts = reference, stores, tuple(parts)
        self._attached = True
        self._unhook: Callable[[], None] = lambda: None
        if decision is not None:
            self._unhook = model.register_forward_pre_hook(BatchNote(self), with_kwargs=True).remove
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
            UsageError: The engine is detached, a backward is under way, or no policy would be asked, since the loss
                does not come from the attached model's own forward.
        """
        if not self._attached:
            raise UsageError("this engine is detached: attach the model again")
        if self._step is not None:
            raise UsageError("engine.backward was called inside engine.backward")
        if self.enabled:
            self._check_seen(loss)
        self._counter.start_backward()
        reads = self._reads_graph()
        if reads:
            self._counter.products.add(loss, self._name_parameters())
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
        if reads:
            self._counter.products_at_sites += self._counter.last_dense_flops
            self._counter.num_read += 1
        if self.enabled:
            self._counter.num_backwards += 1
            self._clock.count_backward()

    def _differentiate(self, loss: Tensor, backward: Callable[..., object] | None, **options: Any) -> None:
        with self._binding.around(loss) as instead:
            (backward or torch.Tensor.backward)(loss if instead is None else instead, **options)

    def _check_seen(self, loss: Tensor) -> None:
        for part in self.parts:
            if isinstance(part, Asking):
                part.check_asked()
        asks = self._decision is not None or any(isinstance(part, Asking) for part in self.parts)
        # What is frozen may lie between all sites and the loss; at nodes every node is one.
        frozen = any(isinstance(part, ParameterPart) for part in self.parts)
        if asks and not frozen and self._trains_at_sites() and not has_site(loss, self):
            raise UsageError(_UNSEEN)

    def _trains_at_sites(self) -> bool:
        """Whether a site has trained weights, so that a loss of this model passes through it: where adapters alone are
        trained, and they are left out, no gradient need go through any site."""
        modules = dict(self._model.named_modules())
        sites = (modules[name] for name in self._binding.names if name in modules)
        return any(p.requires_grad for module in sites for p in module.parameters())

    def _reads_graph(self) -> bool:
        """Whether the graph of the pass that begins is one of those that are read: ever fewer, so that it costs
        nothing; and none where what a policy left out before the forward is not in the graph."""
        number = self._counter.num_backwards + 1
        if not self.enabled or self._clock.draw or number & (number - 1):
            return False
        unknown = self._counter.products.unknown
        if self.leaves_out:
            unknown.add("positions or examples are left out before the backward")
        if any(isinstance(part, ParameterPart) for part in self.parts):
            unknown.add("a policy chooses which parameters are trained")
        return bool(self._binding.names) and not unknown

    def _name_parameters(self) -> dict[int, str]:
        """Return the names of parameters by ``id``; of a shared one, the name of a place that the report lists."""
        listed = {*self._binding.not_covered, *self._binding.excluded}
        names = [(name, p) for name, p in self._model.named_parameters(remove_duplicate=False)]
        names.sort(key=lambda pair: pair[0].rpartition(".")[0] in listed)
        return {id(p): name for name, p in names}

    def columns(self, **columns: Tensor) -> None:
        """Give token policies what a script's own loss takes out of the batch before the model sees it.

        Args:
            **columns: By name, each (B, T): ``labels``, and what the policy reads; or ``num_items_in_batch``, a number
                that counts in place of the forward's. They count until the next call.
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
        counts, cut = (state.get("index"), state.get("micro_batch")), state.get("cut")
        good = state.keys() == self.state_dict().keys() and all(type(count) is int and count >= 0 for count in counts)
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
            self._unhook()
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
