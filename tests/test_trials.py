"""Counts of promises are of a commit, and say when the code that they are about has changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trials import COVERED, ROOT, find_digest


@pytest.mark.parametrize("promise", sorted(COVERED))
def test_a_change_of_any_file_that_keeps_a_promise_is_seen(promise: str, tmp_path: Path) -> None:
    for name in COVERED[promise]:
        source, place = ROOT / "sparsebp_cli" / name, tmp_path / "sparsebp_cli" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
    before = find_digest(promise, tmp_path)
    assert before == find_digest(promise)
    for name in COVERED[promise]:
        place = tmp_path / "sparsebp_cli" / name
        file = max(place.rglob("*.py")) if place.is_dir() else place
        file.write_text(file.read_text(encoding="utf-8") + "# another line\n", encoding="utf-8")
        assert find_digest(promise, tmp_path) != before
        before = find_digest(promise, tmp_path)


def test_every_promise_names_its_code() -> None:
    text = (ROOT / "docs" / "reference" / "promises.md").read_text(encoding="utf-8")
    assert {line.split(" ")[1] for line in text.splitlines() if line.startswith("| R")} == set(COVERED)
