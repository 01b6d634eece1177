"""The causal language model of token selection: its head, layers and attentions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, cast

import torch
from torch import nn

from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.decoder.layout import GROUP, AttentionLayout, find_attention, find_layouts
from sparsebp_cli.backward.decoder.unfit import explain
from sparsebp_cli.errors import UnsupportedError

SUPPORTED = ("eager", "sdpa")
PACKED = "packed_"  # prefix of an attention function's name while rows are packed; ours then calls that function
# Options of experts' routers that concern all positions: a loss over them, and noise.
ROUTER_OPTIONS = ("output_router_logits", "router_jitter_noise", "input_jitter_noise", "jitter_noise")


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    name: str  # name in the causal language model
    module: nn.Module
    core: nn.Module  # its attention
    attention: AttentionLayout
    argument_names: tuple[str, ...]  # arguments of its forward, in order; hidden states come first


@dataclass(frozen=True)
class Decoder:
    """A causal language model of transformers, its output head and its layers in order."""

    model: nn.Module
    head: nn.Module
    layers: tuple[Layer, ...]

    @cached_property
    def pair_cost(self) -> float:
        """Cost of one query-key pair in attention over the cost of one row in a layer's linears."""
        middle = self.layers[0]
        weights = sum(parameter.numel() for parameter in middle.module.parameters() if parameter.dim() == 2)
        width = cast("Any", self.model).config.hidden_size
        return 2.0 * float(width) / max(weights, 1)

    @cached_property
    def equal_windows(self) -> tuple[int, ...]:
        """For each layer the index of the first layer with the same window. All layers must have windows."""
        windows = [layer.core.get_buffer(layer.attention.window or "") for layer in self.layers]
        return tuple(next(n for n, other in enumerate(windows) if torch.equal(own, other)) for own in windows)

    @property
    def is_one_bias(self) -> bool:
        """Whether all examples share one bias over keys, so that all must have the same keys."""
        return any(layer.attention.is_one_bias for layer in self.layers)

    @property
    def spreads_masked(self) -> bool:
        """Whether a fully masked row attends to every position, as with masks of lowest finite values."""
        return self.implementation == "eager" or any(layer.attention.bias for layer in self.layers)

    @property
    def implementation(self) -> str:
        """transformers' name of the attention function.

        Raises:
            UnsupportedError: It is unknown to which keys this function attends without a mask.
        """
        names = {attention_name(layer.core) for layer in self.layers}
        # The attentions may have no configuration; the model's masks are then for its own implementation.
        if names == {None} and attention_name(self.model) == "eager":
            return "eager"
        name = names.pop() if len(names) == 1 else None
        if name not in SUPPORTED:
            allowed = f"the attention implementation {' or '.join(SUPPORTED)}"
            raise UnsupportedError(f"token selection needs {allowed}, got {name!r}")
        return name


def find_decoder(model: nn.Module) -> Decoder:
    """Find the causal language model in a model or wrapper, such as peft's.

    Raises :class:`UnsupportedError` if there is none, or its architecture is unknown.
    """
    causal = next((module for module in model.modules() if _has_head(module)), None)
    if causal is None:
        raise UnsupportedError(f"token selection needs a causal language model of transformers, got {_name(model)}")
    config: Any = causal.config
    for option in ("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"):
        if getattr(config, option, False):
            raise UnsupportedError(f"token selection needs a decoder-only model, but {_name(causal)} sets {option}")
    if config.get_text_config() is not config:  # images may be attended to by earlier positions
        raise UnsupportedError(f"token selection needs a text-only model, not a {type(config).__name__}")
    refuse_routers(causal, "token selection")
    layouts, numbers = find_layouts(), LayerNumbers(causal)
    layers = []
    for number, module in enumerate(numbers.layers):
        known = find_attention(module, layouts)
        if known is None:
            reason = explain(_name(module)) or (
                "use another policy, or describe this layer in a plug-in, by a tuple of BranchLayout in the "
                f"entry-point group {GROUP}, under the name {_name(module)}"
            )
            raise UnsupportedError(f"token selection does not support the layer {_name(module)}: {reason}")
        core, attention = known
        arguments = argument_names(module)
        layers.append(Layer(numbers.names[number], module, core, attention.fitted(arguments), arguments))
    if not layers:
        raise UnsupportedError(f"token selection needs a model with a list of layers; {_name(causal)} has none")
    decoder = Decoder(causal, cast("Any", causal).get_output_embeddings(), tuple(layers))
    # Raise now, before anything changes, rather than in the first forward.
    _ = decoder.implementation
    return decoder


