"""The package as a house: imports run in one direction, and no two modules lead back to each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import house

ROOT = Path(house.__file__).parents[1]
GRAPH = house.read_imports(ROOT)
ORDERS = house.read_orders(ROOT)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert house.find_circles(GRAPH) == []


@pytest.mark.parametrize("container", ORDERS)
def test_no_import_runs_against_the_order_of_rooms(container: str) -> None:
    assert house.find_back_arrows(GRAPH, container, ORDERS[container]) == []


def test_the_rooms_of_the_engine_are_those_of_its_order() -> None:
    container = "sparsebp_cli.backward"
    assert house.find_rooms(GRAPH, container).keys() == {room for layer in ORDERS[container] for room in layer}


def test_a_circle_is_found_though_it_is_of_types_alone(tmp_path: Path) -> None:
    room = tmp_path / house.PACKAGE / "room"
    room.mkdir(parents=True)
    (room / "first.py").write_text("if TYPE_CHECKING:\n    from sparsebp_cli.room.second import B\n")
    (room / "second.py").write_text("def load():\n    from sparsebp_cli.room import first\n")
    (room / "third.py").write_text("import sparsebp_cli.room.second\n")
    circle = [f"{house.PACKAGE}.room.{name}" for name in ("first", "second")]
    assert house.find_circles(house.read_imports(tmp_path)) == [circle]


def test_an_arrow_against_the_order_is_found() -> None:
    graph = {"p.low.a": frozenset({"p.high.b"}), "p.high.b": frozenset[str](), "p.high.c": frozenset({"p.low.a"})}
    assert house.find_back_arrows(graph, "p", [["high"], ["low"]]) == [("low", "high")]


def test_counts_tell_code_from_docstrings_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text('"""Says.\n\nMore."""\n\n# Why.\nx: Any = 1  # noqa: X1\ny = "# noqa"\n')
    assert house.measure([path]) == house.Size(files=1, code=2, comments=1, any=1, noqa=1)


def test_the_top_of_the_core_has_at_most_twenty_entries() -> None:
    entries = {path.name for path in (ROOT / house.PACKAGE).iterdir()} - {"__pycache__"}
    assert len(entries) <= 20, sorted(entries)


def test_every_file_of_the_core_belongs_to_a_feature() -> None:
    features, _ = house.read_features(ROOT)
    entries = [entry for feature in features for entry in feature.files]
    assert [entry for entry in entries if not (ROOT / house.PACKAGE / entry).exists()] == []
    assert sorted(set(entries)) == sorted(entries)
    assert [one.name for one in features if not (ROOT / "recipes" / f"{one.recipe}.yaml").is_file()] == []
    assert [one.name for one in features if not (ROOT / "docs" / one.page).is_file()] == []
    lines = house.count_features(ROOT)
    assert "" not in lines
    assert [name for name, count in lines.items() if not count] == []


def test_the_core_does_not_grow() -> None:
    _, most = house.read_features(ROOT)
    lines = sum(house.count_features(ROOT).values())
    assert lines <= most, "delete elsewhere, or raise most_lines in features.yaml and say why in a comment there"


def test_the_sizes_of_the_project_stay_within_their_limits() -> None:
    goals = house.measure_goals(ROOT)
    assert [name for name, (size, most) in goals.items() if size > most] == ["hops of a lossless batch"]
    assert 0 not in {size for name, (size, _) in goals.items() if name != "class names with several homes"}


def test_recipe_keys_of_sections_count_each_and_a_policy_as_one() -> None:
    keys = house.find_keys(ROOT)
    assert {"name", "model.lora.r", "measure.generate.every", "policy", "target"} <= set(keys)
    assert not {"model", "model.lora"} & set(keys)


def test_names_of_tests_have_at_most_80_characters() -> None:
    names = [
        name
        for folder in (ROOT / "tests", ROOT / "plugins")
        for path in folder.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name) > 80] == []


# Texts of other programs, paths and addresses, which have no other form: each with whose it is.
FOREIGN = {
    "already in use": "docker's output",
    "response from daemon": "docker's output",
    "model name": "/proc/cpuinfo",
    "allocate memory": "torch's error",
    "timed out": "errors of torch.distributed",
    "wait timeout": "errors of torch.distributed",
    "test worker: slow from step": "what the worker of a test prints, as the logs of a target give it back",
    "lower half": "the name of a case of a benchmark, given on its command line",
}
PATHS = {  # files that take a path or an address apart at a slash
    "sparsebp_cli/cli/completion.py",
    "sparsebp_cli/errors.py",
    "sparsebp_cli/recipe/json_schema.py",
    "sparsebp_cli/recipe/schema.py",
    "sparsebp_cli/run/visible.py",
    "sparsebp_cli/source/name.py",
    "sparsebp_cli/cli/starter/shipped.py",
    "sparsebp_cli/tracking/content.py",
}


def test_no_sentence_of_our_own_is_read_back_as_data() -> None:
    found = house.find_read_sentences(ROOT)
    assert [one for one in found if one[2] not in FOREIGN and not (one[2] == "/" and one[0] in PATHS)] == []
    assert {text for _, _, text in found} >= set(FOREIGN)  # what is allowed is there


def test_a_sentence_that_is_read_back_is_found(tmp_path: Path) -> None:
    room = tmp_path / house.PACKAGE / "room"
    room.mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    lines = [
        'x = text.startswith(("exact", "no difference in "))',
        'y = key.partition("/")',
        'z = " is worse " in first',
    ]
    (room / "first.py").write_text("\n".join([*lines, 'ok = "a b" in ("a b", "c")', 'fine = name.startswith("cuda")']))
    texts = [text for _, _, text in house.find_read_sentences(tmp_path)]
    assert texts == ["no difference in ", "/", " is worse "]
