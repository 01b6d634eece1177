"""Very many runs in a store, very many files of data: a verb's work grows in proportion to their number."""

from __future__ import annotations

import cProfile
import shutil
import time
from pathlib import Path

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import home

from .conftest import Cli, Write, write_run

FEW, MANY = 75, 300


def fill(write_recipe: Write, number: int) -> None:
    """Write so many runs, copies of one with ids and seeds of their own."""
    shutil.rmtree(home() / "runs", ignore_errors=True)
    first = write_run(write_recipe(), max_steps=5)
    plan = Plan.load(first.plan_file)
    for seed in range(1, number):
        folder = home() / "runs" / f"{seed:012x}"
        shutil.copytree(first.path, folder)
        training = plan.recipe.training.model_copy(update={"seed": seed})
        recipe = plan.recipe.model_copy(update={"training": training})
        plan.model_copy(update={"run_id": folder.name, "recipe": recipe}).save(folder)


@pytest.mark.slow
@pytest.mark.promise("R25")
@pytest.mark.parametrize("verb", ["runs", "prune --dry-run", "compare --where state=finished"])
def test_four_times_the_runs_cost_a_verb_four_times_the_calls(
    verb: str, call: Cli, write_recipe: Write, record_property
) -> None:
    counts = []
    for number in (FEW, MANY):
        fill(write_recipe, number)
        begin = time.process_time()
        assert call(*verb.split()).returncode == 0  # what is imported and cached at the first time
        seconds = time.process_time() - begin
        counts.append(count_calls(call, *verb.split()))
    record_property("of which", (f"{verb} of {MANY} runs, tenths of a second of CPU", round(10 * seconds)))
    assert counts[1] < counts[0] * 1.1 * MANY / FEW, counts


def test_a_thousand_files_of_data_cost_four_times_the_calls_of_250(
    call: Cli, write_recipe: Write, tmp_path: Path
) -> None:
    counts, folder, recipe = [], tmp_path / "data", write_recipe()
    folder.mkdir()
    recipe.write_text(recipe.read_text().replace("dataset: {name: none}", "dataset: {name: ./data}"))
    for number in range(1000):
        (folder / f"train-{number:03}.jsonl").write_text(f'{{"text": "the fox {number}"}}\n')
        if number in {249, 999}:
            counts.append(count_calls(call, "validate", recipe))
    assert counts[1] < counts[0] * 1.1 * 4, counts


def count_calls(call: Cli, *words: object) -> int:
    """Return how many functions a command calls."""
    profile = cProfile.Profile()
    done = profile.runcall(call, *words)
    assert done.returncode == 0, done.stderr
    return sum(entry.callcount for entry in profile.getstats())
