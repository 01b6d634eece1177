"""Runs whose policies change: one line in the differences, figures of the whole, controls phase by phase."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from sparsebp_cli.compare import compare_runs
from sparsebp_cli.recipe import load_stored
from sparsebp_cli.run import JournalWriter, RunFolder
from tests.compare.conftest import DENSE, FORWARD, probe_values

MakeRun = Callable[..., RunFolder]
DENSE_ENTRY = {"name": "dense"}
TOPK = {"name": "topk", "keep": 0.1, "along": "rows"}
RANDOM = {"name": "random", "keep": 0.1, "along": "rows"}


def schedule(*policies: dict[str, Any], until: float = 0.25) -> list[dict[str, Any]]:
    return [{"until": until, "policy": [policies[0]]}, {"policy": [policies[1]]}]


@pytest.fixture
def phased(make_run: MakeRun) -> Callable[..., RunFolder]:
    """A function that writes a run of 5 dense steps and 15 of rows, with one probe in the first phase, two in the
    second."""

    def make(name: str = "phased", second: dict[str, Any] = TOPK, **options: Any) -> RunFolder:
        shares = {"proof/claimed_share": 0.1, "proof/executed_share": 0.1}
        run = make_run(
            name,
            exact=False,
            schedule=schedule(DENSE_ENTRY, second),
            executed=0.1,
            claimed=0.1,
            metrics=shares,
            **options,
        )
        with JournalWriter(run.path, durable=False) as journal:
            dense = {"proof/claimed_share": 1.0, "proof/executed_share": 1.0}
            journal.write("metrics", step=4, values=probe_values(1.0, 1.0) | dense)
        return run

    return make


def test_the_figures_of_a_schedule_are_those_of_its_phases_weighted_by_their_steps(make_run, phased) -> None:
    found = compare_runs([make_run(), phased()]).groups[1]
    share = (5 * 1.0 + 15 * 0.1) / 20
    assert found.cost.executed_flops == pytest.approx(share * DENSE)
    assert found.cost.claimed_flops == pytest.approx(share * DENSE)
    assert found.speed.limit == pytest.approx((FORWARD + DENSE) / (FORWARD + share * DENSE))
    ratio = (FORWARD + share * DENSE) / (FORWARD + DENSE)
    update = ratio / 9  # a tenth of the step's time, beside nine tenths of forward and backward
    assert found.speed.step_cost == pytest.approx((ratio + update) / (1 + update))
    assert found.policies == ("dense", "topk")
    assert found.exact is False


def test_a_schedule_differs_from_another_recipe_in_one_line(make_run, phased) -> None:
    (change,) = compare_runs([make_run(), phased()]).groups[1].changes
    assert (change.key, change.baseline, change.value) == ("schedule", "dense", "dense until 0.25, topk keep=0.1")


def test_the_controls_of_a_schedule_are_dense_and_each_phase_drawn(make_run, phased) -> None:
    runs = [phased(seed=seed) for seed in (0, 1)]
    controls = {control.kind: control for control in compare_runs(runs).controls}
    stored = json.loads(runs[0].plan_file.read_text())["recipe"]

    def make(kind: str) -> Any:
        words = shlex.split(controls[kind].command)
        return load_stored(stored, "plan.json", [words[words.index("--set") + 1]]).recipe

    assert [entry.name for entry in make("dense").policy] == ["dense"]
    drawn = make("random")
    assert [(phase.until, [entry.name for entry in phase.policies]) for phase in drawn.phases] == [
        (0.25, ["dense"]),
        (None, ["random"]),
    ]
    assert drawn.phases[1].policies[0].options["keep"] == 0.1
    there = [*runs, make_run(), phased("drawn", RANDOM), make_run("throughout", policy=[RANDOM], exact=False)]
    found = {control.kind: control.found for control in compare_runs(there).controls if control.label == "phased"}
    assert (found["dense"], found["random"]) == ("dense", "drawn")


def test_a_phase_whose_policy_is_not_installed_has_no_random_control(make_run, phased) -> None:
    gone = phased("gone", {"name": "no-such-plugin", "keep": 0.1})
    random = next(control for control in compare_runs([make_run(), gone]).controls if control.kind == "random")
    assert (random.found, random.command) == ("", "")


def test_a_schedule_of_exact_phases_is_exact_and_a_dense_control(make_run, phased) -> None:
    twice = make_run("twice", schedule=schedule(DENSE_ENTRY, DENSE_ENTRY))
    found = compare_runs([twice, phased()])
    assert found.groups[0].exact is True
    assert next(control for control in found.controls if control.kind == "dense").found == "twice"
