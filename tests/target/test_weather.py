"""Every command of Slurm and Kubernetes may be slow, late, cut or wrong: one worker all the same, and a right end."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.target.batch import SlurmOptions
from sparsebp_cli.target.dispatcher import Dispatcher
from sparsebp_cli.target.engine import TargetEngine
from sparsebp_cli.target.kubernetes import KubernetesEngine
from sparsebp_cli.target.manifest import KubernetesOptions
from sparsebp_cli.target.slurm import SlurmEngine
from sparsebp_cli.target.tool import Tool

from .conftest import last_end, make_run
from .weather import install

WORKER = "sparsebp_cli.testing.worker"
LIMIT_SECONDS = 5.0  # in the place of a minute
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


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in install(tmp_path).items():
        monkeypatch.setenv(name, value)
    for name, number in {
        "tool.LOOK_SECONDS": 0.02,
        "dispatcher.LONGEST_PAUSE": 0.05,
        "slurm.DOUBT_SECONDS": 3.0,
        "slurm.ASKING_MINUTES": 0,
    }.items():
        monkeypatch.setattr(f"sparsebp_cli.target.{name}", number)
    return tmp_path


def make_engine(kind: str, place: Path) -> TargetEngine:
    engine: TargetEngine
    if kind == "kubernetes":
        engine = KubernetesEngine(KubernetesOptions(worker=WORKER, python=sys.executable))
        engine._tool = limited(engine._tool)
    else:
        setup = [f"export PATH={place}/proxy:{place}/weather/real:$PATH"]
        engine = SlurmEngine(SlurmOptions(worker=WORKER, python=sys.executable, setup=setup))
        engine._shell._tool = limited(engine._shell._tool)
    type(engine).fastest_seconds = type(engine).slowest_seconds = 0.05
    return engine


def limited(tool: Tool) -> Tool:
    return replace(tool, timeout_seconds=LIMIT_SECONDS)


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
    place: Path, kind: str, tool: str, weather: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first``: that many commands are well before the one that is not."""
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
