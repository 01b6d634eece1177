"""``check_tracker`` lets honest trackers pass, those that ship and one of a package, and names what others break."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from sparsebp_cli.testing import check_tracker
from sparsebp_cli.tracker import TrackedRun
from tests.docs.block import blocks

from .conftest import Install, read_lines, read_tensorboard, read_trackio

pytestmark = pytest.mark.slow


def test_tensorboard_keeps_the_contract() -> None:
    check_tracker("tensorboard", read_tensorboard)


def test_trackio_keeps_the_contract(trackio_folder: object) -> None:
    check_tracker("trackio", read_trackio)


def test_the_tracker_of_the_guide_keeps_the_contract(install: Install) -> None:
    (text,) = (block.text for block in blocks("python") if "LINES = Tracker(Lines)" in block.text)
    install(text, lines="sparsebp_lines:LINES")

    def read(run: TrackedRun) -> Iterator[tuple[str, int, float]]:
        for line in (run.home / "lines" / f"{run.run_id}.jsonl").read_text().splitlines():
            row = json.loads(line)
            yield from ((name, row["step"], value) for name, value in row.items() if name not in {"id", "step"})

    check_tracker("lines", read)


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        ("again", "a second session that is given all again changes nothing: .* are there more than once"),
        ("late", r"write\(\) returns when the records are stored.*: .* are lost"),
        ("newest", "neither repeats: 2 numbers are lost"),
    ],
)
def test_a_tracker_that_breaks_a_promise_is_told_which(install: Install, name: str, promise: str) -> None:
    install(**{name: f"sparsebp_lines:{name}"})
    with pytest.raises(AssertionError, match=promise):
        check_tracker(name, read_lines)
