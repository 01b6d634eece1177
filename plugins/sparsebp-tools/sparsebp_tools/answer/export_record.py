"""The record of exported runs."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer


class ExportedRuns(Answer):
    """Runs for another scheduler."""

    format: str
    """``sbatch``, ``k8s``, ``sky`` or ``dstack``."""
    text: str
    """The script, manifest or task, including the plans."""
    runs: list[str]
    """Ids that the runs will have."""
