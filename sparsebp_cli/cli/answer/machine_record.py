"""Records of this machine and of others."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer, Checked


class CheckReport(Answer):
    """What was checked."""

    is_usable: bool
    """Whether nothing failed; then the exit code is 0, else 1."""
    checks: dict[str, list[Checked]]
    """By what was checked: ``this machine``, or the name of a target."""


class TargetLine(Answer):
    """A place where runs can be."""

    name: str
    """As recipes write it."""
    kind: str
    """Its kind."""
    source: str
    """Package that has the kind, or ``targets.yaml``."""
    broken: bool
    """Whether its plugin cannot be used."""
    text: str
    """What it is, its options, or why it is broken."""


class TargetList(Answer):
    """Places where runs can be."""

    targets: list[TargetLine]
    """Kinds, then the names of ``targets.yaml``."""
    file: str
    """Where ``targets.yaml`` is read from."""
