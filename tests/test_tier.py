"""The fast tier is what it says: its files are there, and none of them gets by the barrier."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from tests import tier
from tests.tier import HEAVY, Barrier, HeavyImportError, mark_long

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", sorted(HEAVY))
def test_an_import_of_what_is_heavy_fails_at_the_barrier(name: str) -> None:
    with pytest.raises(HeavyImportError, match=f"imports {name}.inside: mark the test `model`"):
        Barrier().find_spec(f"{name}.inside")


def test_the_barrier_lets_others_pass() -> None:
    assert [Barrier().find_spec(name) for name in ("torch", "datasets_of_mine", "sparsebp_cli.source")] == [None] * 3


def test_the_fast_tier_runs_behind_the_barrier(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("fast"):
        pytest.skip("of the fast tier alone")
    assert not sorted(HEAVY & sys.modules.keys())
    with pytest.raises(HeavyImportError):
        importlib.util.find_spec("transformers")


def test_every_pattern_of_the_fast_tier_names_a_file(pytestconfig: pytest.Config) -> None:
    assert [pattern for pattern in pytestconfig.getini("fast_files") if not list(ROOT.glob(pattern))] == []


@pytest.mark.slow
def test_the_files_of_the_fast_tier_are_collected_behind_the_barrier_and_no_others() -> None:
    command = [sys.executable, "-m", "pytest", "--fast", "--collect-only", "-q", "-n", "0", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    folders = {line.split("/")[1] for line in done.stdout.splitlines() if "::" in line}
    assert {"recipe", "backward"} <= folders
    assert not {"worker", "trainer"} & folders


def test_make_gives_an_option_of_ours_its_value_behind_an_equals_sign() -> None:
    lines = [line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "pytest" in line]
    words = [word for line in lines for word in line.split()]
    assert [word for word in words if word.startswith("--trials=")]
    assert "--trials" not in words  # its value would be taken for the tests to run, and no conftest.py be read


def _cases(pytestconfig: pytest.Config, *names: str) -> list[Any]:
    mark = pytest.mark.always("a", "b").mark
    items = [Mock(nodeid=f"tests/test_x.py::test_y[{name}]", config=pytestconfig) for name in names]
    for item in items:
        item.get_closest_marker = lambda name: mark if name == "always" else None
    return items


def test_the_cases_that_always_does_not_name_are_long(pytestconfig: pytest.Config) -> None:
    items = _cases(pytestconfig, "a", "b", "c")
    mark_long(items)
    assert [item.add_marker.call_args_list for item in items] == [[], [], [call(pytest.mark.long)]]


def test_a_case_that_always_names_and_nobody_has_is_an_error(pytestconfig: pytest.Config) -> None:
    with pytest.raises(pytest.UsageError, match=r"cases that do not exist: .*test_y': \['b'\]"):
        mark_long(_cases(pytestconfig, "a", "c"))


def _sample(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, commit: str) -> list[str]:
    monkeypatch.setattr(tier, "find_commit", lambda root: commit)
    files = {"tests/backward/test_x.py": "", "tests/plan/test_x.py": ""}
    files |= dict.fromkeys(("tests/plan/test_s.py", "tests/plan/test_t.py", "tests/plan/test_u.py"), "slow")
    names = {f"{file}::test_{letter}": mark for file, mark in files.items() for letter in "abcdef"}
    items = [Mock(nodeid=f"{name}[{number}]", mark=mark) for name, mark in names.items() for number in range(11)]
    items += [Mock(nodeid="tests/backward/test_x.py::test_row", mark="promise")]
    for item in items:
        item.iter_markers = lambda item=item: [getattr(pytest.mark, item.mark).mark] if item.mark else []
    config = Mock(getini=pytestconfig.getini, rootpath=ROOT)
    tier.sample(config, items)
    assert len(config.hook.pytest_deselected.call_args.kwargs["items"]) + len(items) == 5 * 6 * 11 + 1
    return [item.nodeid for item in items]


def test_each_commit_draws_its_tests_and_every_file_keeps_some(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again, other = (_sample(pytestconfig, monkeypatch, commit) for commit in ("a1", "a1", "b2"))
    assert first == again != other
    for drawn in (first, other):
        files = Counter(name.partition("::")[0] for name in drawn if "[" in name)
        # Four of eleven cases each: a quarter of quick tests of a sampled folder, all elsewhere. A slow file draws a
        # sixth, and the folder keeps that of two files of three.
        assert files["tests/backward/test_x.py"] == 2 * 4
        assert files["tests/plan/test_x.py"] == 6 * 4
        assert sorted(files.values()) == [4, 4, 2 * 4, 6 * 4]
        assert "tests/backward/test_x.py::test_row" in drawn


def test_a_sample_is_drawn_in_folders_that_exist(pytestconfig: pytest.Config) -> None:
    assert all((ROOT / folder).is_dir() for folder in pytestconfig.getini("sampled_folders"))
