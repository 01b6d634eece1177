"""Which bytes are live when, and what for: from the allocator's own record of a step.

A block is what the allocator gives out at one address until it takes it back. Notes in the record say what a block is
for; a note counts for the whole life of the block, also for the time before it: what becomes a gradient is one while
it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sparsebp_cli.run.memory import PARTS, MemoryCurve, MemoryPoint, MemorySplit, Part, Phase


@dataclass(frozen=True)
class Allocation:
    """The allocator gave out a block, or took it back.

    Args:
        time: In nanoseconds.
        address: Of the block.
        num_bytes: Its size; negative when it is taken back.
    """

    time: int
    address: int
    num_bytes: int


@dataclass(frozen=True)
class Note:
    """What a block is for. One of which the allocator has not told was there before the step.

    Args:
        time: In nanoseconds.
        address: Of the block.
        num_bytes: Its size.
        part: What for; ``gone`` when it is no more.
    """

    time: int
    address: int
    num_bytes: int
    part: Part | Literal["gone"]


@dataclass(frozen=True)
class Turn:
    """A phase begins.

    Args:
        time: In nanoseconds.
        phase: Which.
    """

    time: int
    phase: Phase


Event = Allocation | Note | Turn


@dataclass
class _Block:
    num_bytes: int
    born: int
    part: Part = "workspace"
    died: int | None = None


class MemoryLedger:
    """All blocks of a step."""

    def __init__(self, start: int) -> None:
        """Begin with none.

        Args:
            start: When the step begins, in nanoseconds.
        """
        self._start = start
        self._live: dict[int, _Block] = {}
        self._blocks: list[_Block] = []
        self._turns: list[Turn] = []

    def read(self, events: Iterable[Event]) -> None:
        """Take events in.

        Args:
            events: In the order of time.
        """
        for event in events:
            match event:
                case Turn():
                    self._turns.append(event)
                case Allocation(num_bytes=num_bytes) if num_bytes < 0:
                    self._end(event.address, event.time)
                case Allocation():
                    # A block of before the step may have gone without a word.
                    self._end(event.address, event.time)
                    self._begin(event.address, _Block(event.num_bytes, event.time))
                case Note(part="gone"):
                    self._end(event.address, event.time)
                case Note():
                    self._note(event)

    def curve(self) -> MemoryCurve:
        """Return the live bytes from the first moment to the last."""
        changes = [(block.born, block.num_bytes, block.part) for block in self._blocks]
        changes += [(block.died, -block.num_bytes, block.part) for block in self._blocks if block.died is not None]
        changes.sort(key=lambda change: change[0])  # births stand before deaths of the same moment
        live, turns = dict.fromkeys(PARTS, 0), list(reversed(self._turns))
        phase: Phase = "forward"
        points = [MemoryPoint(0.0, "forward", MemorySplit())]
        for time, num_bytes, part in changes:
            while turns and turns[-1].time <= time:
                phase = turns.pop().phase
            live[part] += num_bytes
            point = MemoryPoint((time - self._start) / 1e9, phase, MemorySplit(**live))
            if time == self._start:  # what was there is there at once
                points.clear()
            points.append(point)
        return MemoryCurve(tuple(points))

    def _begin(self, address: int, block: _Block) -> None:
        self._live[address] = block
        self._blocks.append(block)

    def _end(self, address: int, time: int) -> None:
        block = self._live.pop(address, None)
        if block is not None:
            block.died = time

    def _note(self, note: Note) -> None:
        assert note.part != "gone"
        block = self._live.get(note.address)
        if block is None:
            block = _Block(note.num_bytes, self._start, note.part)
            self._begin(note.address, block)
        elif PARTS.index(note.part) < PARTS.index(block.part):  # a weight that is saved stays a weight
            block.part = note.part
