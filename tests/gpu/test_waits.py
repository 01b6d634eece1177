"""No policy lets the host wait for a GPU but where that is known: counted on a fake one, with the lines that wait."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.waits import CASES, WORKER

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.xdist_group("fake gpu"),
    pytest.mark.promise("R35"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the fake device"),
]
# A plan of rows is made on the host.
PLAN = {"copy to cpu at backward/kind/token/row_plan.py": 1}
# Scores are computed for targets alone, which are counted before the forward for the scores begins.
SCORING = {
    "nonzero at backward/kind/score/scorer.py": 1,
}
KNOWN: dict[str, dict[str, int]] = {
    "tokens detach": PLAN,
    "tokens stop": PLAN,
    # Where all rows carry gradient, whether their mask is causal is asked once for all layers.
    "tokens exact": PLAN | {"_local_scalar_dense at backward/kind/token/rows.py": 1},
    "tokens by loss": PLAN | SCORING,
    "selective-backprop": SCORING | {"copy to cpu at policies/selective_backprop.py": 1},
    # Labels are read on the host, then ids, mask and position numbers by one copy. From there on the host arranges rows
    # and makes masks, and copies both to the device. Shared prefixes are left out: the fake holds no ids.
    "lossless": {
        "copy to cpu at backward/kind/packing/batch.py": 2,
        "copy to cuda at backward/kind/packing/groups.py": 1,
        "copy to cuda at backward/kind/packing/batch.py": 1,
    },
    "lossless in bfloat16": {
        "copy to cpu at backward/kind/packing/batch.py": 2,
        "copy to cuda at backward/kind/packing/groups.py": 1,
        "copy to cuda at backward/kind/packing/batch.py": 1,
    },
    # Loss and norm are read before the update, and the events of the step after it.
    WORKER: {
        "copy to cpu at worker/training.py": 1,
        "torch.cuda.Event.synchronize at worker/stopwatch.py": 1,
    },
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The waits of every case, found by a process of its own: the fake device is there before torch."""
    command = [sys.executable, "-m", "tests.gpu.waits"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout[done.stdout.index("{") :]))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, WORKER])
def test_a_step_waits_for_the_device_only_where_that_is_known(found: dict[str, Any], case: str) -> None:
    waits = found[case]
    assert isinstance(waits, dict), waits
    by_file: Counter[str] = Counter()
    for place, number in waits.items():
        by_file[place.rpartition(":")[0]] += number
    assert by_file == KNOWN.get(case, {})
