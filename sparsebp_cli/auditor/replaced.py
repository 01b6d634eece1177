"""Functions of PyTorch that are others for as long as somebody watches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sparsebp_cli.auditor.saved import SavedTensors


class Replaced:
    """Replaces functions, and puts them back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
        """Replace a function.

        Args:
            owner: Module or class that has it.
            name: Its name there.
            make: Returns the new one, given the old.

        Returns:
            The old one.
        """
        old = getattr(owner, name)
        self._before.append((owner, name, old))
        setattr(owner, name, make(old))
        return old

    def restore(self) -> None:
        """Put everything back."""
        while self._before:
            owner, name, old = self._before.pop()
            setattr(owner, name, old)


def step_aside(saved: SavedTensors) -> Callable[[Any], Any]:
    """Return what makes ``disable_saved_tensors_hooks`` take ours out first.

    ``torch.func`` refuses to work while there are any, and a training must not fail of being watched.

    Args:
        saved: Ours.

    Returns:
        For :meth:`Replaced.replace`.
    """

    def make(disable: Callable[[str], AbstractContextManager[None]]) -> Callable[[str], AbstractContextManager[None]]:
        @functools.wraps(disable)
        @contextmanager
        def aside(error_message: str) -> Iterator[None]:
            was_active = saved.is_active
            saved.stop()
            try:
                with disable(error_message):
                    yield
            finally:
                if was_active:
                    saved.start()

        return aside

    return make
