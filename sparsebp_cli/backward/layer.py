"""Which decoder (or encoder) layer a module belongs to."""

from __future__ import annotations

from torch import nn


class LayerNumbers:
    """The layers of a model: the entries of the list of modules that holds most of its parameters.

    Args:
        model: Any module.

    Attributes:
        prefix: The list's name and a dot; empty when the model is the list.
        layers: Its entries; none when the model has no list.
    """

    def __init__(self, model: nn.Module) -> None:
        lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
        name, found = max(lists, key=lambda pair: _num_parameters(pair[1]), default=("", nn.ModuleList()))
        self.prefix = f"{name}." if name else ""
        self.layers: list[nn.Module] = list(found)
        self._names = {name for name, _ in model.named_modules(remove_duplicate=False)}

    def number_of(self, name: str) -> int | None:
        """Return the layer's number, from 0, of a module or parameter by its name; None outside of the layers."""
        if not self.layers or not name.startswith(self.prefix):
            return None
        return int(name[len(self.prefix) :].partition(".")[0])

    def owner_of(self, name: str) -> str:
        """Return the nearest module of a site, parameter or module by its name; empty for the model itself."""
        while name not in self._names:
            name = name.rpartition(".")[0]
        return name

    def part_of(self, name: str) -> str:
        """Return the layer that holds a site, parameter or module; outside of the layers its nearest module."""
        number = self.number_of(name)
        return self.owner_of(name) if number is None else f"{self.prefix}{number}"


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
