"""Steps of optimizers: what they use, with and without a closure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sparsebp_cli.auditor.session import Session


class Steps:
    """Hooks of every optimizer of this process.

    Args:
        session: That is told.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._has_closure = session, False

    def before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note what a step that begins will use; of one with a closure, when that returns.

        Args:
            optimizer: Whose.
            args: Of its step, the optimizer first.
            kwargs: Of its step.

        Returns:
            Both with the closure watched; None without one.
        """
        session = self._session
        if not session.is_running:
            return None
        session.watch.is_updating = True
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first is the optimizer
        self._has_closure = callable(closure)
        if not callable(closure):
            session.parameters.start_step(optimizer, session.passes)
            return None
        watched = self._watch_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, kwargs | {"closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _watch_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """A closure trains inside the optimizer's step, which uses its gradients when it returns."""
        session = self._session

        @functools.wraps(closure)
        def watched(*args: Any, **kwargs: Any) -> Any:
            session.watch.is_updating = False
            try:
                return closure(*args, **kwargs)
            finally:
                session.watch.is_updating = True
                if session.is_running:
                    session.parameters.start_step(optimizer, session.passes, is_again=not self._has_closure)
                    self._has_closure = False

        return watched

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - torch's
        """Note that a step has ended.

        Args:
            optimizer: Whose.
            args: Of its step.
            kwargs: Of its step.
        """
        session = self._session
        if not session.is_running:
            return
        session.watch.is_updating = False
        if self._has_closure:  # it was never called
            session.parameters.start_step(optimizer, session.passes)
        if session.parameters.is_ahead:  # of several optimizers, the first that makes this step
            session.end_step()
