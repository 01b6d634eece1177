"""Trials of a study as parallel Jobs of a real Kubernetes, beside this machine."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.run import RunFolder, State, list_runs, read
from tests.target.conftest import until
from tests.target.test_kubernetes import claim, cluster, kubectl, options

from .conftest import count_attempts, count_finishes
from .test_places import BASE, REAL, STUDY, WORKER, place_of

__all__ = ["claim", "cluster", "options"]  # fixtures
pytestmark = pytest.mark.k8s


def test_trials_are_parallel_jobs_and_each_is_trained_once(
    tmp_path: Path, options: dict[str, Any], claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = {
        "here": {"kind": "local", **WORKER},
        "cluster": {"kind": "kubernetes", **WORKER, **options, "claim": claim},
    }
    (tmp_path / "targets.yaml").write_text(json.dumps(targets))
    monkeypatch.setenv("SPARSEBP_TARGETS", str(tmp_path / "targets.yaml"))
    paced = BASE.replace("fake: ok", "fake: paced").replace("max_steps: 12", "max_steps: 60")
    (tmp_path / "base.yaml").write_text(paced)
    text = STUDY.replace("report: 1-6", "report: 1-4").partition("where:")[0]
    (tmp_path / "study.yaml").write_text(text + "where: [{target: here}, {target: cluster, max_parallel: 3}]\n")
    done = subprocess.run(
        [*REAL, "study", "study.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    runs = list_runs()
    assert {run.state() for run in runs} == {State.FINISHED}
    assert set(count_attempts().values()) == set(count_finishes().values()) == {1}
    there = [run for run in runs if place_of(run, targets) == "cluster"]
    assert (len(runs), len(there)) == (8, 6)
    assert 1 < most_at_once(there) <= 3
    until(lambda: kubectl("get", "jobs,pods", "-o", "name") == "")


def most_at_once(runs: list[RunFolder]) -> int:
    """Return the largest number of runs that worked at one moment."""
    changes: list[tuple[float, int]] = []
    for run in runs:
        times = {str(record["kind"]): float(record["time"]) for record, _ in read(run.path)}
        changes += [(times["attempt"], 1), (times["end"], -1)]
    return max(itertools.accumulate(change for _, change in sorted(changes)))
