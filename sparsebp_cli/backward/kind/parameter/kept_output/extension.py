"""Frozen lower layers that run once for each example. At later visits the last of them returns its cached output.

All frozen layers but the last return their input and record their arguments. The last one looks up the batch's examples
in the cache, runs all frozen layers for the others, and returns both. See decision 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli.backward.core.extension import EngineExtension
from sparsebp_cli.backward.core.report import OutputUse
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.kind.parameter.extension import find_parameters
from sparsebp_cli.backward.kind.parameter.kept_output.calls import Call, LayerCalls, hidden_of
from sparsebp_cli.backward.kind.parameter.kept_output.context import FrozenContext
from sparsebp_cli.backward.kind.parameter.kept_output.fill import Fill, FrozenForward, LoneFill, PaddedFill
from sparsebp_cli.backward.kind.parameter.kept_output.store import DiskStore, MemoryStore, OutputStore
from sparsebp_cli.backward.observe.flops import PassEstimate
from sparsebp_cli.backward.observe.internals import parameter_of
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, NotCopyable
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import ParameterSelector

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.given import Given
    from sparsebp_cli.backward.observe.flops import DensePass
    from sparsebp_cli.policy.kept_output import KeptOutputs

FOLDER = "kept-outputs"  # subfolder of the training's folder


@final
class OutputExtension(EngineExtension):
    """The cached outputs of one model.

    Raises :class:`PolicyError` if the first layer or the embeddings are trained, :class:`UnsupportedError` for a model
    whose frozen layers draw random numbers or have hooks, and :class:`UsageError` if a cache on disk has no folder.
    """

    _engine: EngineView

    def __init__(self, policy: ParameterSelector, kept: KeptOutputs, model: nn.Module, given: Given) -> None:
        self._name, self._kept, self._model = type(policy).__name__, kept, model
        names, layers = _find_frozen(policy, model, given)
        self.layers = names
        self._modules = layers
        self._context = FrozenContext(names, layers)
        self._context.refuse_random()
        self._context.refuse_hooks()
        # A forecast runs a step on fake tensors, which cannot be compared, so each visit counts as the first.
        self._is_fake = any(hasattr(p.data, "fake_mode") for layer in layers for p in layer.parameters())
        store = _make_store(kept, given.folder, self._name)
        self._fill: Fill = (PaddedFill if kept.padding == "keep" else LoneFill)(kept, store)
        self._patches, self._handles = ForwardPatches(), list[RemovableHandle]()
        self._calls: list[Call] = []  # calls of the running forward
        self._passed: object = None  # output of the layer that ran last
        self._tuples: list[bool] = []  # whether each layer returns a tuple, known after its first run
        self._rng: tuple[Tensor, ...] = ()  # states of the random generators at the beginning of the forward
        self._mask: Tensor | None = None  # attention mask of the running forward
        self._use = OutputUse()
        self._last: tuple[float, float] = (1.0, 0.0)  # last forward: executed fraction of FLOPs, and FLOPs saved

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        what = self.layers[-1] if len(self.layers) == 1 else f"{self.layers[-1]}, the last of {len(self.layers)} frozen"
        form = "" if self._kept.form == "exact" else f", in {self._kept.form}"
        engine.notes["kept outputs"] = (
            f"the output of {what}, is kept for each example{form}: {self._kept.place}, {self._kept.max_bytes:,} bytes "
            "at most"
        )
        self._handles = [self._model.register_forward_pre_hook(_StartHook(self), with_kwargs=True)]
        for number, module in enumerate(self._modules):
            self._patches.install(module, _LayerOverride(module, number, self))

    def remove(self) -> None:
        self._patches.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the FLOPs of the layers, so that a resumed run can count saved FLOPs."""
        cost = self._fill.cost
        return {"frozen_cost": None if cost is None else list(cost)}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the FLOPs of the layers."""
        cost = state["frozen_cost"]
        self._fill.cost = None if cost is None else (float(cost[0]), float(cost[1]))

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the estimate for a dense pass: the fraction of the forward that ran in the last pass on the batch."""
        inside = [name for name in dense.flops.forward if name.startswith(tuple(f"{layer}." for layer in self.layers))]
        return PassEstimate(forward=dict.fromkeys((*inside, *self.layers), self._last[0]))

    @property
    @override
    def left_out(self) -> float:
        """FLOPs that the last forward saved."""
        return self._last[1]

    @override
    def take_use(self) -> OutputUse:
        """Return the use of the cache in training since the last call."""
        use, self._use = self._use, OutputUse()
        return replace(use, num_bytes=self._fill.store.num_bytes, relative_error=self._fill.error.relative)

    def start_forward(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a forward whose caller reads values between the layers."""
        if not self._acts:
            return
        config = getattr(self._model, "config", None)
        for option in ("output_hidden_states", "output_attentions"):
            if kwargs.get(option, getattr(config, option, False)):
                raise UnsupportedError(
                    f"{self._name} caches outputs of frozen layers and does not recompute the values between them, "
                    f"which {option} reads: leave it out"
                )
        self._rng, mask = _read_rng(), kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) else None

    def run(self, override: _LayerOverride, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a frozen layer, or defer it until the last of them has looked up the cache."""
        if not self._acts or self._context.trains:
            return override.plain(*args, **kwargs)
        number, last = override.number, len(self._modules) - 1
        call = Call(self.layers[number], override.plain, args, kwargs)
        if number == 0:
            self._calls = []
            if len(self._tuples) <= last:
                self._tuples = []
        self._check(call, number)
        self._calls.append(call)
        whole = None
        if len(self._tuples) <= last:  # the first forward shows the types of the layers' outputs
            output = override.plain(*args, **kwargs)
            whole = _check_output(output, call.name)
            self._tuples.append(isinstance(output, tuple))
            self._passed = whole
            if number < last:
                return output
        elif number < last:
            self._passed = call.hidden
            return self._wrap(call.hidden, number)
        try:
            result = self._finish(LayerCalls(self._calls), whole)
        finally:
            self._calls, self._passed = [], None
        return self._wrap(result, number)

    @property
    def _acts(self) -> bool:
        return not self._is_fake and self._engine.enabled and self._model.training and torch.is_grad_enabled()

    def _wrap(self, hidden: object, number: int) -> object:
        return (hidden,) if self._tuples[number] else hidden

    def _check(self, call: Call, number: int) -> None:
        """Refuse a call unless it is the next layer's, with the output of the layer before."""
        hidden = call.hidden
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise UnsupportedError(
                f"{self._name} caches outputs by example, but {call.name} gets no tensor (examples, positions, width)"
            )
        if len(self._calls) != number or (number and hidden is not self._passed):
            raise UnsupportedError(
                f"{self._name} caches outputs of consecutive layers, but {call.name} does not get the output of the "
                "layer before it"
            )
        if hidden.requires_grad:
            raise UnsupportedError(
                f"{self._name} caches outputs of frozen layers, but the input of {call.name} is trained: freeze all "
                "parameters before it, such as the embeddings"
            )
        if number == 0 and any(map(_differs, self._rng, _read_rng())):
            raise UnsupportedError(
                f"{self._name} caches outputs by example, but the input of {call.name} is random in each forward: set "
                "dropout and noise of the embeddings to 0"
            )

    def _finish(self, calls: LayerCalls, whole: Tensor | None) -> Tensor:
        """Return the output of the frozen layers for a batch; ``whole`` is this output if it was computed already."""
        context, probes = self._context.digest(), self._engine.is_probing
        self._context.refuse_random()  # dropout rates may have changed
        filled = self._fill(FrozenForward(calls, self._mask, whole, context, probes=probes))
        if whole is not None and any(map(_differs, self._rng, _read_rng())):
            raise UnsupportedError(f"{self._name} caches outputs of frozen layers, but these draw random numbers")
        self._last = (filled.executed_share, filled.left_out)
        if not probes:
            self._use = self._use.add(calls.num_examples, filled.num_known, filled.left_out)
            self._engine.notes |= self._fill.notes
        return filled.output_BTD


class _LayerOverride(ForwardOverride):
    """The ``forward`` of one frozen layer."""

    def __init__(self, module: nn.Module, number: int, extension: OutputExtension) -> None:
        self.module, self.number, self._extension = module, number, extension
        self.plain = partial(self.run_covered, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs) if self.is_removed else self._extension.run(self, args, kwargs)


class _StartHook(NotCopyable):
    """Hook before the model's forward."""

    def __init__(self, extension: OutputExtension) -> None:
        self._extension = extension

    def __call__(self, _module: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        self._extension.start_forward(kwargs)


def make_outputs(policy: ParameterSelector, model: nn.Module, given: Given) -> OutputExtension | None:
    """Return the extension that caches outputs for a policy; None if it caches none."""
    kept = policy.keeps_outputs
    return None if kept is None else OutputExtension(policy, kept, model, given)


def _find_frozen(policy: ParameterSelector, model: nn.Module, given: Given) -> tuple[list[str], list[nn.Module]]:
    """Return the names and modules of the layers below the lowest trained one."""
    name, numbers = type(policy).__name__, LayerNumbers(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} caches outputs of one stack of layers, but this model has two")
    parameters, places = find_parameters(model)
    step = given.states.show(policy, given.first)
    trained = {id(parameter_of(*places[chosen])) for chosen in policy.at(step).select(parameters, step)}
    layers = list[nn.Module]()
    for layer in numbers.layers:
        if any(id(parameter) in trained for parameter in layer.parameters()):
            break
        layers.append(layer)
    if not layers:
        first = f"{numbers.names[0]} is trained" if numbers.layers else "this model has no layers"
        raise PolicyError(f"cache needs frozen lowest layers, but {first}: freeze it, or leave cache out")
    find = getattr(model, "get_input_embeddings", None)  # of a model of transformers
    embeddings: nn.Module | None = find() if find is not None else None
    if embeddings is not None and any(id(parameter) in trained for parameter in embeddings.parameters()):
        raise PolicyError(
            "cache needs frozen lowest layers, but the embeddings before them are trained: freeze them (and a tied "
            "head), or leave cache out"
        )
    return numbers.names[: len(layers)], layers


def _make_store(kept: KeptOutputs, folder: Path | None, name: str) -> OutputStore:
    if kept.place == "memory":
        return MemoryStore(kept.max_bytes)
    if folder is None:
        raise UsageError(
            f"{name} caches outputs on disk: give attach(folder=...), a folder for this training, or cache='memory'"
        )
    return DiskStore(folder / FOLDER, kept.max_bytes)


def _check_output(output: object, name: str) -> Tensor:
    hidden = hidden_of(output)
    others = output[1:] if isinstance(output, tuple) else ()
    if not isinstance(hidden, Tensor) or any(other is not None for other in others):
        raise UnsupportedError(f"frozen: outputs cannot be cached: {name} returns more than its hidden states")
    return hidden


def _read_rng() -> tuple[Tensor, ...]:
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return (torch.get_rng_state(), *states)


def _differs(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one, other)
