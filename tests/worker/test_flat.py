"""The worker gathers nothing over steps of changing shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.training import Training
from tests.memory.flat import gathered
from tests.memory.test_flat import grown

STEPS: list[dict[str, Any]] = [{"name": "lossless"}, {"name": "topk", "keep": 0.5, "along": "rows"}]
CASES = [(policy, (14, 26)) for policy in STEPS]
LONG = [pytest.param(policy, (44, 500), marks=pytest.mark.long) for policy in STEPS]


@pytest.mark.promise("R25", "R34")
@pytest.mark.parametrize(("policy", "at"), [*CASES, *LONG])
def test_the_worker_gathers_nothing_over_steps_of_changing_shapes(
    tiny_recipe: Callable[..., Recipe],
    prepared: Callable[[Recipe], RunFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: dict[str, Any],
    at: tuple[int, int],
) -> None:
    rows = [{"prompt": f"Line {n % 5}: the", "completion": " fox" * (1 + n % 6)} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tiny_recipe(
        policy=[policy],
        dataset={"name": str(tmp_path / "pairs.jsonl"), "format": "completion", "max_seq_length": 40},
        training={"max_steps": at[1]},
        measure={"eval_every": 6, "eval_examples": 4, "probe_every": 6, "fidelity_every": 6},
    )
    run, found = prepared(recipe), []
    log = Training._log

    def count(self: Training, values: Mapping[str, float | None], step: int | None = None) -> None:
        log(self, values, step)
        if self.step in at and "train/loss" in values:
            found.append(gathered())

    monkeypatch.setattr(Training, "_log", count)
    with JournalWriter(run.path, durable=False) as journal:
        Training.build(Plan.load(run.plan_file), run, journal, StopRequest()).run_to_end()
    middle, last = found
    assert grown(middle, last) == {}
