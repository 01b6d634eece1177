"""The page of states and faults names every state, commands that exist, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import house
from sparsebp_cli.cli.app import VERBS
from sparsebp_cli.run import State

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/faults.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]
PACKAGES = [ROOT / folder for folder in house.PACKAGES]
SOURCE = "\n".join(file.read_text(encoding="utf-8") for folder in PACKAGES for file in folder.rglob("*.py"))


def test_every_state_of_a_run_has_a_row() -> None:
    assert {re.findall("`(.+?)`", row)[0] for row in ROWS} >= {str(state) for state in State}


def test_the_commands_of_the_page_exist() -> None:
    known = {verb.__name__ for verbs in VERBS.values() for verb in verbs}
    assert set(re.findall("`sparsebp ([a-z]+)", PAGE)) <= known


def test_every_row_names_tests_that_exist() -> None:
    assert len(ROWS) > 15
    for row in ROWS:
        named = re.findall(r"`(tests/\S+?\.py)`", row)
        assert named, row
        assert all((ROOT / name).is_file() for name in named), row


def test_the_lines_of_the_page_are_in_the_code() -> None:
    lines = [text for row in ROWS[len(State) :] for text in re.findall("`(.+?)`", row.split("|")[1])]
    for line in lines:
        parts = [part for part in re.split(r"step-\.\.\.|plan\.json |there-journal\.jsonl", line) if part.strip()]
        assert all(part.strip() in SOURCE for part in parts), line
