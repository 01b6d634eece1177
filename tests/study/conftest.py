"""A study of two arms and two learning rates whose trials take a moment, and its command line as real processes."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from sparsebp_cli.run import State, list_runs, read
from tests.command import Command
from tests.target.conftest import docker_engine, slurm_cluster, ssh_hosts

__all__ = ["docker_engine", "slurm_cluster", "ssh_hosts"]

COMMAND = Command("fake_study", Path(__file__).parent)
BASE = """\
version: 1
name: base
model: {{name: none}}
dataset: {{name: none{test}}}
training: {{max_steps: 20, warmup_steps: 4}}
tracking: {{uri: "sqlite:////dev/null/mlflow.db", tags: {{{tags}}}}}
"""
STUDY = """\
version: 1
study: tiny
base: base.yaml
arms:
  dense: {}
  topk: {policy: [{name: topk, keep: 0.25}]}
vary:
  training.learning_rate: [5e-4, 1e-3]
seeds: {tune: [0], report: 1-2}
"""

Write = Callable[..., Path]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def write_study(tmp_path: Path) -> Write:
    """Write a study and its base; keyword arguments are tags for the worker, ``text`` replaces or extends the study."""

    def write(text: str = STUDY, *, more: str = "", **tags: str) -> Path:
        given = ", ".join(f'{key}: "{value}"' for key, value in tags.items())
        (tmp_path / "base.yaml").write_text(BASE.format(test=", test_fraction: 0.5", tags=given))
        whole = text + more
        fixed = "" if "search:" in whole else "search: {extend: 0}\n"  # a grid is as it is written
        (tmp_path / "study.yaml").write_text(whole + fixed)
        return tmp_path / "study.yaml"

    return write


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run the command line to its end."""
    return partial(COMMAND.run, cwd=tmp_path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command line and go on."""
    with COMMAND.starting(tmp_path) as begin:
        yield begin


@pytest.fixture(autouse=True)
def _leave_nothing_running(no_process_left: None) -> None:
    """Every test may start workers."""


def count_finishes() -> Counter[str]:
    """Return, for each run of the store, how often its journal says that it finished."""
    return Counter(
        {
            run.run_id: sum(r["kind"] == "end" and r["status"] == State.FINISHED for r, _ in read(run.path))
            for run in list_runs()
        }
    )


def count_attempts() -> Counter[str]:
    """Return, for each run of the store, how many workers began it."""
    return Counter({run.run_id: sum(r["kind"] == "attempt" for r, _ in read(run.path)) for run in list_runs()})
