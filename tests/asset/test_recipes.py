"""Every recipe that comes with the project does what its words say: it is run, shortened, by the real worker."""

from pathlib import Path

import pytest

from sparsebp_cli.cli.starter.shipped import SHORT
from sparsebp_cli.plan import make_plan
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run import create_run, read
from tests.worker.conftest import work

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(file for folder in SHORT for file in (FOLDER / folder).glob("*.yaml"))
BY_NAME = {file.stem: file for file in RECIPES}
SHORT = [
    "dataset.max_examples=500",
    "training.max_steps=2",
    "training.warmup_steps=0",
    "training.per_device_train_batch_size=4",
    "measure.eval_examples=4",
    "measure.probe_every=null",
    "target.threads=1",
]


def test_there_are_recipes_for_the_quickstart_and_for_each_way_of_training():
    names = {file.stem for file in RECIPES}
    expected = {"austen-from-scratch", "cmudict-completion", "lora", "python-docs", "quickstart"}
    expected |= {"quickstart-dense", "random-rows", "topk-rows"}
    assert expected <= names


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_short_says_what_it_is_for_and_is_called_like_its_file(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ")
    assert load_recipe(file).name == file.stem


def test_the_two_quickstart_recipes_differ_in_the_exact_policy_alone():
    dense, packed = (
        load_recipe(BY_NAME[name]).model_dump(exclude={"name"}) for name in ("quickstart-dense", "quickstart")
    )
    assert {key for key in dense if dense[key] != packed[key]} == {"policy"}
    assert [policy["name"] for policy in packed["policy"]] == ["lossless"]


def test_topk_rows_and_its_control_differ_from_python_docs_in_the_policy_alone():
    dense, sparse, control = (
        load_recipe(BY_NAME[name]).model_dump(exclude={"name"}) for name in ("python-docs", "topk-rows", "random-rows")
    )
    assert {key for key in dense if dense[key] != sparse[key]} == {"policy"}
    assert {key for key in dense if dense[key] != control[key]} == {"policy"}
    assert [policy["keep"] for policy in sparse["policy"]] == [policy["keep"] for policy in control["policy"]]


@pytest.mark.always("eager", "frozen-float8", "lossless", "max-child", "quickstart")
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_runs(file):
    plan = make_plan(load_recipe(file, SHORT), file)
    run = create_run(plan.run_id)
    plan.save(run.path)
    assert work(run) == 0, run.log_file.read_text(encoding="utf-8")[-2000:]
    records = [record for record, _ in read(run.path)]
    steps = {record["step"] for record in records if "train/loss" in record.get("values", {})}
    assert steps == {1, 2}
    assert records[-1]["status"] == "finished"
