"""Counts what lossless makes of random batches, beside the plain step and beside each sequence alone.

    python benchmarks/exactness.py --dtype float32    # a quarter of an hour of one idle core
    python benchmarks/exactness.py --dtype bfloat16
    python benchmarks/exactness.py --only Llama --batches 30 --out FILE

The batches are those of tests/backward/packing/generated.py: every fact of a batch that packing reads is drawn, and
two facts or so change from a batch to the next, which the comparison of the first (``verify: first``) may not see. Each
dtype has its own part of benchmarks/results/exactness.json. Nothing is measured by the clock. Memory that nothing has
written holds no numbers, in the plain step and in ours, so that a result which depends on it is found each time.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from tests.backward.packing.generated import Judge, every_family

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "exactness.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BATCHES = {"float32": 14_000, "bfloat16": 6_000}
LENGTH = 3  # batches of one run
VERDICTS = ("packed", "plain", "refused", "noticed", "wrong", "alone", "unjudged")


def main() -> None:
    """Judge all families in one dtype, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--batches", type=int, help="of all families together")
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True, warn_only=True)  # without it, the next line has no effect
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    judges = {n: Judge(model, DTYPES[asked.dtype]) for n, model in every_family() if asked.only in n}
    print(f"{len(judges)} families", flush=True)
    told, number, found = 0, 0, dict[str, Any]()
    while not found or found["batches"] < (asked.batches or BATCHES[asked.dtype]):
        for judge in judges.values():
            judge.judge(number, LENGTH)
            number += 1
        found = summarize(judges)
        write(asked.out, asked.dtype, found)
        print(found["batches"], found["total"], *found["wrong"][told:], sep="\n  ", flush=True)
        told = len(found["wrong"])


def summarize(judges: Mapping[str, Judge]) -> dict[str, Any]:
    """Return the counts of all families."""
    families = {n: {verdict: getattr(j.count, verdict) for verdict in VERDICTS} for n, j in judges.items()}
    reasons = sum((judge.count.reasons for judge in judges.values()), Counter[str]())
    return {
        "families": len(families),
        "batches": sum(judge.count.judged for judge in judges.values()),
        "total": {verdict: sum(one[verdict] for one in families.values()) for verdict in VERDICTS},
        "reasons": dict(reasons.most_common()),
        "wrong": [case for judge in judges.values() for case in judge.count.cases],
        "noticed": [case for judge in judges.values() for case in judge.count.seen],
        "by_family": families,
    }


def write(path: Path, dtype: str, found: dict[str, Any]) -> None:
    """Write the part of one dtype, and leave that of the other."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    record["about"] = {name: version(name) for name in ("torch", "transformers")} | {"batches_of_a_run": LENGTH}
    record[dtype] = found
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
