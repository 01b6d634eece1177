"""Find the groups of channels of a model, and the frozen linears that belong to them.

A model is recognised by the names of its children; models derived from Llama share them. Shape letters: C channels of a
group, O outputs of a linear, D inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from sparsebp_cli.errors import UnsupportedError
from sparsebp_shelf.channel.kind import ChannelGroup, Part

if TYPE_CHECKING:
    from sparsebp_cli.backward import LayerNumbers

MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Member:
    """A frozen linear whose outputs or inputs are channels of a group.

    Args:
        name: Name of the linear in the model, without the adapter around it.
        linear: The linear.
        adapter: The module around it, or the linear itself.
        side: Whether the channels are its outputs or its inputs.
        entry_CG: The outputs or inputs of each channel, (C, G): one for each head that shares the channel.
        is_scored: Whether its outputs are estimated.
    """

    name: str
    linear: nn.Linear
    adapter: nn.Module
    side: Literal["out", "in"]
    entry_CG: Tensor
    is_scored: bool


@dataclass(frozen=True)
class Group:
    """A group of channels in one model.

    Args:
        about: The description that the policy gets.
        block: The MLP or attention; the scored linears read its input.
        members: Its linears, scored ones first.
    """

    about: ChannelGroup
    block: Any
    members: tuple[Member, ...] = field(default=())


def find_groups(model: nn.Module, layers: LayerNumbers, asker: str) -> list[Group]:
    """Return the groups of a model, layer by layer.

    Args:
        model: A model with adapters, or a frozen one without.
        layers: The model's layers.
        asker: Name of the policy, for error messages.

    Returns:
        The groups of each MLP and attention whose children have the known names.

    Raises:
        UnsupportedError: There are none, or a weight is trained, merged with its adapter, quantised, or under an
            adapter other than LoRA.
    """
    names = {module: name for name, module in model.named_modules()}
    found = [
        group
        for module, name in names.items()
        if (number := layers.number_of(name)) is not None
        for group in _find_groups(module, name, (number, len(layers.layers)), names, asker)
    ]
    if not found:
        raise UnsupportedError(
            f"{asker} needs layers like Llama's, with {', '.join(MLP)} or {', '.join(ATTENTION)}; "
            f"{type(model).__name__} has none"
        )
    return found


def _find_groups(
    module: nn.Module, name: str, layer: tuple[int, int], names: dict[nn.Module, str], asker: str
) -> Iterator[Group]:
    children = dict(module.named_children())
    if children.keys() >= {*MLP} and callable(getattr(module, "act_fn", None)):
        linears = {child: _find_linear(children[child], names, asker) for child in MLP}
        width = linears["gate_proj"][1].out_features
        one = torch.arange(width)[:, None]
        members = tuple(
            Member(*linears[child], children[child], "in" if child == "down_proj" else "out", one, child != "down_proj")
            for child in MLP
        )
        yield Group(ChannelGroup(name, *layer, "mlp", width), module, members)
    if children.keys() >= {*ATTENTION} and isinstance(head_dim := getattr(module, "head_dim", None), int):
        linears = {child: _find_linear(children[child], names, asker) for child in ATTENTION}
        width = linears["k_proj"][1].out_features
        shared = _share(linears["q_proj"][1].out_features, width, head_dim)
        one = torch.arange(width)[:, None]

        def member(child: str, entry_CG: Tensor) -> Member:
            is_output = child == "o_proj"
            return Member(*linears[child], children[child], "in" if is_output else "out", entry_CG, not is_output)

        pairs: tuple[tuple[Part, tuple[Member, ...]], ...] = (
            ("qk", (member("q_proj", shared), member("k_proj", one))),
            ("vo", (member("v_proj", one), member("o_proj", shared))),
        )
        for part, members in pairs:
            yield Group(ChannelGroup(name, *layer, part, width), module, members)


def _share(outputs: int, width: int, head_dim: int) -> Tensor:
    """Return the query outputs that belong to each key channel, (C, G): the same channel of every head of its group."""
    heads = width // head_dim
    return torch.arange(outputs).view(heads, -1, head_dim).transpose(1, 2).reshape(width, -1)


def _find_linear(module: nn.Module, names: dict[nn.Module, str], asker: str) -> tuple[str, nn.Linear]:
    """Return the name and module of a frozen linear, with or without an adapter around it."""
    linear = getattr(module, "base_layer", module)
    name = names[module]
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        raise UnsupportedError(f"{asker}: {name!r} is a {type(linear).__name__}: only plain linears are supported")
    if linear.weight.requires_grad:
        raise UnsupportedError(f"{asker}: the weight of {name!r} is trained, allowed: frozen weights")
    check_adapter(module, name, asker)
    if module is not linear and (not hasattr(module, "lora_A") or any(getattr(module, "use_dora", {}).values())):
        raise UnsupportedError(
            f"{asker}: the adapter of {name!r} is not a plain LoRA, which adds to the weight's output"
        )
    return names[linear], linear


def check_adapter(module: nn.Module, name: str, asker: str) -> None:
    """Raise :class:`UnsupportedError` if an adapter is merged into its weight."""
    if getattr(module, "merged", False):
        raise UnsupportedError(f"{asker}: the adapter of {name!r} is merged into its weight: unmerge it to train")
