"""``python -m sparsebp_cli.worker.preview FOLDER/plan.json``: what choosing may gain, and nothing is trained.

The last line on standard output is JSON: ``{"lines": [...], "values": {metric: number}}``, or ``{"error": text, "code":
exit code}``. What libraries print goes to standard error.
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
from sparsebp_cli.worker.stop import StopRequest

# As for training: see sparsebp_cli/worker/__main__.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(plan_file: Path) -> int:
    """Measure a plan's first micro-batch, and train nothing; return the exit code."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)  # what libraries print
        try:
            from sparsebp_cli.worker.training import Training
            from sparsebp_cli.worker.worth import worth_values

            run = RunFolder(plan_file.absolute().parent)
            with JournalWriter(run.path, durable=False) as journal:
                training = Training.build(Plan.load(plan_file), run, journal, StopRequest())
                worth = training.find_worth()
            told: dict[str, object] = {"lines": worth.lines(), "values": worth_values(worth)}
            code = 0
        except Exception as error:
            from sparsebp_cli.worker.failure import explain

            if not isinstance(error, SparseBPError):
                traceback.print_exc()
            text, code = explain(error)
            told = {"error": text, "code": code}
        print(json.dumps(told), file=channel, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
