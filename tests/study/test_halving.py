"""Halving: the best of a known optimum is found with less work, and each trial goes on from its checkpoint."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest

from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import State, list_runs, read
from sparsebp_lab.study.halving import Standing, find_rungs, halve
from sparsebp_lab.study.loader import load_study
from sparsebp_lab.study.trial import with_steps

from .conftest import STUDY, Cli, Start, Write, count_attempts, count_finishes

HALVED = STUDY.replace("[5e-4, 1e-3]", "[1e-5, 1e-4, 5e-4, 1e-3, 1e-2]") + "search: {kind: halving}\n"
EVALUATED = ("training: {max_steps: 20", "measure: {eval_every: 5}\ntraining: {max_steps: 60")


def test_the_best_goes_to_the_end_where_rungs_agree_with_it() -> None:
    curve = [abs(math.log10(rate) + 3.0) for rate in (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)]
    steps = Counter(dict.fromkeys(range(9), 0))
    noise = random.Random(0)

    def measure(place: int, rung: int) -> float:
        steps[place] = rung + 1
        return curve[place] + noise.uniform(-0.1, 0.1)

    found = halve(range(9), 2, 3, measure)
    assert [one.item for one in found if one.rung is None] == [4]
    assert sorted(one.item for one in found if one.rung == 1) == [3, 5]
    assert sum(one.is_cut for one in found) == 8


def test_nobody_goes_on_before_all_are_at_the_rung() -> None:
    values = {0: 1.0, 1: None, 2: 3.0}
    found = halve([0, 1, 2], 1, 3, lambda place, _: values[place])
    assert found == [Standing(place, 0, is_cut=False) for place in range(3)]
    values[1] = math.inf  # it diverged
    found = halve([0, 1, 2], 1, 3, lambda place, _: values[place])
    assert found == [Standing(0, None, is_cut=False), Standing(1, 0, is_cut=True), Standing(2, 0, is_cut=True)]


@pytest.mark.parametrize(
    ("steps", "every", "count", "reduction", "rungs"),
    [
        (60, 5, 5, 3, [20]),  # a ninth would have 6 steps
        (180, 10, 9, 3, [20, 60]),
        (180, 50, 9, 3, [50]),
        (160, 10, 4, 2, [40, 80]),
        (60, 5, 1, 3, []),
    ],
)
def test_rungs_are_evaluations_below_equal_shares(
    write_study: Write, steps: int, every: int, count: int, reduction: int, rungs: list[int]
) -> None:
    recipe = with_steps(load_study(write_study()).variants[0].recipe, steps)
    recipe = recipe.model_copy(update={"measure": recipe.measure.model_copy(update={"eval_every": every})})
    assert find_rungs(recipe, count, reduction) == rungs


def test_without_an_evaluation_on_the_way_halving_is_refused(write_study: Write) -> None:
    recipe = load_study(write_study()).variants[0].recipe
    with pytest.raises(UsageError, match=r"arm dense: .* step 6 of 20, but measure.eval_every is 50"):
        find_rungs(recipe, 4, 3)


@pytest.mark.slow
def test_a_halved_study_trains_the_best_to_the_end_and_nothing_twice(
    cli: Cli, write_study: Write, tmp_path: Path
) -> None:
    file = _write(write_study, tmp_path)
    done = cli("study", file)
    assert done.returncode == 0, done.stderr
    assert "tiny: 14 of 14 trials have finished" in done.stdout
    assert done.stdout.count(": pruned") == 6  # three of five of each arm
    ends = Counter(run.state() for run in list_runs())
    assert ends == {State.FINISHED: 2 * 2 + 2 * 2, State.INTERRUPTED: 2 * 3}
    assert _count_steps() == 2 * (5 * 20 + 2 * 40 + 2 * 60)  # a run goes on where it stopped
    assert cli("compare", "@tiny", "--all").stdout.count("pruned") == 6
    before = count_attempts()
    assert cli("study", file).returncode == 0
    assert count_attempts() == before
    _write(write_study, tmp_path, HALVED.replace("halving", "grid"))
    assert cli("study", file).returncode == 0  # now those that were cut go on as well
    assert set(count_finishes().values()) == {1}
    assert _count_steps() == 2 * (5 * 60 + 2 * 60)


@pytest.mark.long  # two clients of a study: tests/study/test_course.py
def test_two_clients_of_a_halved_study_train_nothing_twice(start: Start, write_study: Write, tmp_path: Path) -> None:
    file = _write(write_study, tmp_path, pace="2")
    clients = [start("study", file), start("study", file)]
    assert [client.wait(300) for client in clients] == [0, 0]
    assert _count_steps() == 2 * (5 * 20 + 2 * 40 + 2 * 60)


def _write(write_study: Write, tmp_path: Path, text: str = HALVED, **tags: str) -> Path:
    file, base = write_study(text, **tags), tmp_path / "base.yaml"
    base.write_text(base.read_text().replace(*EVALUATED))
    return file


def _count_steps() -> int:
    return sum(
        "train/loss" in record["values"] for run in list_runs() for record, _ in read(run.path)
        if record["kind"] == "metrics"
    )  # fmt: skip
