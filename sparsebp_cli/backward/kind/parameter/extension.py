"""Parameter selection: parameters that are not trained at a step do not require a gradient during it.

Autograd then computes no gradient for a frozen parameter, stores no input for it, and ends the backward after the last
trained one. ``.grad`` of a frozen parameter is None, not zero, so that PyTorch's optimizers skip the parameter and its
state, including weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast, final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli.backward.core.extension import EngineExtension
from sparsebp_cli.backward.decoder.decoder import find_reentrant
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.kind.required_grads import claim_needed
from sparsebp_cli.backward.observe.flops import DensePass, PassEstimate
from sparsebp_cli.backward.observe.internals import parameter_of
from sparsebp_cli.backward.patch.forward import NotCopyable
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import Parameter, ParameterSelector, Stateful, Step, returned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        self._frozen_here: set[str] = set()  # names of parameters that this extension froze, not the user
        self._handles: list[RemovableHandle] = []
        self._notes: dict[str, str] = {}  # the engine's notes

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
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def enable(self, enabled: bool) -> None:
        self._enabled = enabled
        for name in self._places:
            parameter = self._get(name)
            if enabled and name not in self._trained:
                if parameter.requires_grad:
                    # Freeze before the forward, since at the backward the inputs are already saved. See decision 16.
                    parameter.requires_grad_(False)
                    self._frozen_here.add(name)
            elif name in self._frozen_here:  # not a parameter that the user has frozen meanwhile
                parameter.requires_grad_(True)
                self._frozen_here.remove(name)

    @override
    def refreeze(self) -> None:
        self.enable(self._enabled)

    def start_step(self, step: Step) -> None:
        before, self._trained = self._trained, self._select(step)
        if self._policy.drops_state and self._optimizer is not None:
            # Only of parameters that leave: a resumed optimizer may have the state of a later step than at attach.
            for name in before - self._trained:
                self._optimizer.state.pop(self._get(name), None)
        if isinstance(self._policy, Stateful) and self._trained != before:
            self._notes[f"parameters from step {step.index}"] = f"{self._describe()} from step {step.index + 1} on"
        self.enable(self._enabled)
        for name in self.frozen:
            self._get(name).grad = None  # the optimizer would apply an earlier step's gradient again

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass."""
        return claim_needed(self._model, dense, [self._get(name) for name in self.frozen])

    def _select(self, step: Step) -> frozenset[str]:
        step = self._states.show(self._policy, replace(step, micro_batch=0, call=0, draw=0, rank=0))
        asked = f"{type(self._policy).__name__}.select"
        chosen = returned.require_names(asked, self._policy.at(step).select(self.parameters, step), self._places)
        if not chosen:
            raise PolicyError(
                f"{type(self._policy).__name__} chose no parameter at step {step.index}: choose at least one"
            )
        return chosen

    def _get(self, name: str) -> nn.Parameter:
        # Look up by module and key, since sharding (FSDP2) replaces the parameter object.
        module, key = self._places[name]
        return parameter_of(module, key)

    def _describe(self) -> str:
        count = sum(p.num_entries for p in self.parameters if p.name in self._trained)
        total = sum(p.num_entries for p in self.parameters)
        tensors = f"{len(self._trained)} of {len(self.parameters)} trainable tensors"
        return f"{tensors} ({count:,} of {total:,} values) are trained"

    def _describe_shared(self) -> str:
        shared = [p for p in self.parameters if p.aliases and p.name in self._trained]
        return "".join(f"; {p.name} is also {', '.join(p.aliases)}: its gradient comes from both uses" for p in shared)


class _DetachLeaf(NotCopyable):
    """Hook that detaches the output of embeddings if it is a leaf that requires grad.

    ``enable_input_require_grads`` creates such leaves for reentrant checkpointing. With them, every backward would run
    down to the embeddings, even if no parameter there is trained.
    """

    def __call__(self, _module: nn.Module, _args: object, output: object) -> Tensor | None:
        if isinstance(output, Tensor) and output.is_leaf and output.requires_grad:
            return output.detach()
        return None


def find_parameters(model: nn.Module) -> tuple[tuple[Parameter, ...], Places]:
    """Return the parameters that require a gradient, as a policy's arguments in the model's order, and their places by
    name.
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
    """Return the parameters from which a policy chooses."""
    return find_parameters(model)[0]


def _find_forced(model: nn.Module) -> Sequence[nn.Module]:
    """Return the embeddings whose output is forced to require a gradient by ``enable_input_require_grads``."""
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        # enable_input_require_grads leaves no other trace in a transformers model.
        if module.__dict__.get("_require_grads_hooks"):
            found[cast("PreTrainedModel", module).get_input_embeddings()] = None
    return list(found)


def _refuse_reentrant(model: nn.Module) -> None:
    name = find_reentrant(model)
    if name is not None:
        raise UnsupportedError(
            f"a policy cannot freeze parameters under reentrant checkpointing (at {name!r}), which runs the backward "
            "of every layer: enable checkpointing with use_reentrant=False"
        )
