"""Child interpreters run nothing of the working folder, and workers get the variables that are declared."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sparsebp_cli.run import interpreter


@pytest.mark.parametrize("entries", ["", ".", ":/srv/x", "/srv/x::relative", "../up"])
def test_no_entry_of_the_path_of_children_is_the_working_folder(monkeypatch: pytest.MonkeyPatch, entries: str) -> None:
    monkeypatch.setenv("PYTHONPATH", entries)
    found = interpreter.environment({"A": "b"})
    kept = ["/srv/x"] if "/srv/x" in entries else []
    assert found.get("PYTHONPATH", "").split(os.pathsep) == (kept or [""])
    assert (found["A"], found["PYTHONSAFEPATH"]) == ("b", "1")


def test_a_child_takes_no_module_from_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("")
    command = interpreter.command("-c", "import trap")
    done = subprocess.run(command, cwd=tmp_path, env={}, check=False, capture_output=True, text=True)
    assert "No module named 'trap'" in done.stderr


def test_an_environment_without_a_path_of_modules_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "PYTHONPATH" not in interpreter.environment()


def test_a_worker_gets_what_is_declared_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "1", "HOME": "/h", "OMP_NUM_THREADS": "2"})
    assert interpreter.worker_environment({"RANK": "0", "MINE": "x"}) == {
        "HOME": "/h", "OMP_NUM_THREADS": "2", "RANK": "0", "MINE": "x", "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    assert "RANK" not in interpreter.worker_environment()


def test_a_worker_on_a_cluster_keeps_what_is_declared_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"RANK": "1", "HOME": "/h", "TOKEN": "t", "SET": "s", "EXPORTED": "e", "CHANGED": "by setup"}
    monkeypatch.setattr(os, "environ", found)
    interpreter.keep_declared({"SET": "s", "CHANGED": "c", "NEW": "n"}, ["TOKEN"], ["cd /x; export EXPORTED=e", "true"])
    assert found == {
        "HOME": "/h", "TOKEN": "t", "SET": "s", "EXPORTED": "e", "CHANGED": "by setup", "NEW": "n",
    }  # fmt: skip


def test_values_of_variables_that_change_numbers_are_told_and_of_others_the_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"HF_TOKEN": "canary", "MKL_CBWR": "X", "HOME": "/h", "RANK": "1"})
    assert interpreter.describe_variables() == {"variables": {"MKL_CBWR": "X"}, "other_variables": "HF_TOKEN HOME"}
