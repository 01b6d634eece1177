"""Run ``python -m sparsebp_lab.worth``: read a request from standard input, write lines of JSON to standard output, as
in :mod:`sparsebp_cli.worker.answer`. The request is ``{"plan": FILE, "all": BOOLEAN}``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from sparsebp_cli.worker import wait_briefly

wait_briefly()


def measure_plan(request: str, report: Callable[[str, int, int], None]) -> dict[str, object]:
    """Measure the policies of a plan."""
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.run import JournalWriter, RunFolder
    from sparsebp_cli.worker.ending import StopRequest
    from sparsebp_cli.worker.training import Training
    from sparsebp_lab.worth.measure import measure

    wanted = json.loads(request)
    plan_file = Path(wanted["plan"])
    run = RunFolder(plan_file.absolute().parent)
    report("loading model and data", 0, 0)
    with JournalWriter(run.path, durable=False) as journal:
        training = Training.build(Plan.load(plan_file), run, journal, StopRequest())
        return measure(training, all_policies=wanted["all"], report=report)


if __name__ == "__main__":
    from sparsebp_cli.worker.answer import converse

    sys.exit(converse(measure_plan))
