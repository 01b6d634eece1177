"""Finds the layers of a model and splits them into segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean


@dataclass(frozen=True)
class LayerSequence:
    """Modules that run in sequence, each on the output of the previous one."""

    owner: nn.Module  # its forward runs the layers
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]  # one for each name; a shared module occurs several times


def find_layers(model: nn.Module) -> LayerSequence:
    """Return the entries of the model's module list with the most parameters, or else of its ``nn.Sequential``.

    Raises :class:`UnsupportedError` if the model has neither.
    """
    for kind in (nn.ModuleList, nn.Sequential):
        named = [(name, m) for name, m in model.named_modules() if isinstance(m, kind) and len(m) > 0]
        named = [(name, m) for name, m in named if not isinstance(m, ParametrizationList)]  # computes weights
        if not named:
            continue
        name, found = max(named, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
        inside = {n: m for n, m in found.named_modules(remove_duplicate=False) if n and "." not in n}
        owner = model.get_submodule(name.rpartition(".")[0]) if kind is nn.ModuleList else found
        names = tuple(f"{name}.{child}" if name else child for child in inside)
        return LayerSequence(owner, names, tuple(inside.values()))
    raise UnsupportedError(
        f"segments: {type(model).__name__} has no list of layers (nn.ModuleList or nn.Sequential): split the "
        "model yourself, and call segmented_backward"
    )


def split_layers(segments: int | Sequence[str], layers: LayerSequence) -> tuple[range, ...]:
    """Split layers into segments, given their number or the first module of each; return a range of layers per segment.

    Segments are as equal as possible, the longer ones first. Raises :class:`UsageError` if there are fewer layers than
    segments, or names are unknown, out of order, or do not start with the first layer.
    """
    starts = _count_starts(segments, layers) if isinstance(segments, int) else _find_starts(segments, layers)
    return tuple(range(first, end) for first, end in zip(starts, [*starts[1:], len(layers.names)], strict=True))


def _count_starts(segments: int, layers: LayerSequence) -> list[int]:
    if isinstance(segments, bool) or not 1 <= segments <= len(layers.names):
        allowed = f"a number from 1 to {len(layers.names)} (the number of layers) or a list of module names"
        raise UsageError(f"segments must be {allowed}, got {segments}")
    return split_evenly(len(layers.names), segments)


def split_evenly(num_layers: int, num_segments: int) -> list[int]:
    """Return the first layer of each segment: as equal as possible, the longer ones first."""
    short, longer = divmod(num_layers, num_segments)
    return [number * short + min(number, longer) for number in range(num_segments)]


def _find_starts(segments: Sequence[str], layers: LayerSequence) -> list[int]:
    is_list = isinstance(segments, list | tuple) and len(segments) > 0
    if not is_list or not all(isinstance(name, str) for name in segments):
        raise UsageError(f"segments must be a number of segments or a list of module names, got {segments!r}")
    for name in segments:
        if name not in layers.names:
            known = f"{layers.names[0]} to {layers.names[-1]}"
            raise UsageError(
                f"segments: no layer is called {name!r}; layers: {known}{did_you_mean(name, layers.names)}"
            )
    starts = [layers.names.index(name) for name in segments]
    for before, after in pairwise(segments):
        if layers.names.index(after) <= layers.names.index(before):
            raise UsageError(f"segments: {after!r} does not come after {before!r}: name layers in their order")
    if starts[0]:
        raise UsageError(
            f"segments: the first segment must begin with the first layer, {layers.names[0]!r}, got {segments[0]!r}"
        )
    return starts
