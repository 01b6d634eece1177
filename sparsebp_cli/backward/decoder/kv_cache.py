"""Replacements for a key/value cache, to read an attention's keys and values or to supply others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

# transformers' names of the cache among arguments and outputs: since 5.24, and before.
CACHE_NAMES = ("cache", "past_key_values")


class RecordedKV(Exception):  # noqa: N818 - not an error: it ends a forward early and carries its result
    """Ends an attention's forward once its keys and values are computed."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class RecordKV:
    """A cache that ends the forward at its first update by raising :class:`RecordedKV`."""

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> NoReturn:
        """Raise with the keys and values of the attention."""
        raise RecordedKV(keys, values)


class StandInKV:
    """A cache without earlier positions, for attentions that count their queries after the update."""

    def get_seq_length(self, *_: object) -> int:
        """Return 0."""
        return 0


class FixedKV(StandInKV):
    """A cache that always returns the given keys and values, each (B, H, T, D), and ignores added ones."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the given keys and values."""
        return self.keys, self.values


def skip_outputs(core: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Return replacements that skip the computation of an attention's children whose output is not needed.

    Linears return zeros, norms their input. Pass the result to
    :func:`~sparsebp_cli.backward.patch.forward.replace_forwards`.
    """
    skipped: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
    clips = getattr(getattr(core, "config", None), "clip_qkv", None) is not None  # olmo clamps them in place
    for name in names:
        module = getattr(core, name, None)
        if module is None:  # the layout lists modules of several variants, and this attention lacks one
            continue
        width = getattr(module, "nf", getattr(module, "out_features", None))
        skipped.append((module, _same if width is None else partial(_zeros, width, is_written=clips)))
    return skipped


def _zeros(width: int, x: Tensor, *, is_written: bool) -> Tensor:
    shape = (*x.shape[:-1], width)
    # Expand only the leading dimensions, since deepseek views the last dimension as complex.
    return x.new_zeros(shape) if is_written else x.new_zeros(width).expand(shape)


def _same(x: Tensor) -> Tensor:
    return x


def find_cache(arguments: Mapping[str, object]) -> object:
    """Return the key/value cache among a model's arguments by either name, or None."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def is_filled(cache: Any, core: nn.Module) -> bool:
    """Return whether a key/value cache contains earlier positions of an attention; False for None."""
    return cache is not None and cache.get_seq_length(getattr(core, "layer_idx", 0)) > 0
