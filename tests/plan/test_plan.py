"""The plan: JSON both ways, one group for all seeds, ceilings by arithmetic."""

from __future__ import annotations

import json
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from sparsebp_cli.errors import DataError, RecipeError, RunNotFoundError
from sparsebp_cli.plan import Plan, make_plan, reached_share, speedup_limit
from sparsebp_cli.plan.identity import find_data
from sparsebp_cli.plan.plan import find_sources, group_content
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.policy import make_policy
from sparsebp_cli.recipe import load_stored
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import stored_recipe
from sparsebp_cli.source.split import find_splits
from sparsebp_cli.target import make_target


def recipe(**changes: object) -> Recipe:
    values = {"version": 1, "name": "x", "model": {"name": "m"}, "dataset": {"name": "d"}} | changes
    return Recipe.model_validate(values)


def test_a_plan_survives_the_way_through_its_file(tmp_path) -> None:
    plan = Plan(recipe=recipe(policy=[{"name": "topk", "keep": 0.1, "along": "rows"}]))
    assert Plan.load(plan.save(tmp_path)) == plan


def test_what_is_no_plan_is_one_line(tmp_path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    for file in (tmp_path / "plan.json", tmp_path / "absent.json"):
        with pytest.raises(RunNotFoundError) as caught:
            Plan.load(file)
        assert "\n" not in str(caught.value)


def test_runs_that_differ_only_in_seed_name_or_place_are_one_group() -> None:
    base = Plan(recipe=recipe()).group
    same = [{"name": "y"}, {"training": {"seed": 3}}, {"target": {"threads": 1}}, {"tracking": {"experiment": "e"}}]
    other = [{"training": {"max_steps": 3}}, {"policy": [{"name": "topk", "keep": 0.1}]}, {"model": {"name": "n"}}]
    assert {Plan(recipe=recipe(**change)).group for change in same} == {base}
    assert len({base} | {Plan(recipe=recipe(**change)).group for change in other}) == 4


def test_local_paths_become_absolute_beside_the_recipe_first(tmp_path, monkeypatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "data.txt").write_text("x")
    monkeypatch.chdir(here)
    made = make_plan(recipe(dataset={"name": "data.txt"}), there / "r.yaml").recipe
    assert made.dataset.name == str(there / "data.txt")
    (there / "data.txt").unlink()
    assert make_plan(recipe(dataset={"name": "data.txt"}), there / "r.yaml").recipe.dataset.name == str(
        here / "data.txt"
    )
    assert make_plan(recipe(), there / "r.yaml").recipe.model.name == "m"


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.1])
def test_the_ceiling_of_the_whole_backward_is_three_over_one_plus_two_p(share) -> None:
    assert speedup_limit(1.0, 2.0, 2.0 * share) == pytest.approx(3 / (1 + 2 * share))


def test_the_ceiling_refuses_nonsense() -> None:
    for counts in ((-1.0, 1.0, 1.0), (0.0, 0.0, 0.0)):
        with pytest.raises(ValueError, match="FLOP"):
            speedup_limit(*counts)


def test_the_realised_share_is_all_none_or_negative() -> None:
    assert reached_share(3.0, 1.5, 2.0) == pytest.approx(1.0)
    assert reached_share(3.0, 3.0, 2.0) == pytest.approx(0.0)
    assert reached_share(3.0, 3.3, 2.0) < 0
    assert reached_share(3.0, 2.9, 1.0) is None


