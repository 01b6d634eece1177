"""Combinations that Optuna proposes: near a known optimum, each once, and the same again after any interruption."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import home
from sparsebp_lab.study.course import Tuned, plan_course
from sparsebp_lab.study.loader import Combination, LoadedStudy, load_study
from sparsebp_lab.study.search import Search, advance
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.trial import TrialMaker

from .conftest import STUDY, Cli, Write, count_attempts, count_finishes

RANGE = STUDY.replace("[5e-4, 1e-3]", "{from: 1e-5, to: 1e-1, by: log}")
OPTIMUM = math.log10(1e-3)


def sample(text: str, kind: str, trials: int, seed: int = 0) -> str:
    return f"{text}search: {{kind: {kind}, trials: {trials}, seed: {seed}}}\n"


def distance(combination: Combination) -> float:
    """How far a learning rate is from the best one, in powers of ten."""
    return abs(math.log10(float(str(dict(combination)["training.learning_rate"]))) - OPTIMUM)


def search_to_end(
    loaded: LoadedStudy, objective: Callable[[Combination], float | None], parallel: int = 1, sign: float = 1.0
) -> list[Combination]:
    """Ask and tell until nothing new is asked; the objective stands in for training. None is a trial that diverged."""
    study = optuna.create_study()
    variant = loaded.firsts["dense"]
    results: dict[str, Tuned] = {}
    while True:
        asked = advance(study, loaded, results, parallel, sign)
        new = [one for one in asked if _label(one) not in results]
        if not new:
            return asked
        for one in new:
            value = objective(one)
            results[_label(one)] = Tuned(variant, value, diverged=value is None)


def _label(combination: Combination) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in combination)


def test_tpe_finds_a_known_optimum_and_is_nearer_than_random(write_study: Write) -> None:
    late: dict[str, list[float]] = {}
    for kind in ("tpe", "random"):
        for seed in range(5):
            loaded = load_study(write_study(sample(RANGE, kind, 24, seed)))
            found = search_to_end(loaded, distance)
            assert len(found) == 24
            late.setdefault(kind, []).append(statistics.median(map(distance, found[12:])))
            assert kind == "random" or min(map(distance, found)) < 0.1
    assert max(late["tpe"]) < min(late["random"])


def test_a_higher_metric_and_a_combination_that_diverges_are_understood(write_study: Write) -> None:
    loaded = load_study(write_study(sample(RANGE, "tpe", 24)))
    found = search_to_end(loaded, lambda one: None if distance(one) > 1.0 else -distance(one), sign=-1.0)
    assert min(map(distance, found)) < 0.1
    assert sum(distance(one) > 1.0 for one in found[12:]) <= 4  # of 12; of the range it is half


def test_the_same_seed_asks_the_same_and_another_one_others(write_study: Write) -> None:
    found = [
        search_to_end(load_study(write_study(sample(RANGE, "tpe", 8, seed))), distance, parallel=2)
        for seed in (0, 0, 1)
    ]
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])


def test_lists_and_whole_numbers_are_asked_as_such(write_study: Write) -> None:
    vary = "vary:\n  training.warmup_steps: {from: 0, to: 3}\n  training.optim: [sgd, adamw]"
    loaded = load_study(write_study(sample(RANGE.replace("vary:", vary), "random", 30)))
    found = [dict(one) for one in search_to_end(loaded, lambda one: 0.0)]
    assert {one["training.warmup_steps"] for one in found} == {0, 1, 2, 3}
    assert {one["training.optim"] for one in found} == {"sgd", "adamw"}


def test_what_was_asked_is_kept_and_nothing_is_asked_twice(write_study: Write) -> None:
    file = write_study(sample(RANGE, "tpe", 6))
    first, again = _plan(file, parallel=2), _plan(file, parallel=2)
    assert [variant.label for variant in again.variants] == [variant.label for variant in first.variants]
    assert len(first.variants) == 2 * 2  # of each arm as many as there are places
    assert _plan(file, asks=False).variants == first.variants
    more = _plan(write_study(sample(RANGE, "tpe", 6).replace("5, to", "4, to")), parallel=2)
    assert not {variant.label for variant in more.variants} & {variant.label for variant in first.variants}


def _plan(file: Path, parallel: int = 1, *, asks: bool = True) -> LoadedStudy:
    loaded = load_study(file)
    maker = TrialMaker(loaded.study.study, loaded.folders)
    course = plan_course(loaded, maker, TrialStore(maker))
    return Search(loaded, maker, parallel).advance(course.tuned, asks=asks)


def test_a_question_that_a_client_did_not_finish_is_asked_again(write_study: Write) -> None:
    loaded = load_study(write_study(sample(RANGE, "tpe", 3)))
    study = optuna.create_study()
    study.ask()  # and the client was killed
    assert len(advance(study, loaded, {}, parallel=3)) == 3
    assert [trial.state.name for trial in study.trials] == ["FAIL", "RUNNING", "RUNNING", "RUNNING"]


def test_without_the_extra_one_line_says_what_to_install(write_study: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"need the package optuna .*pip install 'sparsebp\[search\]'") as found:
        _plan(write_study(sample(RANGE, "random", 6)), asks=False)
    assert "\n" not in str(found.value)
    assert len(_plan_grid(write_study())) == 4


def _plan_grid(file: Path) -> tuple[object, ...]:
    return load_study(file).variants


@pytest.mark.slow
def test_a_search_is_trained_reported_and_not_trained_again(cli: Cli, write_study: Write) -> None:
    file = write_study(sample(RANGE, "tpe", 4))
    dry = cli("study", file, "--dry-run")
    assert "learning_rate: 1e-05 to 0.1 by log (tpe, 4 of each arm)" in dry.stdout
    assert "12 trials, 0 done" in dry.stdout, dry.stderr
    done = cli("study", file)
    assert done.returncode == 0, done.stderr
    assert "tiny: 12 of 12 trials have finished" in done.stdout
    before = count_attempts()
    assert len(before) == 2 * 4 + 2 * 2
    assert set(count_finishes().values()) == {1}
    assert cli("study", file).returncode == 0
    assert count_attempts() == before
    assert cli("compare", "@tiny", "--all").stdout.count("chosen") == 2
    assert cli("study", write_study(sample(RANGE, "tpe", 5))).returncode == 0  # one more of each arm
    assert len(count_attempts()) - len(before) in {2, 4, 6}  # a better one has a report of its own


@pytest.mark.slow
def test_results_that_no_client_told_are_told_before_anything_is_trained(cli: Cli, write_study: Write) -> None:
    file = write_study(sample(RANGE, "tpe", 4))
    first = cli("study", file)
    attempts = count_attempts()
    told = home() / "studies" / "tiny.search.db"
    told.unlink()
    second = cli("study", file)
    assert (second.returncode, _table(second.stdout)) == (0, _table(first.stdout)), second.stderr
    assert count_attempts() == attempts
    assert told.exists()


def _table(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(("dense", "topk", "tiny", " dense", " topk"))]
