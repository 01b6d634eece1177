"""A case that hangs or kills its process is a result: others are judged, and nothing that it started is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.exactness.judging import HUNG, Pool

HANGS, DIES = 7, 8


def prepare() -> None:
    """Prepare nothing."""


def judge(number: int, folder: str) -> Iterator[int | None]:
    """Judge a number; some hang or die."""
    if number == HANGS:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(folder, "child").write_text(str(child.pid), encoding="utf-8")
        time.sleep(1000)
    if number == DIES:
        os._exit(3)
    yield None
    yield number * 10


def test_a_case_that_hangs_or_dies_is_named_and_the_others_are_judged(tmp_path: Path) -> None:
    pool, numbers, found = Pool(2, prepare, judge, idle_seconds=5), [HANGS, DIES, *range(5)], {}
    while numbers or not pool.is_idle:
        for judging in pool.free[: len(numbers)]:
            judging.ask(numbers.pop(0), str(tmp_path))
        found |= {number: answer for (number, _), answer in pool.listen()}
    assert pool.end() == []
    assert found.pop(HANGS) == HUNG
    assert found.pop(DIES) == "its process died"
    assert found == {number: number * 10 for number in range(5)}
    assert _is_gone(int((tmp_path / "child").read_text(encoding="utf-8")))


def test_the_end_names_a_case_that_is_under_way(tmp_path: Path) -> None:
    pool = Pool(1, prepare, judge)
    while not pool.free:
        list(pool.listen())
    pool.free[0].ask(HANGS, str(tmp_path))
    while not (tmp_path / "child").exists():
        list(pool.listen(0.1))
    assert pool.end() == [(HANGS, str(tmp_path))]


def _is_gone(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"
