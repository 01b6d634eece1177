"""Transformers outputs whose logits are computed on their first read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

from torch import Tensor

from sparsebp_cli.errors import UnsupportedError


class Deferred:
    """Logits of an output that are computed on their first read. A loss does not read them, and they may be the largest
    tensor of a step."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._made: Tensor | None = None

    def read(self) -> Tensor:
        """Return the logits, which refuse a gradient."""
        if self._made is None:
            self._made = self._compute().requires_grad_()
            self._made.register_hook(_refuse_gradient)
        return self._made

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"logits of this output are not computed yet, so they have no {name!r}: read output.logits first"
        )


def defer_logits(output: Any, compute: Callable[[], Tensor]) -> Any:
    """Return a transformers output whose logits are computed on their first read, by attribute, key or index.

    ``items`` and ``values`` do not compute them: accelerate copies outputs through these at every mixed-precision step,
    and DistributedDataParallel passes them through its own backward.
    """
    kind: Any = next(base for base in type(output).__mro__ if "__dataclass_fields__" in vars(base))
    values = {field.name: getattr(output, field.name) for field in fields(kind)}
    return deferring(kind)(**values | {"logits": Deferred(compute)})


@cache  # one class for each kind, since transformers registers every output class with torch permanently
def deferring(kind: type[Any]) -> type[Any]:
    """Return a subclass of an output class whose deferred values are computed on their first read."""

    def resolve(value: Any) -> Any:
        return value.read() if isinstance(value, Deferred) else value

    class Deferring(kind):  # type: ignore[misc] # a class made at run time
        def __getattribute__(self, name: str) -> Any:
            return resolve(super().__getattribute__(name))

        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, int):
                return self[list(self.keys())[key]]
            found = super().__getitem__(key)
            return tuple(map(resolve, found)) if isinstance(found, tuple) else resolve(found)

        def get(self, key: str, default: Any = None) -> Any:
            return resolve(super().get(key, default))

    Deferring.__name__, Deferring.__qualname__ = kind.__name__, kind.__qualname__
    return Deferring


def _refuse_gradient(_: Tensor) -> Tensor:
    raise UnsupportedError(
        "your loss, or that of an adapter such as peft's CPT, uses logits of a forward that got labels, but lossless "
        "gives these logits no gradient: leave the labels out of the forward, or train without lossless"
    )
