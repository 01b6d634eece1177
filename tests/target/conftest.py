"""Runs for the worker that trains nothing, and ways to look at them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, create_run, list_runs
from sparsebp_cli.target import TargetOptions
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.target.local import LocalTarget

UNUSABLE = "file:///nowhere"  # refused before mlflow is imported, which takes seconds


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> LocalTarget:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return LocalTarget(TargetOptions(worker="fake_worker"))


def make_run(fake: str = "ok", max_steps: int = 5, uri: str | None = UNUSABLE) -> RunFolder:
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "name": f"fake-{fake}",
            "model": {"name": "none"},
            "dataset": {"name": "none"},
            "training": {"max_steps": max_steps, "optim_args": {"fake": fake}},
            "tracking": {"uri": uri},
        }
    )
    plan = Plan(recipe=recipe)
    run = create_run(plan.run_id)
    plan.save(run.path)
    return run


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def wait_for_step(run: RunFolder, step: int = 2) -> None:
    until(lambda: step in History.load(run.path).series("train/loss"))


def last_end(run: RunFolder) -> dict[str, object]:
    return History.load(run.path).ends[-1]


def launch_of(run: RunFolder) -> Launch:
    launch = Launch.load(run)
    assert launch is not None
    return launch


def worker_of(run: RunFolder) -> psutil.Process:
    until(lambda: launch_of(run).worker(run) is not None)
    worker = launch_of(run).worker(run)
    assert worker is not None
    return worker


def watcher_of(run: RunFolder) -> psutil.Process:
    watcher = launch_of(run).watcher(run)
    assert watcher is not None
    return watcher


@pytest.fixture(autouse=True)
def _leave_nothing_running(home_folder: Path) -> Iterator[None]:
    yield
    for run in list_runs():
        launch = Launch.load(run)
        for process in [launch.watcher(run), launch.worker(run)] if launch else []:
            if process is not None:
                process.kill()
