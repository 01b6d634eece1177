"""A column is a list of numbers, however much of it lies in the file."""

from __future__ import annotations

import os
import random
from bisect import bisect_left

import pytest

from sparsebp_cli.run import History, column
from sparsebp_cli.run.column import Column


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of eight numbers, two of them in memory, in a file of this test."""
    monkeypatch.setattr(column, "BLOCK", 8)
    monkeypatch.setattr(column, "MOST_RECENT", 2)
    monkeypatch.setattr(column, "_file", None)


@pytest.mark.parametrize("code", ["q", "d"])
def test_a_column_is_what_a_list_would_be(code: str) -> None:
    chance = random.Random(code)
    for _ in range(40):
        found, plain = Column[float](code), list[float]()
        for _ in range(chance.randrange(200)):
            number = chance.randrange(1000)
            if chance.random() < 0.3:
                place = chance.randrange(len(plain) + 1)
                found.insert(place, number)
                plain.insert(place, number)
            else:
                found.append(number)
                plain.append(number)
        assert list(found) == plain
        assert [found[place] for place in range(-len(plain), len(plain))] == [*plain, *plain]
        assert list(found[3:50:7]) == plain[3:50:7]
        assert len(found) == len(plain)
        with pytest.raises(IndexError):
            found[len(plain)]
        with pytest.raises(IndexError):
            found[-len(plain) - 1]


def test_a_copy_does_not_change_with_its_original() -> None:
    first = Column[int]("q", range(100))
    second = first.copy()
    first.insert(10, -1)
    second.append(7)
    assert list(second) == [*range(100), 7]
    assert list(first) == [*range(10), -1, *range(10, 100)]


def test_places_in_the_file_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(50):
        assert sum(Column[int]("q", range(800))) == sum(range(800))
    assert column._file is not None
    assert column._file._end <= 110 * 8 * 8  # of a hundred blocks at once, and the two that were read last


def test_a_full_disk_leaves_the_numbers_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    assert list(Column[int]("q", range(100))) == list(range(100))
    monkeypatch.setattr(column, "_file", None)
    monkeypatch.setattr(column.tempfile, "TemporaryFile", refuse)
    assert list(Column[int]("q", range(100))) == list(range(100))


def test_a_child_process_writes_into_no_file_of_its_parent() -> None:
    ours = Column[int]("q", range(100))
    child = os.fork()
    if not child:  # what it makes would lie where the parent's next blocks lie
        fine = list(Column[int]("q", range(1000, 2000))) == list(range(1000, 2000)) and list(ours) == list(range(100))
        os._exit(not fine)
    more = Column[int]("q", range(5000, 6000))
    assert os.waitpid(child, 0)[1] == 0
    assert (list(ours), list(more)) == (list(range(100)), list(range(5000, 6000)))


def test_a_history_in_the_file_is_read_as_one_in_memory() -> None:
    history, plain = History(), dict[int, tuple[float, float]]()
    chance = random.Random(0)
    for number in range(400):
        step = chance.choice([number, number, number + 1000, chance.randrange(500)])
        record = {"kind": "metrics", "attempt": 1, "time": float(number), "step": step, "values": {"a": float(number)}}
        history.add(record)  # type: ignore[arg-type]
        plain.setdefault(step, (float(number), float(number)))
    assert list(history.metrics["a"].items()) == sorted(plain.items())
    assert bisect_left(list(history.series("a")), 250) == sum(step < 250 for step in plain)
