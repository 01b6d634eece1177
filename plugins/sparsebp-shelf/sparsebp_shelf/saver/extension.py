"""Save less of the inputs of linears, as an input saver decides.

The saver decides in the forward, once for all linears that read one tensor. The decision depends on the step, the
linear that reads first, and how often it has run since the last backward. A layer that runs again inside a backward
counts down, so it gets the decision of its first forward.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward import (
    SavedInput,
    SavesInputs,
    Scope,
    TrialExtension,
    autocast,
    is_in_backward,
    refuse_uncalled,
    version_of,
    weight_of,
)
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import Site, Step, TrialPass, returned
from sparsebp_shelf.saver.form import SavedProjection
from sparsebp_shelf.saver.kind import InputSaver
from sparsebp_shelf.saver.observed import LinearInput, ReaderGradients

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given, PolicyStates


@dataclass
class _Readers:
    """The linears of a trial pass that read the inputs of one decision, and the number of these inputs' entries."""

    names: set[str] = field(default_factory=set)
    num_entries: dict[int, int] = field(default_factory=dict)  # by call, which checkpointing repeats


@runtime_checkable
class ReadsProjections(Protocol):
    """An optimizer whose moments are those of gradients projected like the inputs of linears."""

    def read_projections(self, find: Callable[[Tensor], tuple[SavedProjection, int] | None]) -> None:
        """Store ``find``. It maps a weight to the projection of the input that this step's gradient was computed with,
        and to the weight's input dimension; None for any other gradient."""


def find_places(policy: InputSaver, model: nn.Module, given: Given) -> list[Site]:  # noqa: ARG001
    """Return the linears at which a saver decides."""
    scope = Scope(policy, given.num_layers)
    return [site for site in given.linears if scope.contains(site.name, site.layer)]


@final
class InputSaving(SavesInputs, TrialExtension):
    """Run an input saver on one model; the linears are changed by their adapter."""

    engine: EngineView
    policy: InputSaver
    states: PolicyStates

    def __init__(self, policy: InputSaver, model: nn.Module, given: Given) -> None:
        self.policy, self._model, self.scope = policy, model, Scope(policy, given.num_layers)
        self.states = given.states
        # What is kept of live inputs, by id: linears that read other inputs may run between two readers of one, as in
        # adapters.
        self._kept: dict[int, tuple[weakref.ref[Tensor], int, SavedInput]] = {}
        self._kept_at: tuple[Step, bool] | None = None  # step, and whether inside a backward
        self._step: Step | None = None  # step of the counts below
        self._calls: dict[str, int] = {}  # forwards since the last backward, by first reader
        self._bytes, self._dense_bytes = 0, 0  # bytes of the training: kept, and dense
        self._was_called = False
        self._readers: dict[str, _Readers] | None = None  # during a trial pass
        self._projections: dict[Tensor, tuple[SavedProjection, int]] = {}  # projections of this step, by weight
        owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        # weights with several owners, such as an embedding
        self._shared = {number for number, count in owners.items() if count > 1}
        # An optimizer with moments of projections must draw the saver's projections. See decision 18.
        if isinstance(given.optimizer, ReadsProjections):
            if policy.form is not SavedProjection or policy.draws_for is None:
                raise UnsupportedError(
                    f"the optimizer {type(given.optimizer).__name__} needs gradients that a policy projected: add "
                    "a policy that projects features (compact), and set its option interval"
                )
            given.optimizer.read_projections(self.projection_of)

    def install(self, engine: EngineView) -> None:
        self.engine = engine

    def start_step(self, step: Step) -> None:  # noqa: ARG002 - of the base class
        """Forget the projections and the counts; the forwards of a step make its decisions."""
        self._projections.clear()
        self._step = None  # a step that a loss scaler dropped begins again with the same number

    @override
    def check_called(self) -> None:
        if not self._was_called:
            refuse_uncalled(self.policy, self._model)
        if self._dense_bytes:
            self.engine.notes["inputs"] = (
                f"the policy keeps {self._bytes / self._dense_bytes:.1%} of the bytes of inputs that linear layers "
                "with a trained weight save for the backward"
            )

    @override
    def save(self, site: Site, x: Tensor, weight: Tensor, input_dim: int) -> SavedInput:
        self._was_called = True
        if not weight.requires_grad or x.numel() == 0:
            return SavedInput(None)
        kept = self._find(site, x)
        self._note_projection(weight, input_dim, kept)
        return kept

    def _find(self, site: Site, x: Tensor) -> SavedInput:
        """Return what is kept of an input, as decided for the linear that read it first."""
        # Linears that read one tensor share what is kept: a copy for each would need more than dense. See decision 45.
        step, key = self.engine.now(), id(x)
        if self._kept_at != (step, is_in_backward()):  # such as for an input from outside this forward
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

    def _note_projection(self, weight: Tensor, input_dim: int, kept: SavedInput) -> None:
        """Record how the input of a linear was projected, if the step has one projection of it."""
        is_one = self.policy.draws_for is not None and not self.engine.now().draw and id(weight) not in self._shared
        saved = kept.saved
        if is_one and isinstance(saved, SavedProjection):
            before = self._projections.setdefault(weight, (saved.forget(), input_dim))[0]
            if before.seed != saved.seed:
                raise UnsupportedError(
                    "all forwards of a step must call the linear layers that share an input in the same order"
                )

    def projection_of(self, weight: Tensor) -> tuple[SavedProjection, int] | None:
        """Return the projection of the input of a weight's linear in this step, and the weight's input dimension; None
        unless its gradient comes from that one projection only."""
        return self._projections.get(weight)

    @contextmanager
    def trying(self, decision: Collection[str] | TrialPass) -> Iterator[None]:  # noqa: ARG002 - of the base class
        """Record which linears read each input in a trial pass, and the gradients of their weights."""
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
        returned.require_type(f"{type(policy).__name__}.save at {site.name!r}", saved, policy.form, None)
        if saved is not None and (type(saved) is not policy.form or saved.shape != tuple(x_ND.shape)):
            expected = "None" if policy.form is None else policy.form.__name__
            raise PolicyError(
                f"{type(policy).__name__} must save {expected} of shape {tuple(x_ND.shape)} at {site.name!r}, "
                f"got {type(saved).__name__} of shape {saved.shape}"
            )
        if not step.draw and not is_in_backward():
            whole = x_ND.numel() * x_ND.element_size()
            self._dense_bytes += whole
            self._bytes += whole if saved is None else saved.num_bytes
        share = 1.0 if policy.form is None else policy.form.share(policy.budget, *x_ND.shape)
        return SavedInput(saved, share, site.name)

    def _count_call(self, name: str, step: Step) -> int:
        if self._step != step:
            self._step, self._calls = step, {}
        count = self._calls.get(name, 0)
        if is_in_backward():
            # Counted down, so that a forward repeated by checkpointing draws the same as the first one. See decision
            # 45.
            self._calls[name] = max(0, count - 1)
            return self._calls[name]
        self._calls[name] = count + 1
        return count

    def _drop(self, key: int, ref: object) -> None:
        found = self._kept.get(key)
        if found is not None and found[0] is ref:
            del self._kept[key]
