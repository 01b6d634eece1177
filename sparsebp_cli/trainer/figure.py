"""What the engine adds to a trainer's log, under the names of :mod:`sparsebp_cli.run.metric`."""

from __future__ import annotations

from sparsebp_cli.backward import Engine
from sparsebp_cli.backward.score.chosen import Chosen
from sparsebp_cli.run import metric


def take_values(engine: Engine) -> dict[str, float]:
    """Return what happened since this was last called; waits for the device.

    Args:
        engine: Attached.

    Returns:
        Metric values by name, of what there is.
    """
    return _values(engine.take_kept_share(), engine.take_chosen())


def all_values(engine: Engine) -> dict[str, float]:
    """Return what happened since the model was attached; waits for the device.

    Args:
        engine: Attached, or detached since.

    Returns:
        Metric values by name, of what there is.
    """
    report = engine.report()
    return _values(report.kept_share, report.chosen)


def _values(kept_share: float | None, chosen: Chosen | None) -> dict[str, float]:
    """Where tokens or examples are chosen, the kept share is that of the targets; else that of gradient entries."""
    share = kept_share if chosen is None or chosen.trained_share is None else chosen.trained_share
    return {} if share is None else {metric.KEPT_SHARE.name: share}
