"""``run --until-ci``: more seeds until a margin is decided, and no more."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsebp_cli.cli.run import make_plans
from sparsebp_cli.compare import Question, compare_runs
from sparsebp_cli.compare.sequential import Trial, plan_looks
from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import JournalWriter, create_run, list_runs
from sparsebp_lab.verb.until import print_answers, run_until

from .conftest import Cli, Write
from .document import read_document


def _long(value: float) -> Any:
    return pytest.param(value, marks=pytest.mark.long)


Loss = Callable[[str, int], float]


class Machine:
    """Executes plans at once: a run's loss follows from its name and seed."""

    def __init__(self, recipes: list[Path], loss: Loss, fails_at: int | None = None) -> None:
        self.recipes, self.loss, self.fails_at = recipes, loss, fails_at
        self.done: list[tuple[str, int]] = []

    def make_plans(self, seeds: str) -> list[Plan]:
        return make_plans(self.recipes, [], seeds)

    def execute(self, plans: Sequence[Plan]) -> int:
        for plan in plans:
            name, seed = plan.recipe.name, plan.recipe.training.seed
            if seed == self.fails_at:
                return 100
            self.done.append((name, seed))
            run = create_run(plan.run_id)
            plan.save(run.path)
            with JournalWriter(run.path, durable=False) as journal:
                journal.write("attempt", from_step=0, environment={})
                journal.write("metrics", step=30, values={"eval/loss": self.loss(name, seed)})
                journal.write("end", status="finished", step=30, text="")
        return 0

    def until(self, condition: str, seeds: str | None = None, max_minutes: float | None = None) -> int:
        answer, code = run_until(condition, seeds, max_minutes, self.make_plans, self.execute)
        print_answers(answer)
        return code


@pytest.fixture
def two_recipes(write_recipe: Write, tmp_path: Path) -> list[Path]:
    """A dense recipe and one that is not, in the wrong order."""
    sparse, dense = write_recipe(name="sparse"), write_recipe(name="dense")
    dense.write_text(dense.read_text().replace("[{name: topk, keep: 0.1}]", "[{name: dense}]"))
    return [sparse, dense]


def noisy(extra: float, sd: float) -> Loss:
    return lambda name, seed: 3.0 + (extra * (name == "sparse") + random.Random(f"{name} {seed}").gauss(0.0, sd))