def test_a_relative_recipe_path_works(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_plan(recipe(), Path("r.yaml")).provenance.recipe_file == "r.yaml"


def test_the_path_of_a_reference_becomes_absolute_and_is_among_the_sources(tmp_path, monkeypatch) -> None:
    (tmp_path / "reference").mkdir()
    monkeypatch.chdir("/")
    policy = [{"name": "rho", "keep": 0.2, "reference": "reference"}]
    one = make_plan(recipe(policy=policy), tmp_path / "r.yaml").recipe
    path = str(tmp_path / "reference")
    assert find_sources(one) == {"model.name": "m", "dataset.name": "d", "policy.0.reference": path}
    assert list(find_data(one)) == [path]


def test_an_installed_name_comes_before_a_folder_of_that_name(tmp_path) -> None:
    for name in ("austen", "austen-llama"):
        (tmp_path / name).mkdir()
    made = make_plan(recipe(model={"name": "austen-llama"}, dataset={"name": "austen"}), tmp_path / "r.yaml").recipe
    assert (made.model.name, made.dataset.name) == ("austen-llama", "austen")


def test_a_plan_of_a_later_version_is_refused_with_the_key_and_both_versions(tmp_path) -> None:
    recipe = {"version": 1, "name": "a", "model": {"name": "m"}, "dataset": {"name": "d"}}
    plan = json.loads(Plan.model_validate({"recipe": recipe}).model_dump_json())
    plan["recipe"]["measure"]["of_tomorrow"] = 3
    plan["provenance"]["sparsebp_version"] = "99.0"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(
        RunNotFoundError, match=r"recipe\.measure\.of_tomorrow: .*; sparsebp 99\.0 made it, but this is sparsebp "
    ):
        Plan.load(tmp_path / "plan.json")


def test_the_group_of_a_plan_is_that_of_earlier_versions() -> None:
    assert Plan(recipe=recipe()).group == "78ffe9d3a123", "a new key? Its default must be null"


def test_the_group_of_a_plan_with_generated_texts_is_that_of_earlier_versions() -> None:
    assert Plan(recipe=recipe(measure={"generate": {}})).group == "e214bdea5c82", "a new key? Its default must be null"


def test_the_group_of_a_plan_with_a_quantised_base_is_that_of_earlier_versions() -> None:
    model = {"name": "m", "lora": {}, "quantization": {"type": "nf4"}}
    assert Plan(recipe=recipe(model=model)).group == "22981ba0b303"


def test_an_option_that_is_gone_stays_in_what_a_group_is_known_by() -> None:
    stored = json.loads(Plan(recipe=recipe(policy=[{"name": "lossless"}])).model_dump_json())["recipe"]
    (entry,) = group_content(load_stored(stored, "plan.json").recipe)["policy"]  # type: ignore[misc, attr-defined]
    assert entry == {"name": "lossless", "labels": True, "padding": True, "prefixes": "share", "verify": "first"}


@pytest.mark.parametrize("path", stored_recipe.GONE)
def test_a_plan_with_the_default_of_a_removed_key_is_read_and_its_seal_is_unchanged(tmp_path, path) -> None:
    plan = Plan(recipe=recipe(model={"name": "m", "lora": {}, "quantization": {"type": "nf4"}}))
    content = json.loads(plan.model_dump_json())
    now = json.loads(plan.model_dump_json())["recipe"]
    *sections, key = path.split(".")
    reduce(getitem, sections, content["recipe"])[key] = stored_recipe.GONE[path]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert Plan.load(tmp_path / "plan.json") == plan
    assert load_stored(content["recipe"], "plan.json").recipe == load_stored(now, "plan.json").recipe
    assert Seal(content["recipe"], {}).changes(Seal(now, {})) == []


def test_the_split_of_a_stored_plan_names_a_removed_key_that_had_an_effect(tmp_path) -> None:
    content = json.loads(Plan(recipe=recipe(model={"name": "m", "lora": {}})).model_dump_json())
    content["recipe"]["dataset"]["weight_column"] = "w"
    content["recipe"]["model"]["lora"]["rank_pattern"] = {"q_proj": 4}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    plan = Plan.load(tmp_path / "plan.json").recipe
    keys = 'dataset.weight_column: "w"', 'model.lora.rank_pattern: {"q_proj": 4}'
    assert plan.dataset.split == "train" + "".join(f", with a key of 0.5, {key}" for key in keys)
    assert load_stored(content["recipe"], "plan.json").recipe.dataset.split == plan.dataset.split
    (tmp_path / "data.jsonl").write_text('{"text": "a b c"}')  # a file has whatever split a recipe names
    section = plan.dataset.model_copy(update={"name": str(tmp_path / "data.jsonl")})
    with pytest.raises(DataError, match="SparseBP compares such a run, but cannot train it again"):
        find_splits(section)


@pytest.mark.parametrize(
    ("kind", "former", "left"),
    [
        ("docker", {"gpu_request": "cdi"}, {}),
        (
            "kubernetes",
            {"backoff_limit": 2, "gpu_resource": "amd.com/gpu", "nodes_as": "jobset", "priority_class": None},
            {},
        ),
        ("slurm", {"qos": None}, {}),
        ("slurm", {"qos": "low", "arguments": ["--nice=1"]}, {"arguments": ["--nice=1", "--qos=low"]}),
        ("of-a-plugin", {"qos": "low"}, {"qos": "low"}),
    ],
)
def test_a_stored_target_is_read_without_removed_options(tmp_path, kind: str, former: dict, left: dict) -> None:
    content = json.loads(Plan(recipe=recipe()).model_dump_json())
    content["recipe"]["target"] = {"kind": kind, **former}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    target = Plan.load(tmp_path / "plan.json").recipe.target
    assert target.options == left
    if kind == "slurm":
        make_target(target)


@pytest.mark.parametrize(("ratio", "group"), [(0.1, "91314ec6e2fa"), (0.0, "78ffe9d3a123"), (None, "2449b87addd0")])
def test_a_stored_ratio_of_the_warmup_becomes_a_fraction(tmp_path, ratio: float | None, group: str) -> None:
    content = json.loads(Plan(recipe=recipe()).model_dump_json())
    content["recipe"]["training"] |= {"warmup_ratio": ratio, "warmup_steps": 5 if ratio is None else 0}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    read = Plan.load(tmp_path / "plan.json")
    assert (read.recipe.training.warmup_steps, read.group) == (5 if ratio is None else ratio, group)


@pytest.mark.parametrize(
    ("former", "now", "group"),
    [
        ({"text_column": "body"}, {"columns": {"text": "body"}}, "d93bd9797b13"),
        (
            {"format": "completion", "prompt_column": "q", "label_column": "unread", "completion_only_loss": False},
            {"columns": {"prompt": "q"}, "train_on": "all"},
            "187c991218d5",
        ),
        (
            {"format": "classification", "text_column": "a", "text_pair_column": "b", "label_column": "kind"},
            {"columns": {"text": ["a", "b"], "label": "kind"}},
            "b8ed195207aa",
        ),
        (
            {"format": "chat", "group_column": "g", "columns": {"user": "q", "assistant": "a"}, "train_on": "last"},
            {"columns": {"user": "q", "assistant": "a", "group": "g"}, "train_on": "last"},
            "fccb0ecdbf97",
        ),
    ],
)
def test_stored_names_of_columns_become_columns_of_the_same_group(
    tmp_path, former: dict, now: dict, group: str
) -> None:
    content = json.loads(Plan(recipe=recipe()).model_dump_json())
    usual = {f"{part}_column": part for part in ("text", "prompt", "completion", "label")}
    usual |= {"text_pair_column": None, "group_column": None, "completion_only_loss": True}
    content["recipe"]["dataset"] |= usual | former
    (tmp_path / "plan.json").write_text(json.dumps(content))
    plan = Plan.load(tmp_path / "plan.json")
    assert {key: getattr(plan.recipe.dataset, key) for key in now} == now
    assert plan.group == group
    assert Seal(content["recipe"], {}).changes(Seal(plan.recipe.model_dump(mode="json"), {})) == []


def test_a_stored_regression_is_read_and_does_not_go_on(tmp_path) -> None:
    content = json.loads(Plan(recipe=recipe()).model_dump_json())
    content["recipe"]["dataset"]["format"] = "regression"
    (tmp_path / "plan.json").write_text(json.dumps(content))
    dataset = Plan.load(tmp_path / "plan.json").recipe.dataset
    assert dataset.split == "train, with a key of 0.5, dataset.format: regression"
    with pytest.raises(DataError, match="SparseBP compares such a run, but cannot train it again"):
        find_splits(dataset)


def test_batches_to_evaluate_become_examples() -> None:
    content = json.loads(Plan(recipe=recipe()).model_dump_json())["recipe"]
    content["measure"] |= {"eval_batches": 3, "eval_examples": None}
    content["training"]["per_device_train_batch_size"] = 4
    content["target"]["processes"] = 2
    measure = stored_recipe.rename_keys(content)["measure"]
    assert measure["eval_examples"] == 24
    assert "eval_batches" not in measure


@pytest.mark.parametrize("timed", [False, True])
def test_a_plan_with_a_removed_key_is_read_and_its_seal_is_unchanged(tmp_path, timed: bool) -> None:
    plan = Plan(recipe=recipe(backward={"execution": "reference"}))
    content = json.loads(plan.model_dump_json())
    content["recipe"]["backward"]["time_forms"] = timed
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert Plan.load(tmp_path / "plan.json") == plan
    now = Seal(json.loads(plan.model_dump_json())["recipe"], {})
    assert Seal(content["recipe"], {}).changes(now) == []


def test_a_plan_that_names_a_tracker_is_read_and_its_seal_is_unchanged(tmp_path) -> None:
    plan = Plan(recipe=recipe())
    content = json.loads(plan.model_dump_json())
    content["recipe"]["tracking"]["also"] = ["tensorboard"]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert Plan.load(tmp_path / "plan.json") == plan
    assert load_stored(content["recipe"], "plan.json").recipe.tracking == plan.recipe.tracking
    assert Seal(content["recipe"], {}).changes(Seal(json.loads(plan.model_dump_json())["recipe"], {})) == []


SCHEDULE = [{"until": 0.5, "policy": [{"name": "dense"}]}, {"policy": [{"name": "topk", "keep": 0.25}]}]


@pytest.mark.parametrize("none", [None, []])
def test_a_plan_without_phases_is_read_and_its_group_and_seal_are_unchanged(tmp_path, none) -> None:
    plan = Plan(recipe=recipe())
    content = json.loads(plan.model_dump_json())
    content["recipe"]["schedule"] = none
    (tmp_path / "plan.json").write_text(json.dumps(content))
    read = Plan.load(tmp_path / "plan.json")
    assert (read, read.group) == (plan, plan.group)
    assert Seal(content["recipe"], {}).changes(Seal(json.loads(plan.model_dump_json())["recipe"], {})) == []


def test_a_plan_with_phases_is_read_as_a_policy_that_no_longer_exists(tmp_path) -> None:
    content = json.loads(Plan(recipe=recipe()).model_dump_json())
    groups = set()
    for until in (0.5, 0.6):
        phases = [SCHEDULE[0] | {"until": until}, SCHEDULE[1]]
        stored = {key: value for key, value in content["recipe"].items() if key != "policy"} | {"schedule": phases}
        (tmp_path / "plan.json").write_text(json.dumps(content | {"recipe": stored}))
        groups.add(Plan.load(tmp_path / "plan.json").group)
        with pytest.raises(
            RecipeError, match=r"policy\.0\.name: policy 'schedule' was removed after version 0.5: give an option"
        ):
            load_stored(stored, "plan.json")
    assert len(groups) == 2
    (tmp_path / "plan.json").write_text(json.dumps(content | {"recipe": stored | {"schedule": [{"policy": [3]}]}}))
    with pytest.raises(RunNotFoundError, match=r"is not a plan for this version: recipe\.schedule"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("former", [{"sites": "branches"}, {"checkpointing": "sparse"}])
def test_a_plan_with_a_removed_value_is_read_as_it_is_and_no_recipe_may_have_it(tmp_path, former) -> None:
    plan = Plan(recipe=recipe(backward={"execution": "reference"}))
    content = json.loads(plan.model_dump_json())
    content["recipe"]["backward"] |= former
    (tmp_path / "plan.json").write_text(json.dumps(content))
    read = Plan.load(tmp_path / "plan.json")
    assert json.loads(read.model_dump_json()) == content
    (change,) = Seal(content["recipe"], {}).changes(Seal(json.loads(plan.model_dump_json())["recipe"], {}))
    assert next(iter(former)) in change.field
    with pytest.raises(RecipeError, match=f"backward.{next(iter(former))}"):
        load_stored(content["recipe"], "plan.json")


@pytest.mark.parametrize("number", [None, 8])
def test_a_plan_that_set_examples_aside_is_read_and_is_another_group(tmp_path, number: int | None) -> None:
    plan = Plan(recipe=recipe())
    content = json.loads(plan.model_dump_json())
    content["recipe"]["dataset"]["policy_validation_examples"] = number
    (tmp_path / "plan.json").write_text(json.dumps(content))
    read = Plan.load(tmp_path / "plan.json")
    assert (read == plan, read.group == plan.group) == (number is None, number is None)
    changes = Seal(content["recipe"], {}).changes(Seal(json.loads(plan.model_dump_json())["recipe"], {}))
    assert [change.field for change in changes] == ([] if number is None else ["dataset.split"])


GONE = {"cache": None, "cache_dtype": "exact", "cache_padding": "keep", "cache_bytes": 2**30}


@pytest.mark.parametrize(
    ("name", "options", "gone", "other"),
    [("lossless", {}, {"padding": True}, {"padding": False}), ("frozen", {"freeze": ["*"]}, GONE, {"cache": "disk"})],
)
def test_an_option_that_is_gone_is_read_where_it_has_the_value_that_is_left(name, options, gone, other) -> None:
    stored = json.loads(Plan(recipe=recipe(policy=[{"name": name, **options, **gone}])).model_dump_json())["recipe"]
    (entry,) = load_stored(stored, "plan.json").recipe.policy
    assert entry.model_dump() == make_policy(name, **options).model_dump(mode="json") | {"name": name}
    assert gone.items() <= entry.model_dump().items()  # so that the ids of groups stay
    stored["policy"][0] |= other
    with pytest.raises(RecipeError, match=rf"policy\.0\.{next(iter(other))}: unknown key"):
        load_stored(stored, "plan.json")


def test_a_plan_of_an_earlier_version_is_read_with_the_keys_of_this_one(tmp_path) -> None:
    plan = Plan(recipe=recipe(backward={"execution": "reference"}))
    file = plan.save(tmp_path)
    assert '"execution":"reference"' in file.read_text().replace(" ", "")
    of_two = file.read_text().replace('"execution"', '"engine"')
    of_five = file.read_text().replace('"execution"', '"time_forms":false,"execution"')
    for text in (of_two, of_five):
        file.write_text(text)
        assert Plan.load(file) == plan
        stored = json.loads(file.read_text())["recipe"]
        assert load_stored(stored, "plan.json").recipe.backward == plan.recipe.backward
