"""Judges which models and collators mix the examples of a batch, and writes the table of docs/results/mixing.md.

    python benchmarks/mixing.py            # about ten minutes on two cores; writes benchmarks/results/mixing.json
    python benchmarks/mixing.py --only llama --out FILE

Every decoder of the installed transformers that can be made tiny is judged on one row of three examples, as
DataCollatorWithFlattening and Trainer give it, and beside an enumeration that knows nothing of the judge. Then some
models are trained for one step by the trainers and collators of plugins/sparsebp-audit/tests/ways.py, under
``sparsebp_audit.audit(examples=True)``. Nothing is measured by the clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins" / "sparsebp-audit" / "tests")]

from ways import MODELS, WAYS  # noqa: E402

from sparsebp_audit.isolation import judge_batch  # noqa: E402
from sparsebp_audit.report import IsolationReport  # noqa: E402
from tests.backward.isolation.enumeration import LENGTHS, enumerate_row, every_enlarged_model, packed_row  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "mixing.json"


def main() -> None:
    """Judge all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one model of the second part, and no decoders")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    record = {
        "about": {name: version(name) for name in ("torch", "transformers", "trl")} | {"lengths": LENGTHS},
        "decoders": [] if asked.only else judge_decoders(),
        "ways": judge_ways([asked.only] if asked.only else list(MODELS)),
    }
    asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written: {asked.out}")


def judge_decoders() -> list[dict[str, Any]]:
    """Judge a packed row of every decoder, and enumerate it."""
    found = []
    for name, model in every_enlarged_model():
        judged = judge_batch(model, packed_row())
        try:
            seen = enumerate_row(model, packed_row())
            enumerated = "mixed" if seen.is_mixed else "alone"
        except Exception as error:  # a model that refuses a packed row
            enumerated = f"raises {type(error).__name__}"
        found.append(
            {
                "model": type(model).__name__,
                "config": name.partition(" ")[0],
                "verdict": judged.verdict,
                "enumerated": enumerated,
                "reason": judged.reason,
                "difference": judged.difference,
                "module": judged.module,
                "module_class": judged.module_class,
                "reads_across": bool(judged.pairs),
                "cause": judged.cause,
                "mend": judged.mend,
                "is_mend_tried": judged.is_mend_tried,
                "cost_steps": judged.cost_steps,
            }
        )
        print(f"{name}: {judged.verdict}, enumerated {enumerated}", flush=True)
    return found


def judge_ways(kinds: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Train each model in each way, and return what was found by model and way."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in kinds:
        found[kind] = {}
        for name, way in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found[kind][name] = summarize(way(kind, Path(folder)))
                except Exception as error:  # a trainer that refuses the model
                    line = (str(error).strip().splitlines() or [""])[0]
                    found[kind][name] = {"verdict": "refused", "reason": f"{type(error).__name__}: {line}"[:200]}
            print(f"{kind}, {name}: {found[kind][name]['verdict']}", flush=True)
    return found


def summarize(report: IsolationReport) -> dict[str, Any]:
    """Return the verdict of a step in a word, and its sentences."""
    verdicts = {batch.verdict for batch in report.batches}
    if "mixed" in verdicts:
        verdict = "mixed"
    elif report.is_mixed:
        verdict = "loss"
    elif verdicts == {"alone"}:
        verdict = "alone"
    else:
        verdict = "purpose" if "purpose" in verdicts else "unjudged"
    return {"verdict": verdict, "lines": report.lines()}


if __name__ == "__main__":
    main()
