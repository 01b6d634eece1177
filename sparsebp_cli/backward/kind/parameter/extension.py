"""Parameter selection: parameters that are not trained at a step do not require a gradient during it.

Autograd itself then computes no gradient of a frozen parameter, stores no input for it, and ends the backward after the
last trained one. ``.grad`` of a frozen parameter is None, not zero: PyTorch's optimizers then skip the parameter and
its state, weight decay included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli.backward.core.extension import EngineExtension
from sparsebp_cli.backward.decoder.decoder import find_reentrant
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.kind.parameter.optimizer_state import OffloadedState
from sparsebp_cli.backward.kind.required_grads import claim_needed
from sparsebp_cli.backward.observe.flops import DensePass, PassEstimate
from sparsebp_cli.backward.observe.internals import parameter_of
from sparsebp_cli.backward.patch.forward import NotCopyable
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import Parameter, ParameterSelector, Stateful, Step

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.given import Given

Places = dict[str, tuple[nn.Module, str]]


@final
class ParameterExtension(EngineExtension):
    """A parameter selector in one model.

    It selects among the parameters that require a gradient at attach. Raises :class:`PolicyError` if the policy does
    not fit the model or returns an unknown name, and :class:`UnsupportedError` under reentrant checkpointing.
    """

    def __init__(
        self,
        policy: ParameterSelector,
        model: nn.Module,
        given: Given,
    ) -> None:
        _refuse_reentrant(model)
        self._policy, self._model, self._states, self._optimizer = policy, model, given.states, given.optimizer
        self.parameters, self._places = find_parameters(model)
        self._trained = self._select(given.first)
        self._enabled = True
        self._frozen_here: set[str] = set()  # names of parameters that this extension has frozen, and not the user
        self._handles: list[RemovableHandle] = []
        self._notes: dict[str, str] = {}  # the engine's
        self._offloaded: OffloadedState | None = None
        if policy.offloads_state and given.optimizer is not None:
            self._offloaded = OffloadedState(given.optimizer)

    @property
    @override
    def frozen(self) -> frozenset[str]:
        """Names of parameters that the model trains in general but not in the current step."""
        return frozenset(self._places) - self._trained

    def install(self, engine: EngineView) -> None:
        when = "at each step" if self._policy.changes else "all the time"
        if isinstance(self._policy, Stateful):
            when = "at first"
        self._notes = engine.notes
        self._notes["parameters"] = f"{self._describe()} {when}{self._describe_shared()}"
        self._handles = [hooked.register_forward_hook(_DetachLeaf()) for hooked in _find_forced(self._model)]

    def remove(self) -> None:
        self.enable(False)
        if self._offloaded is not None:
            self._offloaded.bring_all()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def enable(self, enabled: bool) -> None:
        self._enabled = enabled
        for name in self._places:
            parameter = self._get(name)
            if enabled and name not in self._trained:
                if parameter.requires_grad:
                    # Before the forward: decided in the backward, the inputs would be kept by then. See decision 16.
                    parameter.requires_grad_(False)
                    self._frozen_here.add(name)
            elif name in self._frozen_here:  # not those that the user has frozen meanwhile
                parameter.requires_grad_(True)
                self._frozen_here.remove(name)

    def start_step(self, step: Step) -> None:
        before, self._trained = self._trained, self._select(step)
        if self._policy.drops_state and self._optimizer is not None:
            # Of those that leave alone: a resumed optimizer may hold the state of a later step than that of attach.
            for name in before - self._trained:
                self._optimizer.state.pop(self._get(name), None)
        if self._offloaded is not None:
            for name in self._trained:
                self._offloaded.bring(self._get(name))
            for name in self.frozen:
                self._offloaded.send(self._get(name))
        if isinstance(self._policy, Stateful) and self._trained != before:
            self._notes[f"parameters from step {step.index}"] = f"{self._describe()} from step {step.index + 1} on"
        self.enable(self._enabled)
        for name in self.frozen:
            self._get(name).grad = None  # a gradient of an earlier step would be applied again

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining shares of a dense pass."""
        return claim_needed(self._model, dense, [self._get(name) for name in self.frozen])

    def _select(self, step: Step) -> frozenset[str]:
        step = self._states.show(self._policy, replace(step, micro_batch=0, call=0, draw=0, rank=0))
        chosen = frozenset(self._policy.at(step).select(self.parameters, step))
        unknown = sorted(chosen - self._places.keys())
        if unknown:
            raise PolicyError(f"{type(self._policy).__name__} chose {unknown[0]!r}, allowed: names it was given")
        if not chosen:
            raise PolicyError(
                f"{type(self._policy).__name__} chose no parameter at step {step.index}, allowed: 1 or more"
            )
        return chosen

    def _get(self, name: str) -> nn.Parameter:
        # Looked up by module and key, since sharding (FSDP2) replaces the parameter object.
        module, key = self._places[name]
        return parameter_of(module, key)

    def _describe(self) -> str:
        count = sum(p.num_entries for p in self.parameters if p.name in self._trained)
        total = sum(p.num_entries for p in self.parameters)
        tensors = f"{len(self._trained)} of {len(self.parameters)} trainable tensors"
        return f"{tensors}, {count:,} of {total:,} numbers, are trained"

    def _describe_shared(self) -> str:
        shared = [p for p in self.parameters if p.aliases and p.name in self._trained]
        return "".join(f"; {p.name} is {', '.join(p.aliases)} as well: its gradient needs both" for p in shared)


class _DetachLeaf(NotCopyable):
    """Hook after embeddings whose output was made a leaf that requires grad: it returns the output detached.

    ``enable_input_require_grads`` creates such leaves for reentrant checkpointing. They would let the backward run down
    to the embeddings whatever is trained.
    """

    def __call__(self, _module: nn.Module, _args: object, output: object) -> Tensor | None:
        if isinstance(output, Tensor) and output.is_leaf and output.requires_grad:
            return output.detach()
        return None


def find_parameters(model: nn.Module) -> tuple[tuple[Parameter, ...], Places]:
    """Return the parameters that require a gradient, as a policy sees them in the model's order, and their places
    by name.
    """
    layers, modules = LayerNumbers(model), dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    shown = tuple(
        Parameter(first, layers.number_of(first), parameter.numel(), tuple(others), tuple(parameter.shape))
        for parameter, (first, *others) in names.items()
    )
    places = {p.name: (modules[p.name.rpartition(".")[0]], p.name.rpartition(".")[2]) for p in shown}
    return shown, places


def find_places(policy: ParameterSelector, model: nn.Module, given: Given) -> tuple[Parameter, ...]:  # noqa: ARG001
    """Return the parameters among which a policy chooses."""
    return find_parameters(model)[0]


@runtime_checkable
class HasEmbeddings(Protocol):
    """A model of transformers that has token embeddings."""

    def get_input_embeddings(self) -> nn.Module:
        """Return them."""


def _find_forced(model: nn.Module) -> Sequence[nn.Module]:
    """Return the embeddings whose output is forced to require a gradient by ``enable_input_require_grads``."""
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        # enable_input_require_grads leaves no other trace in a model of transformers.
        if module.__dict__.get("_require_grads_hooks"):
            assert isinstance(module, HasEmbeddings)
            found[module.get_input_embeddings()] = None
    return list(found)


def _refuse_reentrant(model: nn.Module) -> None:
    name = find_reentrant(model)
    if name is not None:
        raise UnsupportedError(
            f"parameters that are frozen by a policy and reentrant checkpointing (at {name!r}), which runs the "
            "backward of every layer: enable checkpointing with use_reentrant=False"
        )
