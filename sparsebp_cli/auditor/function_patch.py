"""Temporary replacements of PyTorch's own functions and methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FunctionPatches:
    """Replaces attributes of modules and classes, and restores them."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
        """Replace the function ``name`` of a module or class by ``make(old)``, and return the old one."""
        old = getattr(owner, name)
        self._before.append((owner, name, old))
        setattr(owner, name, make(old))
        return old

    def restore(self) -> None:
        """Restore all functions, the latest first."""
        while self._before:
            owner, name, old = self._before.pop()
            setattr(owner, name, old)
