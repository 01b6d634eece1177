"""``python -m sparsebp_cli.worker.preview FOLDER/plan.json``: measure what a step costs beside a dense step, without
training.

The last line of standard output is JSON: ``{"lines": [...], "values": {metric: number}}``, or ``{"error": text, "code":
exit code}``. Output of libraries goes to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.worker import wait_briefly
from sparsebp_cli.worker.answer import answer
from sparsebp_cli.worker.ending import StopRequest

wait_briefly()


def measure_first_batch(plan_file: Path) -> Mapping[str, object]:
    """Measure the first micro-batch of a plan."""
    from sparsebp_cli.worker.training import Training

    run = RunFolder(plan_file.absolute().parent)
    with JournalWriter(run.path, durable=False) as journal:
        training = Training.build(Plan.load(plan_file), run, journal, StopRequest())
        cost = training.measure_cost()
        return {"lines": list(filter(None, [cost.describe()])), "values": cost.metrics()}


if __name__ == "__main__":
    sys.exit(answer(lambda: measure_first_batch(Path(sys.argv[1]))))