def test_it_stops_after_three_seeds_where_the_answer_is_plain(
    two_recipes: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(two_recipes, noisy(0.5, 0.001))
    assert machine.until("eval/loss=0.01") == 0
    assert sorted(machine.done) == [(name, seed) for name in ("dense", "sparse") for seed in range(3)]
    out = capsys.readouterr().out
    assert out.startswith("sparse: eval/loss not worse by more than 0.01: no\n")
    assert "looks after 3, 5, 8, 10 seeds, each at a level of 0.013" in out
    assert "next: sparsebp compare sparse dense --margin eval/loss=0.01" in out


def test_it_goes_on_until_the_seeds_are_spent_and_then_says_inconclusive(
    two_recipes: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(two_recipes, noisy(0.01, 0.05))
    assert machine.until("0.01", "10-14") == 0
    assert {seed for _, seed in machine.done} == {10, 11, 12, 13, 14}
    assert len(machine.done) == len(set(machine.done)) == 10
    assert "inconclusive" in capsys.readouterr().out


def test_the_baseline_is_that_of_compare_whatever_the_order(two_recipes: list[Path], write_recipe: Write) -> None:
    exact, changing = write_recipe(name="exact"), write_recipe(name="changing")
    policy = "policy: [{name: topk, keep: 0.1}]"
    exact.write_text(exact.read_text().replace(policy, "policy: [{name: lossless}]"))
    phases = "schedule: [{until: 0.5, policy: [{name: topk, keep: 0.1}]}, {policy: [{name: dense}]}]"
    changing.write_text(changing.read_text().replace(policy, phases))
    for recipes, wanted in (([changing, exact, *two_recipes], "dense"), ([changing, exact, two_recipes[0]], "exact")):
        machine = Machine(recipes, noisy(0.0, 0.001))
        answer, _ = run_until("eval/loss=0.01", "0-2", None, machine.make_plans, machine.execute)
        names = {"dense", "exact", "changing", "sparse"} & {recipe.stem for recipe in recipes}
        assert {one.name for one in answer.answers} == names - {wanted}


def test_what_is_there_is_not_run_again(two_recipes: list[Path]) -> None:
    first = Machine(two_recipes, noisy(0.5, 0.001))
    first.until("eval/loss=0.01")
    again = Machine(two_recipes, noisy(0.5, 0.001))
    assert again.until("eval/loss=0.01") == 0
    assert again.done == []
    assert len(list_runs()) == 6


def test_a_group_that_is_decided_gets_no_more_seeds(two_recipes: list[Path], write_recipe: Write) -> None:
    other = write_recipe(name="other")
    other.write_text(other.read_text().replace("keep: 0.1", "keep: 0.5"))

    def loss(name: str, seed: int) -> float:
        spread = {"dense": 0.001, "sparse": 0.001, "other": 0.2}[name]
        return 3.0 + 0.5 * (name == "sparse") + random.Random(f"{name} {seed}").gauss(0.0, spread)

    machine = Machine([*two_recipes, other], loss)
    machine.until("eval/loss=0.01", "0-4")
    num = {name: sum(done == name for done, _ in machine.done) for name in ("dense", "sparse", "other")}
    assert num == {"dense": 5, "sparse": 3, "other": 5}


def test_a_run_that_fails_ends_it_with_its_code(two_recipes: list[Path]) -> None:
    assert Machine(two_recipes, noisy(0.5, 0.001), fails_at=2).until("eval/loss=0.01") == 100


def test_no_round_begins_when_the_time_is_over(two_recipes: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(two_recipes, noisy(0.01, 0.5))
    assert machine.until("eval/loss=0.01", "0-9", max_minutes=0.0) == 0
    assert len(machine.done) == 6
    assert "--max-minutes 0 is reached; undecided groups: 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("condition", "seeds", "says"),
    [
        ("eval/loss=0", "0-4", "--until-ci must be a number above 0"),
        ("eval/loss=0.1", "0-1", "--until-ci needs at least 3 seeds to choose from, got 2"),
        ("train/grad_norm=0.1", "0-4", "from the name train/grad_norm if higher is better"),
    ],
)
def test_what_cannot_be_decided_is_refused_before_anything_runs(
    two_recipes: list[Path], condition: str, seeds: str, says: str
) -> None:
    machine = Machine(two_recipes, noisy(0.1, 0.1))
    with pytest.raises(UsageError, match=says):
        machine.until(condition, seeds)
    assert machine.done == []
    with pytest.raises(UsageError, match="needs two recipes or more"):
        Machine(two_recipes[:1], noisy(0.1, 0.1)).until("0.1")


def test_looks_are_few_and_end_with_the_last_seed() -> None:
    assert [plan_looks(n) for n in (3, 4, 10, 20)] == [(3,), (3, 4), (3, 5, 8, 10), (3, 5, 8, 12, 18, 20)]


def test_looking_often_answers_wrongly_in_5_of_100_studies_at_most() -> None:
    """The truth lies on the margin itself, so any answer but inconclusive is wrong."""
    draw, wrong, studies = np.random.default_rng(3), 0, 400
    for _ in range(studies):
        seeds = {s: float(x) for s, x in enumerate(draw.normal(0.0, 1.0, 10))}
        trial = Trial(["a"], 10, 0.1, worse_is_up=True)
        here = {s: x + 0.1 + float(draw.normal(0.0, 0.05)) for s, x in seeds.items()}
        for count in trial.looks:
            trial.look({"a": dict(list(here.items())[:count])}, dict(list(seeds.items())[:count]))
            if not trial.open:
                wrong += 1
                break
    assert wrong / studies < 0.05 + 0.02


@pytest.mark.parametrize("extra", [0.0, _long(0.012), 0.02, _long(0.03), 0.05])
def test_compare_of_those_runs_gives_the_trials_answer(
    two_recipes: list[Path], capsys: pytest.CaptureFixture[str], extra: float
) -> None:
    assert Machine(two_recipes, noisy(extra, 0.02)).until("eval/loss=0.02", "0-11") == 0
    said = capsys.readouterr().out.partition("not worse by more than 0.02: ")[2].split()[0].rstrip(";")
    found = compare_runs(list_runs(), Question(margin=0.02)).groups[1]
    assert found.quality.not_worse is not None
    assert found.quality.not_worse.answer == said
    assert found.quality.not_worse.looks[0] == 3
    assert "fixed beforehand" in found.verdict
    other = compare_runs(list_runs(), Question(margin=0.021)).groups[1]
    assert other.quality.not_worse is not None
    assert other.quality.not_worse.looks == ()


def test_a_trial_whose_file_is_damaged_is_none(two_recipes: list[Path]) -> None:
    assert Machine(two_recipes, noisy(0.5, 0.001)).until("eval/loss=0.01") == 0
    for run in list_runs():
        (run.path / "trial.json").write_text('{"metric": 3')
    found = compare_runs(list_runs(), Question(margin=0.01)).groups[1]
    assert found.quality.not_worse is not None
    assert found.quality.not_worse.looks == ()


def test_the_command_line_runs_it_and_refuses_what_does_not_go_with_it(cli: Cli, two_recipes: list[Path]) -> None:
    changes = ["--set", "training.max_steps=3"]
    done = cli("run", *two_recipes, "--until-ci", "eval/loss=0.01", "--seeds", "0-3", *changes)
    assert done.returncode == 0, done.stderr
    assert "sparse: eval/loss not worse by more than 0.01: yes" in done.stdout
    assert len(list_runs()) == 6
    again = cli("run", *two_recipes, "--until-ci", "eval/loss=0.01", "--seeds", "0-3", *changes, "-o", "json")
    document = read_document(again.stdout)
    assert (document["kind"], document["stopped"], document["answers"][0]["answer"]) == ("margins", "decided", "yes")
    refused = cli("run", *two_recipes, "--until-ci", "0.01", "--detach")
    assert refused.returncode == 2
    text = "error: --until-ci waits for results: leave out --dry-run, --detach, --ids and --with-baseline\n"
    assert refused.stderr == text
