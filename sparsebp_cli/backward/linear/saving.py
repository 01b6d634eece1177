"""Saving less of the inputs of linears, by an input saver.

The decision is made in the forward, once for all linears that read one tensor. What it depends on is the step, the
linear that reads first, and how often that one has run since the last backward; a layer that is computed again inside
of a backward counts down, so that it is decided about as in its first forward.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward.core.extension import EngineExtension, refuse_uncalled
from sparsebp_cli.backward.core.scope import Scope
from sparsebp_cli.backward.linear.function import autocast, weight_of
from sparsebp_cli.backward.linear.saved import find_share
from sparsebp_cli.backward.observe.internals import version_of
from sparsebp_cli.backward.observe.module_trace import is_in_backward
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import InputSaver, LinearInput, ReaderGradients, Saved, SavedProjection, Site, Step, TrialPass

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.given import Given
    from sparsebp_cli.backward.core.policy_state import PolicyStates


@final
@dataclass(frozen=True)
class SavedInput:
    """What a policy keeps of one input.

    Args:
        saved: The form that is kept instead of the input; None: the input itself.
        share: Multiplications of the weight's gradient that the policy claims, over the dense ones.
        first: Name of the linear that reads the input first.
    """

    saved: Saved | None
    share: float = 1.0
    first: str = ""


@dataclass
class _Readers:
    """The linears that read the inputs decided about under one name, in a trial pass, and the entries of these."""

    names: set[str] = field(default_factory=set)
    num_entries: dict[int, int] = field(default_factory=dict)  # by call, which checkpointing repeats


@runtime_checkable
class ReadsProjections(Protocol):
    """An optimizer with moments of gradients that are projected as the inputs of linears were."""

    def read_projections(self, find: Callable[[Tensor], tuple[SavedProjection, int] | None]) -> None:
        """Take a function that returns how the input was projected that the gradient of a weight was computed with in
        this step, and the dimension of the weight that belongs to inputs; None for any other gradient."""


def find_places(policy: InputSaver, model: nn.Module, given: Given) -> list[Site]:  # noqa: ARG001
    """Return the linears at which a saver decides."""
    scope = Scope(policy, given.num_layers)
    return [site for site in given.linears if scope.contains(site.name, site.layer)]


def connect(savers: Sequence[InputSaving], optimizer: torch.optim.Optimizer | None) -> None:
    """Give an optimizer that reads projections what says how inputs are projected. Raise
    :class:`UnsupportedError` if it reads them and no policy keeps a projection.
    """
    if not isinstance(optimizer, ReadsProjections):
        return
    for saver in savers:
        if saver.policy.form is SavedProjection and saver.policy.draws_for is not None:
            optimizer.read_projections(saver.projection_of)
            return
    raise UnsupportedError(
        f"{type(optimizer).__name__} has moments in the projection of a saver of inputs: give a policy that projects "
        "features and keeps its matrix for several steps, by its option interval"
    )


@final
class InputSaving(EngineExtension):
    """An input saver in one model.

    The linears are changed by their adapter.
    """

    engine: EngineView
    policy: InputSaver
    states: PolicyStates

    def __init__(self, policy: InputSaver, model: nn.Module, given: Given) -> None:
        self.policy, self._model, self.scope = policy, model, Scope(policy, given.num_layers)
        self.states = given.states
        # What was kept of inputs that are alive, by id: between two linears of one input may be others, as in adapters.
        self._kept: dict[int, tuple[weakref.ref[Tensor], int, SavedInput]] = {}
        self._kept_at: tuple[Step, bool] | None = None  # when, and whether inside of a backward
        self._step: Step | None = None  # of the counts below
        self._calls: dict[str, int] = {}  # forwards since the last backward, by the linear that reads first
        self._bytes, self._dense_bytes = 0, 0  # of the training, kept and whole
        self._was_called = False
        self._readers: dict[str, _Readers] | None = None  # during a trial pass
        self._projections: dict[Tensor, tuple[SavedProjection, int]] = {}  # of this step, by the weight
        owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        self._shared = {number for number, count in owners.items() if count > 1}  # such as with the embedding

    def install(self, engine: EngineView) -> None:
        self.engine = engine

    def start_step(self, step: Step) -> None:  # noqa: ARG002 - of the protocol
        """Forget the projections and the counts; the decisions of a step are made in its forwards."""
        self._projections.clear()
        self._step = None  # a step that a loss scaler dropped begins again with the same number

    @override
    def check_called(self) -> None:
        if not self._was_called:
            refuse_uncalled(self.policy, self._model)
        if self._dense_bytes:
            self.engine.notes["inputs"] = (
                f"of the inputs of linears with a trained weight, {self._bytes / self._dense_bytes:.1%} of the bytes "
                "are kept for the backward"
            )

    def save(self, site: Site, x: Tensor, *, is_trained: bool) -> SavedInput:
        """Return what is kept of a linear's input; called in its forward, where gradients are enabled."""
        self._was_called = True
        if not is_trained or x.numel() == 0:
            return SavedInput(None)
        # Linears that read one tensor share what is kept: a copy for each would be more than dense. See decision 45.
        step, key = self.engine.now(), id(x)
        if self._kept_at != (step, is_in_backward()):  # such as for an input that is no result of this forward
            self._kept_at = step, is_in_backward()
            self._kept.clear()
        found = self._kept.get(key)
        if found is not None and found[0]() is x and found[1] == version_of(x):
            self._note_reader(site, found[2])
            return found[2]
        call = self._count_call(site.name, step)
        kept = self._ask(site, x, replace(step, call=call))
        self._kept[key] = weakref.ref(x, partial(self._drop, key)), version_of(x), kept
        self._note_reader(site, kept)
        if self._readers is not None:
            self._readers[site.name].num_entries[call] = x.numel()
        return kept

    def note_projection(self, weight: Tensor, input_dim: int, kept: SavedInput) -> None:
        """Note how the input of a linear was projected, if the step has one projection of it."""
        is_one = self.policy.draws_for is not None and not self.engine.now().draw and id(weight) not in self._shared
        if is_one and isinstance(kept.saved, SavedProjection):
            before = self._projections.setdefault(weight, (kept.saved.forget(), input_dim))[0]
            if before.seed != kept.saved.seed:
                raise UnsupportedError("a linear reads an input first in one forward of a step, and not in another")

    def projection_of(self, weight: Tensor) -> tuple[SavedProjection, int] | None:
        """Return how the input of a weight's linear was projected in this step, and the weight's dimension of inputs;
        None if its gradient is not of that one projection alone."""
        return self._projections.get(weight)

    @contextmanager
    def trying(self, decision: Collection[str] | TrialPass) -> Iterator[None]:  # noqa: ARG002 - of the protocol
        """Note which linears read each input in a trial pass, whose state the policy reads, and the gradients of their
        weights.
        """
        self._readers, self._step = {}, None  # passes of one draw follow each other at the same step
        try:
            yield
            for name, readers in self._readers.items():
                weights = {reader: weight_of(self._model.get_submodule(reader)) for reader in sorted(readers.names)}
                gradients = {reader: weight.grad for reader, weight in weights.items() if weight.grad is not None}
                if gradients and self.states.watches(self.policy, ReaderGradients):
                    own = {reader: self.states.unscale(gradient) for reader, gradient in gradients.items()}
                    seen = ReaderGradients(name, own, sum(readers.num_entries.values()))
                    self.states.see(self.policy, seen)
        finally:
            self._readers = None

    def _note_reader(self, site: Site, kept: SavedInput) -> None:
        if self._readers is not None:
            self._readers.setdefault(kept.first, _Readers()).names.add(site.name)

    def _ask(self, site: Site, x: Tensor, step: Step) -> SavedInput:
        policy = self.policy.at(step)
        if torch.is_autocast_enabled(x.device.type):
            x = autocast(x)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            x_ND = x.detach().reshape(-1, x.shape[-1])
            saved = policy.save(x_ND, site, self.states.show(self.policy, step))
            if self.states.watches(self.policy, LinearInput):
                self.states.see(self.policy, LinearInput(site.name, x_ND), step)
        if saved is not None and (type(saved) is not policy.form or saved.shape != tuple(x_ND.shape)):
            expected = "None" if policy.form is None else policy.form.__name__
            raise PolicyError(
                f"{type(policy).__name__} saves {type(saved).__name__} of {saved.shape} at {site.name!r}, expected "
                f"{expected} of {tuple(x_ND.shape)}"
            )
        if not step.draw and not is_in_backward():
            whole = x_ND.numel() * x_ND.element_size()
            self._dense_bytes += whole
            self._bytes += whole if saved is None else saved.num_bytes
        return SavedInput(saved, find_share(policy.form, policy.budget, *x_ND.shape), site.name)

    def _count_call(self, name: str, step: Step) -> int:
        if self._step != step:
            self._step, self._calls = step, {}
        count = self._calls.get(name, 0)
        if is_in_backward():
            # Counted down: a forward that checkpointing repeats draws what the first one drew. See decision 45.
            self._calls[name] = max(0, count - 1)
            return self._calls[name]
        self._calls[name] = count + 1
        return count

    def _drop(self, key: int, ref: object) -> None:
        found = self._kept.get(key)
        if found is not None and found[0] is ref:
            del self._kept[key]
