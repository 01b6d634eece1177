"""Reconstructs the live bytes of a step, by purpose, from the allocator's record.

A block is the memory at one address between allocation and release. Notes in the record give a block's purpose. A note
applies to the whole life of the block, including the time before: memory that becomes a gradient counts as one while it
is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sparsebp_cli.run.memory import PARTS, MemoryCurve, MemoryPoint, MemorySplit, Part, Phase


@dataclass(frozen=True)
class Allocation:
    """The allocation or release of a block."""

    time: int  # nanoseconds
    address: int
    num_bytes: int  # negative for a release


@dataclass(frozen=True)
class Note:
    """The purpose of a block. A block without an allocation in the record existed before the step."""

    time: int  # nanoseconds
    address: int
    num_bytes: int
    part: Part | Literal["gone"]  # gone: the block was released


@dataclass(frozen=True)
class PhaseStart:
    """The beginning of a phase."""

    time: int  # nanoseconds
    phase: Phase


Event = Allocation | Note | PhaseStart


@dataclass
class _Block:
    num_bytes: int
    born: int
    part: Part = "workspace"
    died: int | None = None


class MemoryLedger:
    """All blocks of a step that begins at ``start``, in nanoseconds."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._live: dict[int, _Block] = {}
        self._blocks: list[_Block] = []
        self._phase_starts: list[PhaseStart] = []

    def read(self, events: Iterable[Event]) -> None:
        """Read events in the order of time."""
        for event in events:
            match event:
                case PhaseStart():
                    self._phase_starts.append(event)
                case Allocation(num_bytes=num_bytes) if num_bytes < 0:
                    self._end(event.address, event.time)
                case Allocation():
                    # Releases of blocks from before the step are not always recorded.
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
        changes.sort(key=lambda change: change[0])  # stable: allocations precede releases at the same time
        live, starts = dict.fromkeys(PARTS, 0), list(reversed(self._phase_starts))
        phase: Phase = "forward"
        points = [MemoryPoint(0.0, "forward", MemorySplit())]
        for time, num_bytes, part in changes:
            while starts and starts[-1].time <= time:
                phase = starts.pop().phase
            live[part] += num_bytes
            point = MemoryPoint((time - self._start) / 1e9, phase, MemorySplit(**live))
            if time == self._start:  # blocks from before the step make one point
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
        elif PARTS.index(note.part) < PARTS.index(block.part):  # a weight saved for the backward stays a weight
            block.part = note.part
