"""One cast of an input for all linears that read it."""

from __future__ import annotations

import weakref
from typing import Any, final

from torch import Tensor


@final
class SharedCast:
    """The last input that was cast and kept: queries, keys and values read the same one, and need it once.

    It is dropped with the input itself, and when another one is cast.
    """

    def __init__(self) -> None:
        self._input: weakref.ref[Tensor] | None = None
        self._key: tuple[Any, ...] = ()
        self._found: tuple[Tensor, Tensor, Any] | None = None

    def find(self, x: Tensor, how: Any) -> tuple[Tensor, Tensor, Any] | None:
        """Return the cast of an input, where it was the last one.

        Args:
            x: The input.
            how: What decides the cast.

        Returns:
            Numbers, scale and the rest; None where it was not.
        """
        last = None if self._input is None else self._input()
        return self._found if last is x and self._key == (x._version, how) else None  # noqa: SLF001 - its only name

    def note(self, x: Tensor, how: Any, found: tuple[Tensor, Tensor, Any]) -> None:
        """Note the cast of an input.

        Args:
            x: The input.
            how: What decides the cast.
            found: Numbers, scale and the rest.
        """
        self._input, self._key, self._found = weakref.ref(x, self._drop), (x._version, how), found  # noqa: SLF001

    def _drop(self, ref: object) -> None:
        if ref is self._input:
            self._input = self._found = None
