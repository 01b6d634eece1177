"""Stand-ins for a key/value cache: by way of that argument an attention's keys and values can be taken or given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn


class Captured(Exception):  # noqa: N818 - no error: it carries a result out of a forward that need not go on
    """Ends an attention's forward once its keys and values are there."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class Capturing:
    """A cache that takes the keys and values and goes no further: raises :class:`Captured`."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> NoReturn:
        """Take what the attention adds."""
        raise Captured(keys, values)


class Giving:
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


def silence(
    core: nn.Module, names: Iterable[str], *, one_head: bool = True
) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Return what silences modules of an attention whose output is not wanted.

    Args:
        core: The attention.
        names: Of its children: linears give zeros without computing, norms what they get.
        one_head: Zeros of one head: less to carry about, for attentions that take any number of heads.

    Returns:
        What :func:`~sparsebp_cli.backward.branch.replaced` takes.
    """
    silent: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
    for name in names:
        module = getattr(core, name)
        width = getattr(module, "nf", getattr(module, "out_features", None))
        if width is not None and one_head:
            width = getattr(core, "head_dim", width)
        silent.append((module, _same if width is None else partial(_zeros, width)))
    return silent


def _zeros(width: int, x: Tensor) -> Tensor:
    return x.new_zeros(()).expand(*x.shape[:-1], width)


def _same(x: Tensor) -> Tensor:
    return x
