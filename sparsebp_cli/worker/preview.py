"""``python -m sparsebp_cli.worker.preview FOLDER/plan.json``: measure what selection may gain, without training.

The last line of standard output is JSON: ``{"lines": [...], "values": {metric: number}}``, or ``{"error": text, "code":
exit code}``. Output of libraries goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.worker import wait_briefly
from sparsebp_cli.worker.ending import StopRequest

wait_briefly()


def main(plan_file: Path) -> int:
    """Measure the first micro-batch of a plan and return the exit code."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)  # libraries may print to standard output, which carries the result
        try:
            from sparsebp_cli.worker.selection_gain import describe_gains
            from sparsebp_cli.worker.training import Training

            run = RunFolder(plan_file.absolute().parent)
            with JournalWriter(run.path, durable=False) as journal:
                training = Training.build(Plan.load(plan_file), run, journal, StopRequest())
                gains = list(training.measure_gains())
            result: dict[str, object] = describe_gains(gains)
            code = 0
        except Exception as error:
            from sparsebp_cli.worker.ending import describe_failure

            if not isinstance(error, SparseBPError):
                traceback.print_exc()
            text, code = describe_failure(error)
            result = {"error": text, "code": code}
        print(json.dumps(result), file=channel, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
