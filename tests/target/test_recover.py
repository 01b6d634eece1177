"""Before `cancel` and `rm` believe a folder that lost its record, they ask the target; no answer is not "no"."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sparsebp_cli.target
from sparsebp_cli.cli.stored_run import ask_target
from sparsebp_cli.errors import UnreachableError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, State, create_run
from sparsebp_cli.target import Job, TargetOptions
from sparsebp_cli.target.dispatcher import Dispatcher
from sparsebp_cli.target.remote import RemoteJob, RemoteTarget
from tests.target.fake import FakeEngine

from ..cli.conftest import Cli, call
from ..run.test_unreadable import DAMAGES, make_run
from .conftest import UNUSABLE, until

__all__ = ["call"]  # a fixture of the command line's tests
pytestmark = pytest.mark.promise("R28")

LOSSES: dict[str, Callable[[RunFolder], object]] = {
    name: lambda run, content=content: run.target_file.write_bytes(content) for name, content in DAMAGES.items()
} | {"deleted": lambda run: run.target_file.unlink()}


class Elsewhere(RemoteTarget):
    """A target elsewhere, whose dispatchers are threads."""

    options_class = TargetOptions

    def __init__(self, there: Path) -> None:
        self.engine = FakeEngine(there)
        self.threads: list[threading.Thread] = []

    def dispatch(self, run: RunFolder, *, adopt_only: bool) -> None:
        dispatcher = Dispatcher([run], self.engine, max_parallel=1, adopt_only=adopt_only)
        dispatcher.begin()
        self.threads.append(threading.Thread(target=dispatcher.run_to_end, daemon=True))
        self.threads[-1].start()

    def reattach(self, run: RunFolder) -> Job:
        if not run.is_locked("target"):
            self.dispatch(run, adopt_only=True)
        return RemoteJob(run, self.engine)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    made = Elsewhere(tmp_path / "there")
    monkeypatch.setattr(sparsebp_cli.target, "make_target", lambda _: made)
    yield made
    made.engine.mend()
    for thread in made.threads:
        thread.join(60)


@pytest.fixture
def orphan(target: Elsewhere) -> RunFolder:
    """A run whose worker is alive elsewhere and whose dispatcher died before it wrote anything but a record."""
    content = {"version": 1, "name": "r", "model": {"name": "none"}, "dataset": {"name": "none"}}
    content |= {"target": {"kind": "docker", "image": "x"}, "tracking": {"uri": UNUSABLE, "tags": {"fake": "slow"}}}
    plan = Plan(recipe=Recipe.model_validate(content))
    run = create_run(plan.run_id)
    plan.save(run.path)
    target.engine.start([run], 1)
    there = RunFolder(target.engine.there / run.run_id)
    until(lambda: History.load(there.path).series("train/loss"))
    (run.path / "journal.jsonl").write_bytes((there.path / "journal.jsonl").read_bytes())
    run.target_file.write_text("{}")
    return run


@pytest.mark.parametrize("loss", LOSSES)
def test_a_worker_that_lives_elsewhere_is_found_and_not_deleted(
    target: Elsewhere, orphan: RunFolder, call: Cli, loss: str
) -> None:
    LOSSES[loss](orphan)
    done = call("rm", "--yes", orphan.run_id)
    assert done.returncode == 101, done.stderr
    assert f"run {orphan.run_id} is unreachable" in done.stderr
    assert orphan.plan_file.exists()
    done = call("cancel", "--grace", "5", orphan.run_id)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{orphan.run_id} cancelled\n")
    assert target.engine.find(orphan) is None
    assert call("rm", "--yes", orphan.run_id).returncode == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_a_target_that_does_not_answer_is_not_taken_for_one_without_the_run(
    target: Elsewhere, orphan: RunFolder, call: Cli, loss: str
) -> None:
    LOSSES[loss](orphan)
    target.engine.cut()
    for words in (("rm", "--yes", orphan.run_id), ("cancel", orphan.run_id)):
        done = call(*words)
        assert done.returncode == 101, done.stderr
        assert "its line is cut" in done.stderr
    assert orphan.plan_file.exists()
    target.engine.mend()
    target.engine.lose(orphan)
    assert call("cancel", orphan.run_id).returncode == 0  # asks again, and now there is no worker
    assert call("rm", "--yes", orphan.run_id).returncode == 0
    assert not orphan.path.exists()


def test_a_run_that_never_left_this_machine_asks_nobody(target: Elsewhere) -> None:
    run = make_run(kind="docker", image="x")
    target.engine.cut()
    ask_target(run)
    assert run.state() is State.QUEUED
    run.target_file.write_bytes(b"")
    with pytest.raises(UnreachableError):
        ask_target(run)
