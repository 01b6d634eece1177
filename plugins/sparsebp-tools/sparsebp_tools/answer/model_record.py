"""Record of ``sparsebp model``."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer


class ModelFolder(Answer):
    """The model of a run, written for others."""

    folder: str
    """Where it is."""
    run: str
    """Id of the run."""
    step: int
    """Step of its weights."""
    bytes: int
    """Size of its files."""
    files: list[str]
    """Their names."""
    hub: str | None
    """Where on a hub it was sent to; null: nowhere."""
    notes: list[str]
    """What others should know of it, one line each."""
