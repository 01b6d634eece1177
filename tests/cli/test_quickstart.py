"""The quickstart: the two recipes of the package, compared by their own ids, and three lines on what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sparsebp_cli.cli import quickstart as verb
from sparsebp_cli.cli.follow import Followed
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import JournalWriter, RunFolder, create_run, home

from ..target.fake_worker import measure
from .conftest import Cli, Write, write_run

FIGURES = {"eval/loss": 1.5, "flops/backward_dense": 2e9, "flops/backward_executed": 9e8}


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, write_recipe: Write) -> list[Plan]:
    """The plans that were executed, by a worker that trains nothing; another run is made while they last."""
    plans: list[Plan] = []

    def execute(given: Sequence[Plan]) -> Followed:
        for plan in given:
            run = create_run(plan.run_id)
            plan.save(run.path)
            with JournalWriter(run.path) as journal:
                journal.write("attempt", from_step=0, environment={"python": "3", "packages": {}})
                flops = {"flops/step": 1e9 if plan is given[0] else 0.45e9, "flops/step_dense": 1e9}
                counted = flops | {"flops/update_dense": 1e7}
                for step in range(1, plan.recipe.training.max_steps + 1):
                    journal.write("metrics", step=step, values=measure(step) | FIGURES | counted)
                journal.write("end", status="finished", step=step, text="")
            plans.append(plan)
        write_run(write_recipe(name="newcomer"))
        folders = tuple(RunFolder(home() / "runs" / plan.run_id) for plan in given)
        return Followed(folders, (0, 0), 0)

    monkeypatch.setattr(verb, "execute_plans", execute)
    return plans


def test_the_quickstart_compares_its_own_two_runs_and_says_where_to_go(
    call: Cli, executed: list[Plan], tmp_path: Path
) -> None:
    done = call("quickstart", "--ids", "ids", "--set", "training.max_steps=12")
    assert (done.returncode, done.stderr) == (0, "")
    assert [plan.recipe.name for plan in executed] == ["quickstart-dense", "quickstart"]
    assert {plan.recipe.training.max_steps for plan in executed} == {12}
    assert (tmp_path / "ids").read_text().split() == [plan.run_id for plan in executed]
    assert "newcomer" not in done.stdout
    assert done.stdout.startswith("Result: ")  # the lesson, and no table
    lesson = done.stdout
    assert len(lesson.splitlines()) <= 8
    first_words = [line.split()[0] for line in lesson.splitlines()]
    assert [word for word in first_words if word.endswith(":")] == ["Result:", "Use:", "Next:"]
    assert "quickstart is exact: what differs is rounding" in " ".join(lesson.split())
    assert "; cost 0.45 of the baseline's FLOPs" in " ".join(lesson.split())
    assert f"sparsebp compare {executed[0].run_id} {executed[1].run_id}" in " ".join(lesson.split())
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 100


def test_a_quickstart_that_fails_compares_nothing_and_ends_with_the_code_of_its_run(
    call: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "execute_plans", lambda plans: Followed((), (), 104))
    done = call("quickstart")
    assert (done.returncode, done.stdout) == (104, "")
