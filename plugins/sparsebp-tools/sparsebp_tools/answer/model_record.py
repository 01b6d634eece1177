"""Record of ``sparsebp model``."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer


class ModelFolder(Answer):
    """A run's model, written as a folder for other programs."""

    folder: str
    """Path of the folder."""
    run: str
    """Id of the run."""
    step: int
    """Optimizer step of its weights."""
    bytes: int
    """Size of its files."""
    files: list[str]
    """Their names."""
    hub: str | None
    """Address on the hub; null: not uploaded."""
    notes: list[str]
    """Remarks for other users of the model, one line each."""
