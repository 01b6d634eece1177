"""A client whose output is closed, full or unread: the verb does its work all the same, and lost output is told."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsebp_cli.cli.app import main
from sparsebp_cli.run import State, list_runs

from .conftest import FAKE, Write, environment, write_run

VERBS: dict[str, tuple[str, ...]] = {
    "runs": (), "show": ("@last",), "compare": ("@2",), "logs": ("@last",),
    "recipes": (), "models": (), "datasets": (), "policies": (), "targets": (), "schema": (), "validate": ("r.yaml",),
    "run": ("r.yaml", "--dry-run"), "export": ("r.yaml", "-f", "sbatch"), "tag": ("@last", "seen"),
    "archive": ("@last", "--to", "a.tar.gz"), "prune": (), "rm": ("@last", "--yes"),
    "sync": ("@last",), "cancel": ("@last",), "resume": ("@last",), "init": ("folder", "--task", "text"), "nosuch": (),
}  # fmt: skip
SILENT = {"sync", "nosuch"}  # they print on standard error alone here


class Stream:
    """A standard output of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> io.TextIOWrapper | None:
        if self.kind == "closed":
            return None
        if self.kind == "full":
            self.stream = Path("/dev/full").open("w", encoding="utf-8")
        else:
            reader, writer = os.pipe()
            os.close(reader)
            self.stream = os.fdopen(writer, "w", encoding="utf-8")
        return self.stream

    def __exit__(self, *_: object) -> None:
        if self.kind != "closed":
            self.stream.close()


@pytest.fixture
def folder(write_recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(write_recipe().read_text())
    write_run(write_recipe(name="one"))
    write_run(write_recipe(name="two"), "policy=dense")
    return tmp_path


@pytest.mark.parametrize("kind", ["closed", "full", "unread"])
def test_every_verb_ends_as_it_would_with_an_output_or_says_that_it_was_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for verb, words in VERBS.items():
        codes = {}
        for given in ("whole", kind):
            errors = io.StringIO()
            with monkeypatch.context() as patch, Stream(given) as stream:
                patch.setattr(sys, "argv", ["sparsebp", verb, *words])
                patch.setattr(sys, "stdout", io.StringIO() if given == "whole" else stream)
                patch.setattr(sys, "stderr", errors)
                if given == "whole" and verb in {"rm", "archive", "init"}:
                    codes[given] = 0
                    continue
                with pytest.raises(SystemExit) as end:
                    main()
            codes[given] = end.value.code or 0
        said = errors.getvalue()
        assert "Traceback" not in said, (verb, said)
        if kind == "full" and verb not in SILENT:
            assert codes[kind] == (codes["whole"] or 100), (verb, said)
            assert (
                "warning: the output cannot be written any more (No space left on device): further output is lost"
                in said
            )
        else:
            assert codes[kind] == codes["whole"], (verb, said)
    assert (folder / "a.tar.gz").exists()
    assert len(list_runs()) == 1


@pytest.mark.parametrize(("redirection", "code"), [("> /dev/full", 100), (">&- 2>&-", 0), ("| head -1", 0)])
def test_a_run_is_followed_to_its_end_without_an_output(
    write_recipe: Write, tmp_path: Path, redirection: str, code: int
) -> None:
    line = f"set -o pipefail; {' '.join(FAKE)} run {write_recipe()} {redirection}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, env=environment(), cwd=tmp_path
    )
    assert done.returncode == code, done.stderr
    assert [run.state() for run in list_runs()] == [State.FINISHED]
    assert ("the command goes on" in done.stderr) == (code == 100)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
