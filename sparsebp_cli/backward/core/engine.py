"""The engine: runs a model's backward, calls policies at sites and lets extensions act on the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.clock import Clock
from sparsebp_cli.backward.core.counters import Counter, ShortPass
from sparsebp_cli.backward.core.decision import SiteCounters, SiteDecisions
from sparsebp_cli.backward.core.dropped_step import ScaledSteps
from sparsebp_cli.backward.core.extension import (
    EngineExtension,
    PassRunner,
    ShortForward,
    SiteAdapter,
    name_parameters,
    trains_at_sites,
)
from sparsebp_cli.backward.core.loss_scale import RootWatch, ScaleFinder, refuse_scale
from sparsebp_cli.backward.core.loss_weight import LOSS_WEIGHT, LossWeights
from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.backward.core.report import Chosen, FlopEstimate, Report, Route
from sparsebp_cli.backward.core.trial import Trials
from sparsebp_cli.backward.observe.dense_graph import CallNote, CallShape, count_dense
from sparsebp_cli.backward.observe.example_rows import BatchNote
from sparsebp_cli.backward.observe.loss_graph import UNSEEN, Products, has_site
from sparsebp_cli.backward.patch.forward import ModulePlaces
from sparsebp_cli.backward.patch.twin import settle
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import GradientSelector, Site, Step, TrialPass


class Engine:
    """Applies a policy's decisions in a model's backward pass. Created by ``attach``.

    Run every backward pass of an attached model through :meth:`backward`. The engine refuses a plain
    ``loss.backward()``, which would follow neither dense training nor the policy.

    Args:
        adapter: Installs the engine at the model's sites.
        decisions: Calls the gradient policies that decide at sites.
        model: The model that contains the sites.
        optimizer: Its steps advance the step number; None: every backward does.
        reference: Whether to mask gradients and then multiply densely.
        seed: Seed of random decisions.
        num_steps: Optimizer steps of the whole training, if known.
        extensions: Execute policies that do not decide at sites, or run the pass in another way.
        states: The states of stateful policies.
    """

    decisions: SiteDecisions
    reference: bool
    extensions: tuple[EngineExtension, ...]
    states: PolicyStates
    enabled: bool
    notes: dict[str, str]
    eager: PassRunner | None

    def __init__(  # noqa: PLR0913 - what attach puts together
        self,
        adapter: SiteAdapter,
        decisions: SiteDecisions,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        reference: bool,
        seed: int,
        num_steps: int | None = None,
        extensions: Sequence[EngineExtension] = (),
        states: PolicyStates | None = None,
    ) -> None:
        self._model, self._adapter, self.decisions = model, adapter, decisions
        self.states = decisions.states = PolicyStates() if states is None else states
        # Clock may raise, so create it before all changes.
        self._clock = Clock(optimizer, seed, num_steps, self._start_step, self.states.end_step)
        self.reference, self.extensions = reference, tuple(extensions)
        self.enabled, self.notes = True, dict[str, str]()
        self.forward: ShortForward | None = None  # the current forward, if it skips positions or examples
        self.dense_rows: int | None = None  # B*T of the last batch in which a compiled graph ran only some positions
        # Batch sizes that the arguments of the last forward allow; empty: unknown; None: no policy needs them.
        self.batch_sizes: frozenset[int] | None = frozenset() if decisions.has_selectors else None
        self.eager = next((extension for extension in self.extensions if isinstance(extension, PassRunner)), None)
        self._has_states = bool(self.states)
        self._reads_scale = decisions.has_selectors or self._has_states or self.eager is not None
        self._scales, self._scaled = ScaleFinder(), ScaledSteps(model, self._clock, self.states)
        self._freezes = any("frozen" in extension.hooks for extension in self.extensions)
        self._trials = Trials(model, self.states, self.extensions)
        self._count(Counter(SiteCounters.of(adapter.names)))
        self._attached = True
        self._loss_weights: LossWeights | None = None  # set when the first batch with weights comes
        self._unhook: Callable[[], None] = lambda: None
        if decisions.has_selectors:
            self._unhook = model.register_forward_pre_hook(BatchNote(self._note_batch), with_kwargs=True).remove
        adapter.install(self)
        for extension in self.extensions:
            extension.install(self)
        self._places = ModulePlaces(model)
        # The calls of the model since the last backward, if policies skip work before the backward.
        shortens = any({"claim", "frozen"} & extension.hooks for extension in self.extensions)
        self._calls: list[CallShape | None] | None = [] if shortens else None
        self._dense: dict[CallShape, Products | None] = {}  # the products of the dense backward of each call
        self._unnote: Callable[[], None] = lambda: None
        if shortens:
            self._unnote = model.register_forward_pre_hook(CallNote(self._note_call), with_kwargs=True).remove
        self._start_step(self.now())

    def backward(
        self,
        loss: Tensor,
        backward: Callable[..., object] | None = None,
        *,
        is_last: bool = True,
        loss_scale: float | Tensor | None = None,
    ) -> None:
        """Run the backward pass, calling the policy at every site.

        Args:
            loss: One number with a graph, the micro-batch's share of the step's loss, as for ``loss.backward()``.
            backward: Runs the pass instead of ``torch.Tensor.backward``, such as ``accelerator.backward``. With
                ``eager_clip='exact'`` the engine calls it twice, the first time with ``retain_graph=True``.
            is_last: Whether this is the last micro-batch of a step. With ``update='eager'`` parameters change in its
                pass; otherwise it makes no difference.
            loss_scale: Factor by which the script multiplied the loss and later divides the gradients; greater than 0.
                The engine divides stored and observed gradients by it. None: the engine finds the factor of a
                ``torch.amp.GradScaler`` that scaled the loss, even if it did so inside ``backward``.

        Raises:
            UsageError: The engine is detached, a backward is running already, a module was replaced since ``attach``,
                or the loss does not come from the attached model's own forward, so that no policy would be called.
            UnsupportedError: The loss is scaled, and ``update='eager'``.
        """
        if not self._attached:
            raise UsageError("this engine is detached: call attach again, and use the new engine")
        if self.decisions.step is not None:
            raise UsageError("engine.backward was called inside another engine.backward: call them one after the other")
        loss = settle(loss)
        if self.enabled:
            self._refreeze()  # autograd adds nothing to a leaf that no longer requires a gradient
            self._places.check()
            self._check_site_in_graph(loss)
            self._trials.check_made(self._clock.now())
        self._counter.sites.start_backward()
        self.states.move(loss.device)
        # Read before the pass, which frees the graph.
        reads, short = self._reads_graph(), None
        if reads and self._calls is not None:
            short = Products()
            short.add(loss, {})
        elif reads:
            self._counter.products.add(loss, name_parameters(self._model, self._adapter))
        self.decisions.step = self.now()
        try:
            if self.eager is None:
                self._differentiate(loss, backward, loss_scale)
            else:
                updates = is_last and not self._clock.draw  # a probe changes nothing
                differentiate = partial(self._differentiate, loss, backward, loss_scale)
                self.eager.run_pass(loss, differentiate, backward=backward, updates=updates)
            for extension in self.extensions:
                extension.finish_pass()
        finally:
            # From here on, sites refuse a backward that does not run through the engine.
            self.decisions.step = None
        if short is not None:
            self._count_short(short)
        elif reads:
            self._counter.products_at_sites += self._counter.sites.last_dense_flops
            self._counter.num_read += 1
        if self.enabled:
            self._counter.num_backwards += 1
            self._clock.count_backward()

    def trials_are_due(self, ahead: int = 0) -> bool:
        """Return whether a policy requests trial passes before the coming step; see :meth:`run_trials`.

        Args:
            ahead: Ask about the step that is so many steps after the coming one, with the present states; at least 0.

        Returns:
            Whether a policy requests them.
        """
        step = self._clock.now()
        return self.enabled and self._trials.are_due(replace(step, index=step.index + ahead))

    def run_trials(
        self,
        forward: Callable[[], Tensor],
        backward: Callable[..., object] | None = None,
        *,
        others: Sequence[Callable[[], Tensor]] = (),
    ) -> None:
        """Run the trial passes that policies request before the coming step, if any. Then restore gradients, buffers
        and random generators.

        Args:
            forward: Runs the model on the step's first micro-batch and returns the loss.
            backward: Runs the pass instead of ``torch.Tensor.backward``, as for :meth:`backward`.
            others: Do the same on other micro-batches, for policies that measure how batches differ.

        Raises:
            UsageError: A policy requests more micro-batches than the arguments provide.
        """
        if not self.trials_are_due():
            return
        batches, wanted = [forward, *others], self._trials.count_batches(self._clock.now())
        if wanted > len(batches):
            raise UsageError(
                f"a policy needs {wanted} micro-batches for its trial passes, got {len(batches)}: pass "
                f"{wanted - 1} of them as others in engine.run_trials(forward, others=[...])"
            )

        def run_pass(trial: TrialPass) -> None:
            with self.probing(trial.draw):
                self.backward(batches[trial.batch](), backward)

        self._trials.run(self._clock.now(), run_pass)
        self._start_step(self.now())  # with the new states

    def count_trial_batches(self) -> int:
        """Return the number of micro-batches in the trial passes before the coming step; 0 if none are due."""
        return self._trials.count_batches(self._clock.now()) if self.trials_are_due() else 0

    def _differentiate(
        self,
        loss: Tensor,
        backward: Callable[..., object] | None,
        loss_scale: float | Tensor | None,
        **options: object,
    ) -> None:
        with self._adapter.backward_context(loss) as instead:
            root = loss if instead is None else instead
            # A scaler may have scaled the loss already, or scale it in the script's ``backward``.
            scale = loss_scale if loss_scale is not None or not self._reads_scale else self._find_scale(loss)
            if scale is not None or backward is None or not self._reads_scale:
                self._start_pass(scale)
                (backward or torch.Tensor.backward)(root, **options)
            else:
                with RootWatch(lambda scaled: self._start_pass(self._find_scale(scaled))):
                    backward(root, **options)

    def _find_scale(self, loss: Tensor) -> Tensor | None:
        scale = self._scales.find(loss)
        if self._scales.note and self.states:
            self.notes["loss scale"] = self._scales.note
        return scale

    def _start_pass(self, scale: float | Tensor | None) -> None:
        """Record the loss scale of the pass that begins now."""
        if scale is not None and self.eager is not None:
            refuse_scale()
        self.states.loss_scale = scale
        if not self._clock.draw:
            self._scaled.start_pass(scale)
        self.decisions.step = replace(self.now(), loss_scale=scale)

    def _check_site_in_graph(self, loss: Tensor) -> None:
        for extension in self.extensions:
            extension.check_called()
        waits = any("check_called" in extension.hooks for extension in self.extensions)
        asks = self.decisions.has_selectors or waits
        # If parameters are frozen, the loss may depend on no site.
        if asks and not self._freezes and trains_at_sites(self._model, self._adapter) and not has_site(loss, self):
            raise UsageError(UNSEEN)

    def _reads_graph(self) -> bool:
        """Return whether to read the graph of the next pass for the report.

        The engine reads passes 1, 2, 4, 8 ..., so that the cost is negligible over a training.
        """
        number = self._counter.num_backwards + 1
        # See decision 4.
        if not self.enabled or self._clock.draw or number & (number - 1):  # 0 for powers of two alone
            return False
        unknown = self._counter.products.unknown
        return (bool(self._adapter.names) or self._calls is not None) and not unknown

    def _note_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the call of a training forward whose graph the engine will read."""
        self._refreeze()
        number = self._counter.num_backwards + 1
        if self._calls is not None and self.enabled and not self._clock.draw and not number & (number - 1):
            self._calls.append(CallShape.of(args, kwargs))

    def _count_short(self, products: Products) -> None:
        """Count a pass in which a policy skipped work before the backward; ``products`` come from its graph."""
        calls, sites = self._calls or [], self._counter.sites
        self._counter.products.unknown |= products.unknown
        # A backward over several forwards is not counted.
        call = calls[0] if len(calls) == 1 else None
        left = products.total - sites.last_dense_flops + sites.last_claimed_flops
        self._counter.short.append(ShortPass(call, left, sites.last_claimed_flops))
        calls.clear()

    def _count_dense(self, call: CallShape) -> Products | None:
        if call not in self._dense:
            with self.disabled():
                self._dense[call] = count_dense(self._model, call)
        return self._dense[call]

    def now(self) -> Step:
        """Return the step of the running backward, or of the next one."""
        return self._clock.now()

    def policy_at(self, site: Site) -> GradientSelector | None:
        """Return the policy that decides at a site in the current or next backward.

        Args:
            site: A module at whose output a policy may decide.

        Returns:
            The policy, with the step's values of schedules; None if the site stays dense.
        """
        return self.decisions.policy_at(site, self.now()) if self.enabled else None

    @contextmanager
    def short_forward(self, *, num_rows: int | None = None, scale: float = 1.0) -> Iterator[None]:
        """Scale the counts at sites during a forward that skips positions or examples. Extensions call this.

        Args:
            num_rows: B*T of the whole batch, if the forward runs only some positions.
            scale: Examples of the batch over examples that the forward runs.

        Yields:
            None: While the forward runs.
        """
        outer = self.forward
        self.forward = ShortForward(num_rows, scale * (1.0 if outer is None else outer.scale))
        try:
            yield
        finally:
            self.forward = outer

    @contextmanager
    def probing(self, draw: int = 1) -> Iterator[None]:
        """Apply the policy without side effects: step, report and the counts are restored afterwards.

        Inside, :meth:`report`, :meth:`claim`, :meth:`take_kept_share` and :meth:`take_route` describe only the probe.

        Args:
            draw: Draw of random policies, not 0, which is the draw of training. -1 repeats the next draw of training,
                to count its work.

        Yields:
            None: While the probe runs.
        """
        before = self._counter
        self._count(Counter(SiteCounters.of(self._adapter.names)))
        try:
            with self._clock.probing(draw), self.states.probing():
                yield
        finally:
            self._count(before)

    @property
    def num_draws(self) -> int:
        """Number of random generators that policies requested. A pass without requests is the same at each draw."""
        return self._clock.num_draws

    @property
    def is_probing(self) -> bool:
        """Whether the running pass is a probe, which trains nothing."""
        return self._clock.draw != 0

    def report(self) -> Report:
        """Return the counts of every site so far, as plain numbers; synchronises with the device."""
        return self._counter.report(self._adapter, self.notes, self._count_dense, freezes=self._freezes)

    def totals(self) -> tuple[float | None, Chosen | None]:
        """Return the fraction of gradient entries kept, and the counts of chosen tokens and examples, since attach.

        :meth:`report` contains both, and the remaining part of the whole backward.

        Returns:
            The fraction, None if no gradient arrived, and the counts, None if no policy chose. Waits for the device.
        """
        kept, entries = self._counter.sites.kept()
        return (kept / entries if entries else None), self._counter.chosen.total

    def claim(self) -> FlopEstimate:
        """Return the last backward's FLOPs at the sites, dense and estimated for the policy, from shapes alone."""
        return FlopEstimate(self._counter.sites.last_dense_flops, self._counter.sites.last_claimed_flops)

    def take_kept_share(self) -> float | None:
        """Return the fraction of gradient entries kept since the last call, over all sites; waits for the device.

        None if no gradient arrived since.
        """
        return self._counter.sites.take_kept_share()

    def take_chosen(self) -> Chosen | None:
        """Return the counts of chosen targets, positions and examples since the last call; None if no policy chose."""
        return self._counter.chosen.take()

    def take_route(self) -> Route | None:
        """Return the routes of all passes since the last call; None without a router."""
        return self._counter.take_route()

    def add_chosen(self, chosen: Chosen) -> None:
        """Add the counts of a choice before a forward. Extensions call this."""
        self._counter.chosen.add(chosen)

    def add_route(self, route: Route) -> None:
        """Add the route of one backward. The site adapter calls this."""
        self._counter.add_route(route)

    def columns(self, **columns: Tensor) -> None:
        """Set columns that the model's forward does not receive: loss weights, and columns that token policies need.

        Scripts that compute their own loss, and so remove ``labels`` from the batch, pass the labels here.

        Args:
            **columns: Tensors (B, T) by name: ``labels``, and columns that the policy reads; ``loss_weight``, a finite
                number for each label, with which the model's own loss becomes a weighted sum over the number of labels,
                with or without policies; or ``num_items_in_batch``, a number that replaces the forward's argument.
                They stay set until the next call.

        Raises:
            UnsupportedError: ``loss_weight`` is set, and the model is not a causal language model with transformers'
                loss.
        """
        weight_BT = columns.pop(LOSS_WEIGHT, None)
        if weight_BT is not None and self._loss_weights is None:
            self._loss_weights = LossWeights(self._model)
            self._loss_weights.may_be_own = any("reading_by" in extension.hooks for extension in self.extensions)
        if self._loss_weights is not None:
            self._loss_weights.given = weight_BT
        for extension in self.extensions:
            extension.set_columns(**columns)

    def check_arguments(self, arguments: Mapping[str, object]) -> None:
        """Raise the error that the first forward would raise for its arguments, without running it.

        Args:
            arguments: Arguments of the model's forward by name. Other names are ignored, since a script may use them.

        Raises:
            UnsupportedError: A policy does not support one of the arguments.
        """
        for extension in self.extensions:
            extension.check_arguments(arguments)

    def expect(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Announce the micro-batches until the optimizer's next step, so that ``lossless`` with ``prefixes: update``
        computes their common prefixes once. Then run forward and :meth:`backward` of each, in this order.

        Args:
            batches: For each micro-batch its ``input_ids`` (B, T), and the mask and position ids of its forward, if
                any. Add ``labels`` if only positions that predict a label are read. Add ``loss_weight`` and
                ``example_weight`` if rows of weight zero are not read, and ``fused_lm_head`` for trl's head.

        Returns:
            Whether they have a common prefix. If not, each runs as without this call.
        """
        found = [part.expect(batches) for part in self.extensions if self.enabled]
        return any(found)

    @contextmanager
    def scoring(self, labels: Tensor | None = None, *, reads: Literal["labels", "loss"] = "labels") -> Iterator[None]:
        """Declare which outputs the script reads of forwards without gradient in this context, so that ``lossless`` can
        skip the other rows: for old log-probabilities, a reference or an evaluation. This works inside
        :meth:`disabled`, too. No other policy acts on such forwards.

        Args:
            labels: (B, T), for forwards without labels: the script reads logits only at positions that predict a label,
                and they are 0 elsewhere. None: it reads them at all positions that are not padding.
            reads: For forwards with labels. ``labels``: the script reads the loss, and logits only at positions that
                predict a label; they are 0 elsewhere. ``loss``: the engine computes other outputs plainly on access.

        Yields:
            None: While the script scores.
        """
        with ExitStack() as stack:
            for extension in self.extensions:
                stack.enter_context(extension.reading_by(labels, reads))
            yield

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run forward and backward densely, without policies and without counting. Segments stay active.

        Yields:
            None: While policies are off.
        """
        before = self.enabled
        self._enable(False)
        try:
            yield
        finally:
            self._enable(before)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs for the same decisions.

        Returns:
            The step's number, the backward's number within it, the states of policies, and the entries of extensions,
            such as the gradient norm of the last step for an eager update.
        """
        self._scaled.settle()
        state = {"index": self._clock.index, "micro_batch": self._clock.micro_batch, **self.states.state_dict()}
        for extension in self.extensions:
            state |= extension.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: A result of :meth:`state_dict` of an engine with the same policies and model.

        Raises:
            UsageError: ``state`` is not such a result.
        """
        # Versions up to 0.5 wrote form_times, and cut, which was empty without an option that is gone.
        state = {key: value for key, value in state.items() if key != "form_times" and (key, value) != ("cut", {})}
        counts = (state.get("index"), state.get("micro_batch"))
        if state.keys() != self.state_dict().keys() or not all(type(count) is int and count >= 0 for count in counts):
            raise UsageError(f"load_state_dict needs the result of engine.state_dict(), got {dict(state)!r}")
        # Completed trial passes belong to the replaced state.
        self._trials = Trials(self._model, self.states, self.extensions)
        self.states.load_state_dict(state)
        for extension in self.extensions:
            extension.load_state_dict(state)
        self._clock.go_to(state["index"], state["micro_batch"])  # last, since decisions of the step read states

    def detach(self) -> None:
        """Restore the model as it was before ``attach``. Further calls do nothing."""
        if self._attached:
            # In reverse order of installation, since an override restores the forward that it found.
            for extension in reversed(self.extensions):
                extension.remove()
            self._adapter.remove()
            self._unhook()
            self._unnote()
            if self._loss_weights is not None:
                self._loss_weights.remove()
        self._attached = False
        self._scaled.stop()
        self._clock.stop()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    def _count(self, counter: Counter) -> None:
        self._counter, self.decisions.counters = counter, counter.sites

    def _enable(self, enabled: bool) -> None:
        self.enabled = self.decisions.enabled = enabled
        for extension in self.extensions:
            extension.enable(enabled)

    def _refreeze(self) -> None:
        for extension in self.extensions:
            if "refreeze" in extension.hooks:
                extension.refreeze()

    def _start_step(self, step: Step) -> None:
        for extension in self.extensions:
            extension.start_step(step)
        if self._has_states:
            self._scaled.start_step()

    def _note_batch(self, sizes: frozenset[int]) -> None:
        self.batch_sizes = sizes
