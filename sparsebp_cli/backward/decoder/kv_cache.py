"""Stand-ins for a key/value cache: by way of that argument an attention's keys and values can be taken or given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn


class RecordedKV(Exception):  # noqa: N818 - no error: it carries a result out of a forward that need not go on
    """Ends an attention's forward once its keys and values are there."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class RecordKV:
    """A cache that takes the keys and values and goes no further: raises :class:`RecordedKV`."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> NoReturn:
        """Take what the attention adds."""
        raise RecordedKV(keys, values)


class FixedKV:
    """A cache that gives keys and values, whatever is added to it.

    Args:
        keys: (B, H, T, D).
        values: The same.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return what is given."""
        return self.keys, self.values


class ConcatKV:
    """A cache that puts keys and values of other positions before what is added to it.

    Args:
        before: Gives them, shown what is added; each (B, H, T, D).
    """

    def __init__(self, before: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._before: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = partial(_uncompiled(), before)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return both together."""
        before_keys, before_values = self._before(keys, values)
        return torch.cat([before_keys, keys], 2), torch.cat([before_values, values], 2)


class SharedKV:
    """A cache that keeps what is added to it as ``own``, and puts keys and values of other positions behind it.

    Args:
        behind: These, each (B, H, T, D); None: none.
    """

    def __init__(self, behind: tuple[Tensor, Tensor] | None) -> None:
        self._behind = behind
        self.own: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return both together."""
        self.own = keys, values
        if self._behind is None:
            return keys, values
        return torch.cat([keys, self._behind[0]], 2), torch.cat([values, self._behind[1]], 2)


def _apply(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@cache
def _uncompiled() -> Any:
    """Return what calls a function outside of a compiled attention, which asks its cache: a layer may run there."""
    return cast("Any", torch.compiler).disable(_apply)


def silence(
    core: nn.Module, names: Iterable[str], *, one_head: bool = True
) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Return what silences modules of an attention whose output is not wanted.

    Args:
        core: The attention.
        names: Of its children: linears give zeros without computing, norms what they get.
        one_head: Zeros of one head: less to carry about, for attentions that take any number of heads.

    Returns:
        What :func:`~sparsebp_cli.backward.patch.forward.replace_forwards` takes.
    """
    silent: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
    clips = getattr(getattr(core, "config", None), "clip_qkv", None) is not None  # olmo does so in place
    for name in names:
        module = getattr(core, name)
        width = getattr(module, "nf", getattr(module, "out_features", None))
        if width is not None and one_head:
            width = getattr(core, "head_dim", width)
        silent.append((module, _same if width is None else partial(_zeros, width, is_written=clips)))
    return silent


def _zeros(width: int, x: Tensor, *, is_written: bool) -> Tensor:
    shape = (*x.shape[:-1], width)
    return x.new_zeros(shape) if is_written else x.new_zeros(()).expand(shape)


def _same(x: Tensor) -> Tensor:
    return x


def is_filled(cache: Any, core: nn.Module) -> bool:
    """Whether a key/value cache, or None, holds anything for an attention."""
    return cache is not None and cache.get_seq_length(getattr(core, "layer_idx", 0)) > 0
