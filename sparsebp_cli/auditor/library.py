"""``sbp.audit``: around any training loop, of any library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, overload

from torch import nn

from sparsebp_cli.auditor.account import make_report
from sparsebp_cli.auditor.session import Session
from sparsebp_cli.errors import UsageError
from sparsebp_cli.finding import THRESHOLD, AuditReport

_under_way: list[Session] = []  # one at a time in a process: what is replaced belongs to all of it


class Audit:
    """Watches every forward, backward and optimizer step of this thread while it is entered.

    Training goes on as without it, but slower; sums may differ in their last bits, since some operators take other
    ways while they are watched.

    Args:
        model: Whose modules give the names; None: the first model that is called.
        steps: Optimizer steps after which it stops by itself, at least 1; None: until the block ends.
        threshold: Share of a step above which a finding is shown, in [0, 1).
        on_step: Called after each optimizer step with its number and ``steps``, 0 for None.
        on_end: Called when ``steps`` were seen.

    Raises:
        UsageError: A number is out of range.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        steps: int | None = None,
        threshold: float = THRESHOLD,
        on_step: Callable[[int, int], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        if steps is not None and steps < 1:
            raise UsageError(f"steps must be at least 1, got {steps}")
        if not 0.0 <= threshold < 1.0:
            raise UsageError(f"threshold must be in [0, 1), got {threshold}")
        self._session, self._threshold = Session(steps, on_step, on_end), threshold
        if model is not None:
            self._session.add_model(model)

    def start(self) -> Self:
        """Begin to watch.

        Returns:
            This audit.

        Raises:
            UsageError: Another audit is under way in this process.
        """
        if any(session.is_running for session in _under_way):
            raise UsageError("another audit is under way in this process: end it first")
        _under_way[:] = [self._session]
        self._session.start()
        return self

    def stop(self) -> None:
        """Watch no longer; everything is as it was. Calling it again does nothing."""
        self._session.stop()
        self._session.close()

    @property
    def has_seen_backward(self) -> bool:
        """Whether a backward pass has ended since the beginning."""
        return bool(self._session.ledger.passes)

    def report(self) -> AuditReport:
        """Return what was found.

        Returns:
            The report; it prints itself in a few lines.

        Raises:
            UsageError: No backward pass was seen, or the audit is still under way.
        """
        if self._session.is_running:
            raise UsageError("the audit is still under way: leave its block, or call stop(), before report()")
        if not self.has_seen_backward:
            raise UsageError(
                "no backward pass was seen: call loss.backward() between start and stop, in the same thread"
            )
        return make_report(self._session, self._threshold)

    def __enter__(self) -> Self:
        """Begin to watch."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        self.stop()


@overload
def audit(subject: nn.Module | None = None, *, steps: int | None = None, threshold: float = THRESHOLD) -> Audit: ...  # type: ignore[overload-overlap]


@overload
def audit(subject: Callable[[], Any], *, steps: int | None = None, threshold: float = THRESHOLD) -> AuditReport: ...


def audit(
    subject: nn.Module | Callable[[], Any] | None = None, *, steps: int | None = None, threshold: float = THRESHOLD
) -> Audit | AuditReport:
    """Watch a training.

    Args:
        subject: A model, or nothing: an :class:`Audit` to be entered. Anything else that can be called: is called,
            without arguments.
        steps: Optimizer steps after which watching ends by itself, at least 1; None: when the block or call ends.
        threshold: Share of a step above which a finding is shown, in [0, 1).

    Returns:
        The audit; of a function, its report.

    Raises:
        UsageError: A number is out of range, the subject is neither, or the function ran no backward pass.
    """
    if subject is None or isinstance(subject, nn.Module):
        return Audit(subject, steps=steps, threshold=threshold)
    if not callable(subject):
        raise UsageError(f"audit takes a model or a function without arguments, got {type(subject).__name__}")
    with Audit(steps=steps, threshold=threshold) as under_way:
        subject()
    return under_way.report()
