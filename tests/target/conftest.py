"""Runs for the worker that trains nothing, and ways to look at them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, create_run
from sparsebp_cli.target import TargetOptions
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.target.local import LocalTarget

from . import service

IN_CONTAINER: dict[str, object] = {"python": sys.executable, "mounts": service.MOUNTS, "network": "host"}
UNUSABLE = "sqlite:////dev/null/mlflow.db"  # told before mlflow is imported, which takes seconds


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
            "training": {"max_steps": max_steps},
            "tracking": {"uri": uri, "tags": {"fake": fake}},
        }
    )
    plan = Plan(recipe=recipe)
    run = create_run(plan.run_id)
    plan.save(run.path)
    return run


def until(condition: Callable[[], object], seconds: float = 600.0) -> None:
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


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[str]:
    """A real dockerd; its address."""
    service.need("docker", "dockerd", "busybox")
    with service.running("docker"):
        yield service.DOCKER


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[Path]:
    """A real sshd that answers as hosta and hostb; a folder with the ssh that knows its keys."""
    service.need("sshd", "ssh")
    with service.running("ssh"):
        yield service.STATE / "ssh"


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Path]:
    """A real Slurm with two nodes; its configuration."""
    service.need("slurmctld", "slurmd", "munged", "sbatch")
    with service.running("slurm"):
        yield service.STATE / "slurm" / "slurm.conf"


@pytest.fixture
def docker_options(docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Options of the target docker for this machine's engine."""
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    return IN_CONTAINER | {"image": service.BASE, "pull": "never"}


@pytest.fixture
def docker_ssh_options(docker_engine: str, ssh_hosts: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Options of the target docker for the same engine behind a real sshd."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("PATH", f"{ssh_hosts}/bin:{os.environ['PATH']}")
    return IN_CONTAINER | {"image": service.BASE, "pull": "never", "host": "ssh://hosta"}


@pytest.fixture
def slurm_options(slurm_cluster: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Options of the target slurm on this machine."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster))
    return {"python": sys.executable, "cpus": 1, "memory": "500m"}


@pytest.fixture
def slurm_ssh_options(
    slurm_cluster: Path, ssh_hosts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, object]:
    """Options of the target slurm for a login node behind a real sshd."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("PATH", f"{ssh_hosts}/bin:{os.environ['PATH']}")
    return {
        "python": sys.executable,
        "cpus": 1,
        "memory": "500m",
        "host": "ssh://hostb",
        "folder": str(tmp_path / "cluster"),
        "setup": [f"export SLURM_CONF={slurm_cluster}"],
    }


@pytest.fixture(autouse=True)
def _leave_nothing_running(no_process_left: None) -> None:
    """Every test may start workers."""
