"""Transformers outputs with only the loss computed. Other values are computed when something reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any

from sparsebp_cli.backward.patch.deferred import Deferred, deferring


class Later(Deferred):
    """A value of an output that is computed on its first use. Code that got it through ``items`` or ``values`` can use
    it like the value."""

    def __init__(self, find: Callable[[], Any]) -> None:
        super().__init__(find)

    def read(self) -> Any:
        """Return the value, which has no graph."""
        return self._compute()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look these up before the object has attributes
            raise AttributeError(name)
        return getattr(self.read(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.read()[key]

    def __len__(self) -> int:
        return len(self.read())

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        def resolve(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(resolve, value))
            return value.read() if isinstance(value, Later) else value

        return function(*resolve(args), **{name: resolve(value) for name, value in (kwargs or {}).items()})


def defer_values(output: Any, names: Iterable[str], compute: Callable[[], Any]) -> Any:
    """Return a transformers output with the loss of ``output``. Its values in ``names`` come from the output of
    ``compute``, which is called once, when something first reads one of them."""
    kind: Any = next(base for base in type(output).__mro__ if "__dataclass_fields__" in vars(base))
    made: list[Any] = []

    def find(name: str) -> Any:
        if not made:
            made.append(compute())
        return getattr(made[0], name)

    known = {field.name for field in fields(kind)}
    later = {name: Later(partial(find, name)) for name in names if name in known}
    return deferring(kind)(loss=output.loss, **later)