def refuse_routers(model: nn.Module, what: str) -> None:
    """Raise :class:`UnsupportedError` if the experts of a model have a loss or noise that depends on all positions."""
    for module in model.modules():
        for option in ROUTER_OPTIONS:
            if getattr(getattr(module, "config", None), option, None):
                raise UnsupportedError(
                    f"{what} computes only some positions, but {_name(module)} has {option}, which needs all "
                    f"positions: set {option} to 0 or False"
                )


def refuse_prompt(model: nn.Module, name: str, mode: str) -> None:
    """Refuse a trained prompt, such as peft's, that would get no gradient if only trained positions carry one."""
    for module in model.modules():
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedError(
                f"{name} in mode {mode} computes no gradient for the soft prompt (prompt tuning) of {_name(module)}, "
                "because the prompt's positions have no labels: set 'mode: exact'"
            )


def attention_name(core: nn.Module) -> str | None:
    """Return transformers' name of the attention function, such as sdpa; None if there is none."""
    name: str | None = getattr(getattr(core, "config", None), "_attn_implementation", None)
    return None if name is None else name.removeprefix(PACKED)


def dropout_rates(module: nn.Module) -> list[float]:
    """Return the dropout rates of a module in training, including rates for functions that it calls."""
    # transformers keeps rates of dropout by function as numbers under many names, all with "drop" in them.
    rates = [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
    return [*rates, module.p] if isinstance(module, nn.Dropout) else rates


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's class's forward, in order."""
    return _names(type(module).forward)


def bind_arguments(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    """Return the arguments of a call of a module's forward by the names that its class declares."""
    return dict(zip(argument_names(module), args, strict=False)) | kwargs


def find_reentrant(model: nn.Module) -> str | None:
    """Return the name of a module whose layers are checkpointed with ``use_reentrant=True``; None without one."""
    return next((str(name) for name, module in model.named_modules() if is_reentrant(module)), None)


def is_reentrant(module: nn.Module | None) -> bool:
    """Return whether the layers of a module itself are checkpointed with ``use_reentrant=True``."""
    if module is None or not getattr(module, "gradient_checkpointing", False):
        return False
    # Only here transformers stores the options, in a partial of torch.utils.checkpoint.checkpoint.
    options: dict[str, object] = getattr(module.__dict__.get("_gradient_checkpointing_func"), "keywords", {})
    return bool(options.get("use_reentrant", True))


@contextmanager
def without_reentrance(model: nn.Module) -> Iterator[None]:
    """Checkpoint the layers of a model without reentrance, which supports ``torch.autograd.grad``."""
    name = "_gradient_checkpointing_func"
    found: dict[nn.Module, Any] = {module: vars(module)[name] for module in model.modules() if name in vars(module)}
    for module, function in found.items():
        module.__dict__[name] = partial(function, use_reentrant=False)
    try:
        yield
    finally:
        for module, function in found.items():
            module.__dict__[name] = function


@contextmanager
def without_checkpointing(*modules: nn.Module) -> Iterator[None]:
    """Run layers without their own activation checkpointing, which would drop their key/value cache."""
    active = [module for module in modules if module.__dict__.get("gradient_checkpointing")]
    for module in active:
        module.__dict__["gradient_checkpointing"] = False
    try:
        yield
    finally:
        for module in active:
            module.__dict__["gradient_checkpointing"] = True


@cache
def _names(forward: Callable[..., object]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a transformers model, not a layer of one."""
    loaded = sys.modules.get("transformers.modeling_utils")  # loaded if the model is one of transformers
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)


def _has_head(module: nn.Module) -> bool:
    if not is_pretrained(module):
        return False
    return "labels" in argument_names(module) and module.get_output_embeddings() is not None  # type: ignore[operator]


def _name(module: nn.Module) -> str:
    return type(module).__name__
