"""Carries out which parameters are trained at a step: the others require no gradient while the step lasts.

Autograd itself then computes no gradient of what is not trained, keeps no input for it, and ends the backward where
nothing further down is trained. ``.grad`` of what is not trained is None, not zero: optimizers of PyTorch leave such a
parameter and its state alone, weight decay included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast, final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.observe.claim import DensePass, PassEstimate
from sparsebp_cli.backward.selection.required_grads import claim_needed
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Parameter, ParameterSelector, Step

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView

Places = dict[str, tuple[nn.Module, str]]


@final
class ParameterExtension:
    """A parameter selector at work in one model; see :class:`~sparsebp_cli.backward.core.extension.EngineExtension`.

    Args:
        policy: Says what is trained.
        model: Its parameters that require a gradient now are those that it would train.

    Raises:
        PolicyError: The policy does not fit the model, or names something else.
        UnsupportedError: The model's layers are checkpointed in the reentrant way.
    """

    def __init__(self, policy: ParameterSelector, model: nn.Module) -> None:
        _refuse_reentrant(model)
        self._policy, self._model = policy, model
        self.parameters, self._places = find_parameters(model)
        self._trained = self._ask(Step(0))
        self._enabled = True
        self._held: set[str] = set()  # names of those that require no gradient because of this part, and not of others
        self._handles: list[Any] = []

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters that the model would train, and the step under way does not."""
        return frozenset(self._places) - self._trained

    def install(self, engine: EngineView) -> None:
        when = "at each step" if self._policy.changes else "all the time"
        count = sum(p.num_entries for p in self.parameters if p.name in self._trained)
        total = sum(p.num_entries for p in self.parameters)
        engine.notes["parameters"] = (
            f"{len(self._trained)} of {len(self.parameters)} trainable tensors, {count:,} of {total:,} numbers, "
            f"are trained {when}{self._tell_shared()}"
        )
        self._handles = [hooked.register_forward_hook(_Cut()) for hooked in _find_forced(self._model)]

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
                    parameter.requires_grad_(False)
                    self._held.add(name)
            elif name in self._held:  # what the user has frozen meanwhile stays so
                parameter.requires_grad_(True)
                self._held.remove(name)

    def start_step(self, step: Step) -> None:
        self._trained = self._ask(step)
        self.enable(self._enabled)
        for name in self.frozen:
            self._get(name).grad = None  # what is left of an earlier step would be applied once more

    def claim(self, dense: DensePass) -> PassEstimate:
        """Return what is left of a dense pass; see :class:`~sparsebp_cli.backward.core.extension.EstimatesFlops`."""
        return claim_needed(self._model, dense, [self._get(name) for name in self.frozen])

    def _ask(self, step: Step) -> frozenset[str]:
        step = replace(step, micro_batch=0, call=0, draw=0, rank=0)
        chosen = frozenset(self._policy.select(self.parameters, step))
        unknown = sorted(chosen - self._places.keys())
        if unknown:
            raise PolicyError(f"{type(self._policy).__name__} chose {unknown[0]!r}, which is nothing that it was shown")
        if not chosen:
            raise PolicyError(
                f"{type(self._policy).__name__} chose no parameter at step {step.index}, allowed: 1 or more"
            )
        return chosen

    def _get(self, name: str) -> nn.Parameter:
        # By its place, since sharding (FSDP2) puts another parameter there.
        module, key = self._places[name]
        return cast("nn.Parameter", module._parameters[key])  # noqa: SLF001 - getattr may call a parametrization

    def _tell_shared(self) -> str:
        shared = [p for p in self.parameters if p.aliases and p.name in self._trained]
        return "".join(f"; {p.name} is {', '.join(p.aliases)} as well: its gradient needs both" for p in shared)


class _Cut:
    """After embeddings whose output was made to require a gradient for its own sake: it needs none.

    ``enable_input_require_grads`` does that for reentrant checkpointing; it lets the backward run down to the
    embeddings whatever is trained.
    """

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Tensor | None:  # noqa: ARG002 - torch's signature
        forced = isinstance(output, Tensor) and output.is_leaf and output.requires_grad
        return output.detach() if forced else None

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise UnsupportedError("an attached model cannot be copied or pickled: call engine.detach() first")


def find_parameters(model: nn.Module) -> tuple[tuple[Parameter, ...], Places]:
    """Find the parameters that a model would train, which are those that require a gradient.

    Args:
        model: Any module.

    Returns:
        What a policy is shown of them, in the model's order; and by name where each one is.
    """
    layers, modules = LayerNumbers(model), dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    shown = tuple(
        Parameter(first, layers.number_of(first), parameter.numel(), tuple(others))
        for parameter, (first, *others) in names.items()
    )
    places = {p.name: (modules[p.name.rpartition(".")[0]], p.name.rpartition(".")[2]) for p in shown}
    return shown, places


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model whose parameters have no shape yet.

    Args:
        model: Any.

    Raises:
        UsageError: It has a lazy module that has not run.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(f"{name!r} has no shape before the model has run: run it once, and attach then")


def _find_forced(model: nn.Module) -> Sequence[nn.Module]:
    """Return the embeddings whose output transformers' ``enable_input_require_grads`` lets require a gradient."""
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if module.__dict__.get("_require_grads_hooks"):
            get: Any = module.get_input_embeddings
            found[get()] = None
    return list(found)


def _refuse_reentrant(model: nn.Module) -> None:
    for name, module in model.named_modules():
        function = module.__dict__.get("_gradient_checkpointing_func")
        options = getattr(function, "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and options.get("use_reentrant", True):
            raise UnsupportedError(
                f"parameters that are frozen by a policy and reentrant checkpointing (at {name!r}), which runs the "
                "backward of every layer: enable checkpointing with use_reentrant=False"
            )
