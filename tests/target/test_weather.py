"""Every command of every engine may be slow, late, cut or wrong: one worker all the same, and a right end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.target.batch import SlurmOptions
from sparsebp_cli.target.container import DockerOptions
from sparsebp_cli.target.dispatcher import Dispatcher
from sparsebp_cli.target.docker import DockerEngine
from sparsebp_cli.target.engine import TargetEngine
from sparsebp_cli.target.kubernetes import KubernetesEngine
from sparsebp_cli.target.manifest import KubernetesOptions
from sparsebp_cli.target.slurm import SlurmEngine
from sparsebp_cli.target.tool import Tool

from . import service
from .conftest import IN_CONTAINER, last_end, make_run
from .weather import install

WORKER = "sparsebp_cli.testing.worker"
LIMIT_SECONDS, LIMIT_OF_REAL = 5.0, 20.0  # in the place of a minute, and of two for a transfer
# Delays of some looks and of many: two and twenty seconds where a look is a second. Then what never answers, what
# answers too late although it was done, a line that breaks before, and answers that are wrong.
WEATHERS = (
    "delay-0", "delay-0.1", "delay-1", "never", "late", "lost", "cut", "empty", "repeated", "chatty", "garbled",
    "failed",
)  # fmt: skip
TARGETS = {
    "slurm": ("sbatch", "squeue"),
    "kubernetes": ("kubectl",),
}
# A real sshd, which an ssh reaches that is not well, and a real dockerd. What docker says through ssh is one stream to
# both sides, which only can be slow or break.
REAL = {
    "slurm over ssh": ("ssh", WEATHERS),
    "docker": ("docker", WEATHERS),
    "docker over ssh": ("ssh", ("delay-1", "never", "lost")),
}


def prepare(place: Path, monkeypatch: pytest.MonkeyPatch, limit_seconds: float, **others: str) -> Path:
    for name, value in install(place, **others).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Tool.__init__, "__defaults__", ((), limit_seconds))
    for name, number in {
        "tool.LOOK_SECONDS": 0.02,
        "tool.SILENCE_SECONDS": limit_seconds,
        "dispatcher.LONGEST_PAUSE": 0.05,
        "slurm.DOUBT_SECONDS": 3.0,
        "slurm.ASKING_MINUTES": 0,
    }.items():
        monkeypatch.setattr(f"sparsebp_cli.target.{name}", number)
    return place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare(tmp_path, monkeypatch, LIMIT_SECONDS)


@pytest.fixture
def real_place(docker_engine: str, ssh_hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    return prepare(tmp_path, monkeypatch, LIMIT_OF_REAL, ssh=str(ssh_hosts / "bin" / "ssh"))


def make_engine(kind: str, place: Path) -> TargetEngine:
    host = {"host": "ssh://hosta"} if kind.endswith("ssh") else {}
    engine: TargetEngine
    if kind == "kubernetes":
        engine = KubernetesEngine(KubernetesOptions(worker=WORKER, python=sys.executable))
    elif kind.startswith("docker"):
        options = {**IN_CONTAINER, "worker": WORKER, "image": service.BASE, "pull": "never", **host}
        engine = DockerEngine(DockerOptions.model_validate(options))
    else:
        setup = [f"export SLURM={place}/slurm PATH={place}/proxy:{place}/weather/real:$PATH"]
        setup += [f"export WEATHER={place}/weather"]
        there = {"folder": f"{place}/there"} | host if host else {}
        options = {"worker": WORKER, "python": sys.executable, "setup": setup, **there}
        engine = SlurmEngine(SlurmOptions.model_validate(options))
    type(engine).fastest_seconds = type(engine).slowest_seconds = 0.05
    return engine


def carry_out(run: RunFolder, engine: TargetEngine) -> None:
    dispatcher = Dispatcher([run], engine)
    dispatcher.begin()
    dispatcher.run_to_end()


def num_starts(kind: str, place: Path) -> int:
    """Return how many jobs were submitted; Kubernetes has no second one of a name."""
    return len(list((place / "slurm" / "jobs").glob("*"))) if kind.startswith("slurm") else 0


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("weather", WEATHERS)
@pytest.mark.parametrize(("kind", "tool"), [(kind, tool) for kind, tools in TARGETS.items() for tool in tools])
def test_a_run_is_started_once_and_ends_right_in_every_weather(
    place: Path, kind: str, tool: str, weather: str, first: int
) -> None:
    """``first``: that many commands are well before the one that is not."""
    try_weather(place, kind, tool, weather, first)


@pytest.mark.long
@pytest.mark.xdist_group("engines")
@pytest.mark.timeout(3600)  # each command is a connection: minutes where ten processes share a processor
@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize(
    ("kind", "tool", "weather"), [(kind, tool, one) for kind, (tool, weathers) in REAL.items() for one in weathers]
)
def test_a_run_behind_docker_or_ssh_is_started_once_and_ends_right_in_every_weather(
    real_place: Path, kind: str, tool: str, weather: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "docker over ssh":
        monkeypatch.delenv("DOCKER_HOST")
    try_weather(real_place, kind, tool, weather, first)


def try_weather(place: Path, kind: str, tool: str, weather: str, first: int) -> None:
    engine, run = make_engine(kind, place), make_run()
    # The proxy counts down: fair weather first, then one command of the other kind.
    (place / "weather" / tool).write_text(f"{weather} 1 {first}")
    try:
        carry_out(run, engine)
    except SparseBPError:
        assert run.state() is State.FAILED
        assert last_end(run)["text"]
        assert not History.load(run.path).environments
        assert engine.find(run) is None
        assert num_starts(kind, place) == 0
        carry_out(run, engine)
    assert run.state() is State.FINISHED
    history = History.load(run.path)
    assert list(history.series("train/loss")) == [1, 2, 3, 4, 5]
    assert len(history.environments) == 1  # one worker
    assert num_starts(kind, place) <= 1
    assert engine.find(run) is None
