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


def test_names_of_tests_have_at_most_80_characters() -> None:
    names = [
        name
        for folder in (ROOT / "tests", ROOT / "plugins")
        for path in folder.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name) > 80] == []
