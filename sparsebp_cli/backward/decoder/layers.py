"""Numbering of the layers of a decoder, an encoder, or both."""

from __future__ import annotations

from torch import nn


class LayerNumbers:
    """The layers of a model, numbered from 0.

    The layers are the entries of the module list with the most parameters. If that list is in one of two sibling
    modules ``encoder`` and ``decoder``, the layers of both count, the encoder's first, so -1 is the decoder's last.

    Args:
        model: The model, of any architecture.

    Attributes:
        layers: All layers; empty if the model has no module list.
        names: The name of each.
    """

    names: list[str]

    def __init__(self, model: nn.Module) -> None:
        # Include duplicates, since callers may use any name of a shared module.
        self._names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        self._stacks = _find_stacks(model)
        self.layers: list[nn.Module] = [layer for _, stack in self._stacks for layer in stack]
        self.names = [_join(name, str(number)) for name, stack in self._stacks for number in range(len(stack))]

    def number_of(self, name: str) -> int | None:
        """Return the layer number, from 0, of a module or parameter by its name; None outside of the layers."""
        first = 0
        for stack_name, stack in self._stacks:
            prefix = _join(stack_name, "")
            if name.startswith(prefix):
                return first + int(name[len(prefix) :].partition(".")[0])
            first += len(stack)
        return None

    def owner_of(self, name: str) -> str:
        """Return the innermost module that contains a site, parameter or module; empty for the model itself."""
        while name not in self._names:
            name = name.rpartition(".")[0]
        return name

    def part_of(self, name: str) -> str:
        """Return the layer that contains a site, parameter or module; outside of the layers the innermost module."""
        number = self.number_of(name)
        return self.owner_of(name) if number is None else self.names[number]

    def describe(self) -> str:
        """Return a phrase with the layer numbers of each module list."""
        parts, first = [], 0
        for name, stack in self._stacks:
            last = first + len(stack) - 1
            parts.append(f"{first} to {last} are those of {name or 'the model'}")
            first = last + 1
        return f"layers {', '.join(parts)}"


def _find_stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    largest = _largest_list(model, "")
    if largest is None:
        return []
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if "encoder" not in children or "decoder" not in children:
            continue
        pair = [_largest_list(children[side], _join(name, side)) for side in ("encoder", "decoder")]
        stacks = [stack for stack in pair if stack is not None]
        if len(stacks) == 2 and any(stack is largest[1] for _, stack in stacks) and stacks[0][1] is not stacks[1][1]:
            return stacks
    return [largest]


def _largest_list(module: nn.Module, name: str) -> tuple[str, nn.ModuleList] | None:
    lists = [
        (".".join(part for part in (name, inner) if part), m)
        for inner, m in module.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) > 0
    ]
    return max(lists, key=lambda pair: _num_parameters(pair[1]), default=None)


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
