"""Records about this machine and others."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer, Checked


class CheckReport(Answer):
    """Results of checks."""

    is_usable: bool
    """true: no check failed, and the exit code is 0. false: the exit code is 1."""
    checks: dict[str, list[Checked]]
    """Checks by subject: ``this machine``, or the name of a target."""


class TargetLine(Answer):
    """A place where runs can train."""

    name: str
    """Name in recipes."""
    kind: str
    """Kind of the target."""
    source: str
    """Package that provides the kind, or ``targets.yaml``."""
    broken: bool
    """Whether its plug-in cannot be used."""
    text: str
    """Its description, its options, or why it is broken."""


class TargetList(Answer):
    """Places where runs can train."""

    targets: list[TargetLine]
    """Kinds, followed by the names in ``targets.yaml``."""
    file: str
    """Path of ``targets.yaml``."""
