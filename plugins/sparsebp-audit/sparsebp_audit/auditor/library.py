"""Audit the training loop of any library: ``sbp.audit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, overload

from torch import nn

from sparsebp_audit.auditor.account import make_report
from sparsebp_audit.auditor.referee import Referee
from sparsebp_audit.auditor.session import Session
from sparsebp_audit.report import THRESHOLD, AuditReport
from sparsebp_cli.errors import UsageError

_running: list[Session] = []  # at most one, because a session replaces functions of the whole process


class Audit:
    """Watch every forward, backward and optimizer step of this thread while its block runs.

    The training gives the same results, but runs slower. Sums may differ in their last bits, because some operators use
    other implementations under a dispatch mode.

    Args:
        model: Its modules give the names; None: the first model that is called.
        steps: Optimizer steps after which the audit stops, at least 1; None: at the end of the block.
        threshold: Fraction of a step above which a finding is shown, in [0, 1).
        examples: Whether to check as well, in the first optimizer step, if examples influence each other's gradients.
        on_step: Called after each optimizer step with its number and ``steps``, 0 for None.
        on_end: Called after the last of ``steps``.

    Raises:
        UsageError: A number is out of range.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        steps: int | None = None,
        threshold: float = THRESHOLD,
        examples: bool = False,
        on_step: Callable[[int, int], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        if steps is not None and steps < 1:
            raise UsageError(f"steps must be at least 1, got {steps}")
        if not 0.0 <= threshold < 1.0:
            raise UsageError(f"threshold must be in [0, 1), got {threshold}")
        self._session, self._threshold = Session(steps, on_step, on_end, Referee() if examples else None), threshold
        if model is not None:
            self._session.add_model(model)

    def start(self) -> Self:
        """Start watching.

        Returns:
            This audit.

        Raises:
            UsageError: Another audit is running in this process.
        """
        if any(session.is_running for session in _running):
            raise UsageError("another audit is running in this process: end it first")
        _running[:] = [self._session]
        self._session.start()
        return self

    def stop(self) -> None:
        """Stop watching and restore everything. Further calls do nothing."""
        self._session.stop()
        self._session.close()

    @property
    def session(self) -> Session:
        """The session that watches."""
        return self._session

    @property
    def has_seen_backward(self) -> bool:
        """Whether a backward pass has ended since the start."""
        return bool(self._session.ledger.passes)

    def report(self) -> AuditReport:
        """Return the report.

        Returns:
            The report; printing it shows a few lines.

        Raises:
            UsageError: No backward pass was seen, or the audit is still running.
        """
        if self._session.is_running:
            raise UsageError("the audit is still running: end its with block, or call stop(), before report()")
        if not self.has_seen_backward:
            raise UsageError(
                "no backward pass was seen: call loss.backward() between start and stop, in the same thread"
            )
        return make_report(self._session, self._threshold)

    def __enter__(self) -> Self:
        """Start watching."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self.stop()


@overload
def audit(  # type: ignore[overload-overlap]
    subject: nn.Module | None = None, *, steps: int | None = None, threshold: float = THRESHOLD, examples: bool = False
) -> Audit: ...


@overload
def audit(
    subject: Callable[[], object], *, steps: int | None = None, threshold: float = THRESHOLD, examples: bool = False
) -> AuditReport: ...


def audit(
    subject: nn.Module | Callable[[], object] | None = None,
    *,
    steps: int | None = None,
    threshold: float = THRESHOLD,
    examples: bool = False,
) -> Audit | AuditReport:
    """Audit a training.

    Args:
        subject: A model or None: return an :class:`Audit` to use as a context manager. Any other callable: call it
            without arguments and audit the call.
        steps: Optimizer steps after which the audit stops, at least 1; None: when the block or call ends.
        threshold: Fraction of a step above which a finding is shown, in [0, 1).
        examples: Whether to check as well if examples influence each other: the report's ``examples``. Each batch of
            the first optimizer step then runs several times more, without dropout.

    Returns:
        The audit; for a function, its report.

    Raises:
        UsageError: A number is out of range, the subject is neither a model nor callable, or the function ran no
            backward pass.
    """
    if subject is None or isinstance(subject, nn.Module):
        return Audit(subject, steps=steps, threshold=threshold, examples=examples)
    if not callable(subject):
        raise UsageError(f"audit takes a model or a function without arguments, got {type(subject).__name__}")
    with Audit(steps=steps, threshold=threshold, examples=examples) as running:
        subject()
    return running.report()
