"""What a step costs beside a dense step: by hand, and what a run says of it before its first step."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from sparsebp_cli.run import History
from sparsebp_cli.worker.step_cost import RelativeCost
from tests.worker.conftest import FORKS, work


@pytest.mark.parametrize(("keep", "worth"), [(0.5, 4 / 3), (0.25, 2.0), (0.1, 4.0)])
def test_what_a_kept_token_must_be_worth(keep: float, worth: float) -> None:
    ratio = (1 + 2 * keep) / 3
    found = RelativeCost(ratio, ratio, "targets", keep)
    assert found.unit_worth == pytest.approx(worth)
    assert f"the first step take {ratio:.2f} times the FLOPs of dense training" in found.describe()
    assert f"keeps {keep:.0%} of the targets. `sparsebp worth RECIPE` estimates whether" in found.describe()


def test_nothing_is_said_of_a_choice_that_is_not_made() -> None:
    dense, frozen = RelativeCost(1.0, 1.1), RelativeCost(0.7, 0.8)
    assert (dense.unit_worth, dense.describe()) == (None, "")
    assert frozen.describe().endswith("0.80 times its time (timed alternately)")


@pytest.mark.parametrize(
    ("policy", "unit"),
    [
        ({"name": "tokens", "score": "random", "keep": 0.25, "mode": "detach"}, "targets"),
        ({"name": "uniform", "keep": 0.25, "start": 0.0, "end": 1.0, "interrupt": 0}, "examples"),
        ({"name": "topk", "keep": 0.25, "along": "rows"}, "rows"),
        ({"name": "topk", "keep": 0.25, "along": "columns"}, "entries"),
        ({"name": "dense"}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_a_run_says_before_its_first_step_what_a_kept_unit_must_be_worth(
    tiny_recipe: Any, prepared: Any, policy: dict[str, Any], unit: str
) -> None:
    measure = {"probe_every": 9, "fidelity_every": None, "warmup_steps": 0, "eval_every": 9}
    run = prepared(tiny_recipe(policy=[policy], measure=measure, training={"max_steps": 1}))
    assert work(run) == 0, run.log_file.read_text()
    history = History.load(run.path)
    notes = [text for _, level, text in history.notes if level == "info" and "of the first step take" in text]
    ratio, share = history.last("choice/cost_ratio"), history.last("choice/share")
    if unit:
        assert share == pytest.approx(0.25, abs=0.02)
        assert share - 1e-9 <= ratio < 1
        assert history.last("choice/worth") == pytest.approx(ratio / share)
        assert f"keeps {share:.0%} of the {unit}" in notes[0]
        assert len(notes) == 1
    else:
        assert ratio == 1.0
        assert share is None
        assert notes == []


def _preview(plan_file: Any) -> None:
    from sparsebp_cli.worker.answer import answer
    from sparsebp_cli.worker.preview import measure_first_batch

    out = os.open(plan_file.parent / "out", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    answer(lambda: measure_first_batch(plan_file))


def test_a_preview_tells_the_same_as_the_run_and_trains_nothing(tiny_recipe: Any, prepared: Any) -> None:
    policy = [{"name": "tokens", "score": "loss", "keep": 0.25, "mode": "detach"}]
    recipe = tiny_recipe(policy=policy, measure={"probe_every": 9, "fidelity_every": None}, training={"max_steps": 1})
    run, looked = prepared(recipe), prepared(recipe)
    assert work(run) == 0, run.log_file.read_text()
    process = FORKS.Process(target=_preview, args=(looked.plan_file,))
    process.start()
    process.join()
    told = json.loads((looked.path / "out").read_text().splitlines()[-1])
    history = History.load(run.path)
    for name, value in told["values"].items():
        if name != "choice/seconds_ratio" and value is not None:
            assert value == pytest.approx(history.last(name), rel=1e-6), name
    assert [line.partition(" ")[0] for line in told["lines"]] == ["forward"]
    assert not History.load(looked.path).metrics
    assert not (looked.path / "model").exists()
