"""The decoder in a model, as far as token selection needs to know it, or one line why it is not known."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

from torch import nn

from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.decoder.layout import GROUP, AttentionLayout, attention_name, find_layouts
from sparsebp_cli.errors import UnsupportedError

BUILT = ("eager", "sdpa")


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Args:
        name: In the causal language model.
        module: The layer.
        core: Its attention.
        attention: The attention's linears.
    """

    name: str
    module: nn.Module
    core: nn.Module
    attention: AttentionLayout


@dataclass(frozen=True)
class Decoder:
    """A causal language model of transformers.

    Args:
        model: With its head.
        head: What makes logits.
        layers: In their order.
    """

    model: nn.Module
    head: nn.Module
    layers: tuple[Layer, ...]

    @cached_property
    def pair_cost(self) -> float:
        """What a query and a key cost in attention, over what a row costs in the linears of a layer."""
        middle = self.layers[0]
        weights = sum(parameter.numel() for parameter in middle.module.parameters() if parameter.dim() == 2)
        width = cast("Any", self.model).config.hidden_size
        return 2.0 * float(width) / max(weights, 1)

    @property
    def implementation(self) -> str:
        """transformers' name of the attention function.

        Raises:
            UnsupportedError: Which keys it looks at without a mask is not known.
        """
        names = {attention_name(layer.core) for layer in self.layers}
        name = names.pop() if len(names) == 1 else None
        if name not in BUILT:
            raise UnsupportedError(f"token selection needs attention {' or '.join(BUILT)}, got {name!r}")
        return name


def find_decoder(model: nn.Module) -> Decoder:
    """Find the decoder in a model.

    Args:
        model: A causal language model of transformers, or what wraps one, such as peft.

    Returns:
        The decoder.

    Raises:
        UnsupportedError: There is none, or its architecture is not known.
    """
    causal = next((module for module in model.modules() if _has_head(module)), None)
    if causal is None:
        raise UnsupportedError(f"token selection needs a causal language model of transformers, got {_name(model)}")
    config = cast("Any", causal).config
    for option in ("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"):
        if getattr(config, option, False):
            raise UnsupportedError(f"token selection needs a decoder alone; {_name(causal)} has {option}")
    if config.get_text_config() is not config:  # what is no text may be looked at from before
        raise UnsupportedError(
            f"token selection needs a model of text alone; {_name(causal)} has {type(config).__name__}"
        )
    layouts, numbers = find_layouts(), LayerNumbers(causal)
    layers = []
    for number, module in enumerate(numbers.layers):
        branches = layouts.get(_name(module), ())
        found = next(((branch.core, branch.attention) for branch in branches if branch.attention is not None), None)
        core = None if found is None else getattr(module, found[0], None)
        if found is None or not isinstance(core, nn.Module):
            raise UnsupportedError(
                f"token selection does not know {_name(module)}: a plugin can tell its attention, as a tuple of "
                f"BranchLayout under the entry-point group {GROUP} with the name {_name(module)}"
            )
        layers.append(Layer(numbers.names[number], module, core, found[1]))
    if not layers:
        raise UnsupportedError(f"{_name(causal)} has no list of layers")
    decoder = Decoder(causal, cast("Any", causal).get_output_embeddings(), tuple(layers))
    _ = decoder.implementation
    return decoder


def refuse_prompt(model: nn.Module, name: str) -> None:
    """Refuse a trained prompt, such as those of peft, that no gradient would reach.

    Args:
        model: That is attached.
        name: Of the policy, under which only trained positions carry gradient.

    Raises:
        UnsupportedError: There is one.
    """
    for module in model.modules():
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedError(
                f"{name} in mode detach gives the prompt of {_name(module)} no gradient, since trained positions alone "
                "carry one: give carry: real, or mode: exact"
            )


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that a module's class takes in its forward, in order."""
    return _names(cast("Any", type(module)))


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module's forward by their names.

    Args:
        module: Its class's own forward tells the names.
        args: As given.
        kwargs: As given.

    Returns:
        All of them that were given.
    """
    return dict(zip(argument_names(module), args, strict=False)) | kwargs


@contextmanager
def unchecked(module: nn.Module) -> Iterator[None]:
    """Run a layer without its own checkpointing, which takes its cache away.

    Args:
        module: The layer.

    Yields:
        None: As long as it runs.
    """
    before = module.__dict__.get("gradient_checkpointing")
    if before:
        module.__dict__["gradient_checkpointing"] = False
    try:
        yield
    finally:
        if before:
            module.__dict__["gradient_checkpointing"] = before


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _has_head(module: nn.Module) -> bool:
    loaded = sys.modules.get("transformers.modeling_utils")  # a model that is one has loaded it
    if loaded is None or not isinstance(module, loaded.PreTrainedModel):
        return False
    return "labels" in argument_names(module) and module.get_output_embeddings() is not None


def _name(module: nn.Module) -> str:
    return type(module).__name__
