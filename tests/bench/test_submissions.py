"""The submissions that a change brings are found, and one that keeps no rule ends the command with an error."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def submissions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = import_module("submissions")
    monkeypatch.setattr(module, "FOLDER", tmp_path / "deep" / "submissions")
    yield module
    sys.modules.pop("submissions", None)


def submit(folder: Path, name: str, text: str = "task: nothing\n") -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "submission.yaml").write_text(text)


def git(folder: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(folder), *words],
        check=True,
        capture_output=True,
    )


def test_what_a_change_brings_is_found(submissions: ModuleType, tmp_path: Path) -> None:
    folder = submissions.FOLDER
    for name in ("kept", "edited", "removed"):
        submit(folder, name)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "Begin")
    git(tmp_path, "checkout", "-qb", "mine")
    assert submissions.find_changed("main", folder) == []
    submit(folder, "edited", "task: other\n")
    submit(folder, "committed")
    git(tmp_path, "rm", "-rq", "deep/submissions/removed")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "Change")
    submit(folder, "new")
    names = [one.name for one in submissions.find_changed("main", folder)]
    assert names == ["committed", "edited", "new"]
    # A clone without history cannot say what is new, and checks all.
    assert submissions.find_changed("origin/main", folder) == submissions.find_submissions(folder)


def test_one_that_keeps_no_rule_ends_with_an_error(
    submissions: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["submissions.py", "--all"])
    with pytest.raises(SystemExit) as none:
        submissions.main()
    submit(submissions.FOLDER, "mine")
    with pytest.raises(SystemExit) as wrong:
        submissions.main()
    out, err = capfd.readouterr()
    assert (none.value.code, wrong.value.code) == (0, 2)
    assert "submissions: 0 checked, 0 not accepted" in out
    assert "submissions: 1 checked, 1 not accepted" in out
    assert "submission.yaml" in err
