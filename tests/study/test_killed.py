"""Studies whose clients, watchers and workers are killed at random moments end as one that was left alone."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest

from sparsebp_cli.run import History, State, list_runs
from sparsebp_cli.target.launch import Launch

from .conftest import STUDY, Cli, Start, Write, count_finishes

pytestmark = pytest.mark.slow

RANGE = STUDY.replace("[5e-4, 1e-3]", "{from: 1e-5, to: 1e-1, by: log}")
SEARCHES = {
    "grid": STUDY,
    "halving": STUDY.replace("[5e-4, 1e-3]", "[1e-5, 5e-4, 1e-3]") + "search: {kind: halving}\n",
    "tpe": RANGE + "search: {kind: tpe, trials: 4}\n",
    "random": RANGE + "search: {kind: random, trials: 4}\n",
}
EVALUATED = ("training: {max_steps: 20", "measure: {eval_every: 5}\ntraining: {max_steps: 40")  # halving ranks at them


@pytest.mark.always("halving")
@pytest.mark.parametrize("kind", SEARCHES)
def test_killed_at_random_a_study_trains_what_it_would_and_nothing_twice(
    kind: str, cli: Cli, start: Start, write_study: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _write(write_study, tmp_path, kind)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SPARSEBP_HOME", str(tmp_path / "undisturbed"))
        done = cli("study", file)
        assert done.returncode == 0, done.stderr
        undisturbed = _outcome()
    _kill_and_go_on(cli, start, file, kills=3, seed=0)
    assert _outcome() == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", SEARCHES)
def test_killed_often_a_study_trains_nothing_twice(
    kind: str, seed: int, cli: Cli, start: Start, write_study: Write, tmp_path: Path
) -> None:
    _kill_and_go_on(cli, start, _write(write_study, tmp_path, kind), kills=8, seed=seed)


def _write(write_study: Write, tmp_path: Path, kind: str) -> Path:
    file, base = write_study(SEARCHES[kind], pace="15"), tmp_path / "base.yaml"
    base.write_text(base.read_text().replace(*EVALUATED))
    return file


def _outcome() -> dict[str, tuple[State, int]]:
    """Return how each run of the store ended, and after which step. Its name follows from what it trains."""
    return {run.run_id: (run.state(), max(History.load(run.path).series("train/loss"))) for run in list_runs()}


def _kill_and_go_on(cli: Cli, start: Start, file: Path, *, kills: int, seed: int) -> None:
    """Run a study with one or two clients, kill a client, a watcher or a worker again and again, then let it end."""
    moment = random.Random(seed)
    for _ in range(kills):
        clients = [start("study", file) for _ in range(moment.choice([1, 2]))]
        time.sleep(moment.uniform(0.5, 4.0))
        clients[0].kill()
        if moment.random() < 0.7:
            _kill_one(moment)
    for _ in range(kills + 1):  # a trial that was killed while a client followed it is resumed by the next command
        if (done := cli("study", file)).returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    assert max(count_finishes().values()) == 1


def _kill_one(moment: random.Random) -> None:
    launches = [(launch, run) for run in list_runs() if (launch := Launch.load(run)) is not None]
    found = [p for launch, run in launches for p in (launch.watcher(run), launch.worker(run)) if p is not None]
    if found:
        try:
            moment.choice(found).kill()
        except psutil.NoSuchProcess:
            return
