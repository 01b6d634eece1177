"""Columns of numbers that keep full blocks in a temporary file, so that a reader's memory does not grow with a run."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, overload

Number = TypeVar("Number", int, float)

BLOCK = 8192  # numbers in a full block: 64 KiB
MOST_RECENT = 64  # full blocks kept in memory over all columns: 4 MiB


class Column(Sequence[Number]):
    """A growing sequence of numbers. Full blocks are in the file, the rest is in memory."""

    def __init__(self, code: str, numbers: Iterable[Number] = ()) -> None:
        """Start with some numbers. ``code`` is their array type: q for int, d for float."""
        self._blocks: list[_Block[Number]] = []
        self._starts: list[int] = []  # index of the first number of each block
        self._rest: array[Number] = array(code)
        self._rest_start = 0
        self.extend(numbers)

    def __len__(self) -> int:
        return self._rest_start + len(self._rest)

    @overload
    def __getitem__(self, place: int) -> Number: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Number]: ...

    def __getitem__(self, place: int | slice) -> Number | Sequence[Number]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if place < 0:
            place += len(self)
        if place >= self._rest_start:
            return self._rest[place - self._rest_start]
        if place < 0:
            raise IndexError(place)
        number = bisect_right(self._starts, place) - 1
        return self._read(number)[place - self._starts[number]]

    def __iter__(self) -> Iterator[Number]:
        for number in range(len(self._blocks)):
            yield from self._read(number)
        yield from self._rest

    def append(self, number: Number) -> None:
        self._rest.append(number)
        if len(self._rest) >= BLOCK:
            self._put_away()

    def extend(self, numbers: Iterable[Number]) -> None:
        for number in numbers:
            self.append(number)

    def insert(self, place: int, number: Number) -> None:
        """Insert a number before index ``place``."""
        if place >= self._rest_start:
            self._rest.insert(place - self._rest_start, number)
            if len(self._rest) >= BLOCK:
                self._put_away()
            return
        at = bisect_right(self._starts, place) - 1
        numbers, start = self._read(at)[:], self._starts[at]
        numbers.insert(place - start, number)
        middle = len(numbers) // 2 if len(numbers) > BLOCK else 0
        parts = [numbers[:middle], numbers[middle:]] if middle else [numbers]
        self._blocks[at : at + 1] = [_Block(part) for part in parts]
        self._starts[at + 1 :] = [one + 1 for one in self._starts[at + 1 :]]
        if middle:
            self._starts.insert(at + 1, start + middle)
        self._rest_start += 1

    def copy(self) -> Column[Number]:
        """Return a copy that shares the full blocks, which never change."""
        found: Column[Number] = Column(self._rest.typecode)
        found._blocks, found._starts = self._blocks[:], self._starts[:]
        found._rest, found._rest_start = self._rest[:], self._rest_start
        return found

    def _put_away(self) -> None:
        self._blocks.append(_Block(self._rest))
        self._starts.append(self._rest_start)
        self._rest_start += len(self._rest)
        self._rest = array(self._rest.typecode)

    def _read(self, number: int) -> array[Number]:
        return self._blocks[number].read()


class _File:
    """An unnamed temporary file. Freed blocks are reused, so it grows only with the data held at once."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed with this object, or at the end
        weakref.finalize(self, self._file.close)
        self._free: list[int] = []
        self._end = 0

    def write(self, content: bytes) -> int:
        """Write at most one block and return its offset. Raise ``OSError`` if the disk is full."""
        try:
            place = self._free.pop()
        except IndexError:
            place, self._end = self._end, self._end + BLOCK * 8
        try:
            written = os.pwrite(self._file.fileno(), content, place)
            if written < len(content):
                raise OSError("a part was written")
        except OSError:
            self._free.append(place)
            raise
        return place

    def read(self, place: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, place)

    def give_back(self, place: int) -> None:
        """Free the block at an offset for reuse."""
        self._free.append(place)


_lock = threading.RLock()
_file: _File | None = None
_recent: OrderedDict[_Block[Any], array[Any]] = OrderedDict()  # most recently read last


def _forget_file() -> None:
    global _file, _lock
    _file, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget_file)


class _Block(Generic[Number]):
    """An immutable block of numbers, kept in the file; in memory if the file cannot be written."""

    __slots__ = ("_code", "_file", "_held", "_place", "_size")

    def __init__(self, numbers: array[Number]) -> None:
        global _file  # noqa: PLW0603 - created with the first block
        self._code, self._size = numbers.typecode, len(numbers) * numbers.itemsize
        self._file: _File | None = None
        self._held: array[Number] | None = numbers
        with _lock, suppress(OSError):
            _file = _file or _File()
            self._place = _file.write(numbers.tobytes())
            self._file, self._held = _file, None

    def read(self) -> array[Number]:
        """Return the numbers. The caller must not change them."""
        if self._held is not None:
            return self._held
        with _lock:
            found: array[Number] | None = _recent.pop(self, None)
            if found is None:
                assert self._file is not None
                found = array(self._code)
                found.frombytes(self._file.read(self._place, self._size))
            _recent[self] = found
            if len(_recent) > MOST_RECENT:
                _recent.popitem(last=False)
        return found

    def __del__(self) -> None:
        with suppress(AttributeError, TypeError):  # globals may be gone when the interpreter exits
            if self._file is not None:
                self._file.give_back(self._place)
