"""The guide on using a model: every block of it, from top to bottom, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.block import ROOT

PAGE = (ROOT / "docs" / "guide" / "use.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:`([\w-]+\.yaml)`[^`]*?)?```(yaml|console|python)\n(.*?)```", re.DOTALL)
MENTIONED = re.compile(r"`(sparsebp [^`]+)`")


def execute(folder: Path, *words: str) -> str:
    program = Path(sys.executable).with_name(words[0])
    done = subprocess.run(
        [str(program) if program.exists() else words[0], *words[1:]],
        cwd=folder,
        env=os.environ | {"SPARSEBP_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_guide_on_using_a_model_runs_from_top_to_bottom(tmp_path: Path) -> None:
    programs, printed = [], []
    for name, language, text in BLOCK.findall(PAGE):
        if language == "yaml":
            (tmp_path / name).write_text(text)
        elif language == "python":
            programs.append(text)
        else:
            printed += [execute(tmp_path, *shlex.split(line[2:])) for line in text.splitlines()]
    asked = execute(tmp_path, "python", "-c", "".join(programs)).splitlines()  # the second goes on from the first
    assert asked[0].startswith("It is a truth ")
    assert 0.0 < float(asked[-1]) < 10.0
    assert (tmp_path / "at-best" / "README.md").is_file()
    run_id = re.search(r"use the model: sparsebp model (\w+)", printed[0])
    assert run_id is not None  # the last line of the summary is the command
    assert f"of run {run_id[1]}" in printed[1]
    for row in re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE):
        for file in re.findall(r"`(\S+)`", row):
            assert (tmp_path / "mine" / file).is_file(), file
