"""One study over this machine, two docker hosts behind ssh and a Slurm cluster, all real; the worker trains nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder, State, list_runs
from sparsebp_cli.target.launch import Launch
from tests.target.conftest import docker_engine, docker_ssh_options, slurm_cluster, slurm_options, ssh_hosts, until

from .conftest import count_attempts, count_finishes

__all__ = ["docker_engine", "docker_ssh_options", "slurm_cluster", "slurm_options", "ssh_hosts"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("engines")]  # one daemon, one test at a time

REAL = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()"]
WORKER = {"worker": "sparsebp_cli.testing.worker"}
BASE = """\
version: 1
name: base
model: {name: none}
dataset: {name: none}
training: {max_steps: 12}
tracking: {uri: "file:///nowhere", tags: {fake: ok}}
target: {kind: here}
"""
STUDY = """\
version: 1
study: spread
base: base.yaml
arms:
  dense: {}
  topk: {policy: [{name: topk, keep: 0.25}]}
seeds: {report: 1-6}
where: [{target: here, max_parallel: 2}, {target: gpu1}, {target: gpu2}, {target: cluster, max_parallel: 2}]
"""
SLOTS = {"here": 2, "gpu1": 1, "gpu2": 1, "cluster": 2}


@pytest.fixture
def places(
    tmp_path: Path,
    docker_ssh_options: dict[str, Any],
    slurm_options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, dict[str, Any]]:
    """Four places by their names, in the user's targets.yaml, and the study beside it."""
    targets = {
        "here": {"kind": "local", **WORKER},
        "gpu1": {"kind": "docker", **WORKER, **docker_ssh_options, "host": "ssh://hosta"},
        "gpu2": {"kind": "docker", **WORKER, **docker_ssh_options, "host": "ssh://hostb"},
        "cluster": {"kind": "slurm", **WORKER, **slurm_options},
    }
    (tmp_path / "targets.yaml").write_text(json.dumps(targets))
    monkeypatch.setenv("SPARSEBP_TARGETS", str(tmp_path / "targets.yaml"))
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "study.yaml").write_text(STUDY)
    return targets


def study(folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["study", "study.yaml"]
    return subprocess.run([*REAL, *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def place_of(run: RunFolder, places: dict[str, dict[str, Any]]) -> str:
    section = Plan.load(run.plan_file).recipe.target
    found = [
        name
        for name, options in places.items()
        if section.kind == options["kind"] and section.options.get("host") == options.get("host")
    ]
    assert len(found) == 1
    return found[0]


def handle_of(run: RunFolder) -> str:
    launch = Launch.load(run)
    assert launch is not None
    return launch.handle


def test_trials_are_dealt_over_hosts_and_a_cluster_and_each_is_trained_once(
    tmp_path: Path, places: dict[str, dict[str, Any]]
) -> None:
    done = study(tmp_path)
    assert done.returncode == 0, done.stderr
    runs = list_runs()
    assert len(runs) == 12
    assert {run.state() for run in runs} == {State.FINISHED}
    assert set(count_attempts().values()) == set(count_finishes().values()) == {1}
    assert Counter(place_of(run, places) for run in runs) == {name: 2 * slots for name, slots in SLOTS.items()}

    handles = [handle_of(run) for run in runs if place_of(run, places) == "cluster"]
    arrays = {handle.partition("_")[0] for handle in handles}
    assert len(arrays) == 1  # the scheduler sees one object
    assert sorted(handle.partition("_")[2] for handle in handles) == ["0", "1", "2", "3"]

    again = study(tmp_path)
    assert again.returncode == 0
    assert "12/12  done before" in again.stdout
    assert set(count_attempts().values()) == {1}


@pytest.fixture
def outage(tmp_path: Path, places: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file while which exists nothing reaches gpu2."""
    file, folder = tmp_path / "outage", tmp_path / "bin"
    folder.mkdir()
    real = shutil.which("ssh")
    script = f'#!/bin/sh\ncase "$*" in *hostb*) if [ -e {file} ]; then exit 255; fi ;; esac\nexec {real} "$@"\n'
    (folder / "ssh").write_text(script)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return file


def test_a_host_that_is_away_loses_its_trials_and_not_the_study(
    tmp_path: Path, places: dict[str, dict[str, Any]], outage: Path
) -> None:
    outage.touch()
    done = study(tmp_path)
    assert done.returncode == 100
    assert "hostb" in done.stderr
    states: dict[str, set[State]] = defaultdict(set)
    for run in list_runs():
        states[place_of(run, places)].add(run.state())
    assert [states[name] for name in ("here", "gpu1", "cluster")] == [{State.FINISHED}] * 3
    assert State.FINISHED not in states["gpu2"]

    outage.unlink()
    again = study(tmp_path)
    assert again.returncode == 0, again.stderr
    assert set(count_attempts().values()) == set(count_finishes().values()) == {1}
    assert len(list_runs()) == 12


@pytest.mark.long
def test_a_host_that_goes_away_meanwhile_is_waited_for(
    tmp_path: Path, places: dict[str, dict[str, Any]], outage: Path
) -> None:
    (tmp_path / "base.yaml").write_text(
        BASE.replace("fake: ok", "fake: paced").replace("max_steps: 12", "max_steps: 60")
    )
    client = subprocess.Popen([*REAL, "study", "study.yaml"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        until(lambda: any(place_of(run, places) == "gpu2" and started(run) for run in planned()))
        outage.touch()
        until(lambda: all(run.state() is State.FINISHED for run in planned() if place_of(run, places) != "gpu2"))
        assert client.poll() is None  # it waits: what does not answer has not failed
        outage.unlink()
        assert client.wait(120) == 0
    finally:
        client.kill()
    assert set(count_attempts().values()) == set(count_finishes().values()) == {1}
    assert len(list_runs()) == 12


def planned() -> list[RunFolder]:
    return [run for run in list_runs() if run.plan_file.is_file()]


def started(run: RunFolder) -> bool:
    return count_attempts()[run.run_id] > 0
