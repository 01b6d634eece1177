"""Record the allocator during a block of code with PyTorch's profiler, with inserted notes.

The profiler only observes: it changes no operator, so a recorded step computes the same bits in the same memory. A
``TorchDispatchMode`` would not. Under one, autograd sums gradients of a tensor with several uses out of place, and
allocations inside operators are invisible. Notes are profiler ranges with special names, in the same event sequence.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from sparsebp_cli.errors import UsageError
from sparsebp_tools.memory.curve import PARTS, MemoryCurve, MemoryPoint, MemorySplit, Part, Phase
from sparsebp_tools.memory.storage import plain_tensors


@dataclass(frozen=True)
class Allocation:
    """An allocation or release of a memory block."""

    time: int  # nanoseconds
    address: int
    num_bytes: int  # negative for a release


@dataclass(frozen=True)
class ProfilerNote:
    """A note of a block's purpose. A block without a recorded allocation existed before the step."""

    time: int  # nanoseconds
    address: int
    num_bytes: int
    part: Part | Literal["gone"]  # gone: the block was released


@dataclass(frozen=True)
class PhaseStart:
    """The start of a phase."""

    time: int  # nanoseconds
    phase: Phase


Event = Allocation | ProfilerNote | PhaseStart


@dataclass
class _Block:
    num_bytes: int
    born: int
    part: Part = "workspace"
    died: int | None = None


class MemoryLedger:
    """All blocks of a step that begins at ``start`` (nanoseconds)."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._live: dict[int, _Block] = {}
        self._blocks: list[_Block] = []
        self._phase_starts: list[PhaseStart] = []

    def read(self, events: Iterable[Event]) -> None:
        """Read events in time order."""
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
                case ProfilerNote(part="gone"):
                    self._end(event.address, event.time)
                case ProfilerNote():
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
            if time == self._start:  # merge all blocks from before the step into one point
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

    def _note(self, note: ProfilerNote) -> None:
        assert note.part != "gone"
        block = self._live.get(note.address)
        if block is None:
            block = _Block(note.num_bytes, self._start, note.part)
            self._begin(note.address, block)
        elif PARTS.index(note.part) < PARTS.index(block.part):  # a weight saved for backward stays a weight
            block.part = note.part


_MARK = "sparsebp::memory::"
_NODE = "autograd::engine::evaluate_function"  # PyTorch's names of its events; tests check them
_UPDATE = "Optimizer.step#"


class MemoryRecord:
    """A context manager that records the allocator of a device: ``cpu``, or ``cuda`` with its number."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_phase_marks = False
        self._profile: profile | None = None

    def __enter__(self) -> MemoryRecord:
        """Start recording. Raise :class:`UsageError` if a profiler is already running."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 - no public query
            raise UsageError("memory cannot be traced while a profiler of PyTorch runs: use one at a time")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise kineto logs its start and end to stderr
        # acc_events: without it PyTorch 2.11 warns, from the second profile on, that events are cleared.
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.__enter__()
        _mark("start")
        return self

    def __exit__(self, *error: object) -> None:
        assert self._profile is not None
        self._profile.__exit__(*error)

    def note(self, tensor: Tensor, part: Part) -> None:
        """Record the purpose of a tensor's storage, for its whole lifetime."""
        for plain in plain_tensors(tensor):
            if plain.device == self._device:
                storage = plain.untyped_storage()
                self.note_block(self.find_address(storage), storage.nbytes(), part)

    def note_block(self, address: int, num_bytes: int, part: Part | Literal["gone"]) -> None:
        """Record a block's purpose, or ``gone`` when it is released. Address 0, an empty storage, is ignored."""
        if address and num_bytes:
            _mark(f"{part}::{address}::{num_bytes}")

    def find_address(self, storage: torch.UntypedStorage) -> int:
        """Return the address of a storage; 0 if it is empty."""
        return storage.data_ptr()

    def begin(self, phase: Phase) -> None:
        """Record the start of a phase. Without any such record, phases are inferred from events."""
        self._has_phase_marks = True
        _mark(f"turn::{phase}")

    def take_curve(self) -> MemoryCurve:
        """Return the live bytes over the record, and free the record, which is large."""
        assert self._profile is not None
        assert self._profile.profiler is not None
        entries = _Reader(self._device, has_phase_marks=self._has_phase_marks).read(
            self._profile.profiler.kineto_results
        )
        self._profile = None
        start = next(entry for entry in entries if isinstance(entry, int))
        ledger = MemoryLedger(start)
        ledger.read(entry for entry in entries if not isinstance(entry, int))
        return ledger.curve()


def _mark(name: str) -> None:
    with record_function(_MARK + name):
        pass


@dataclass
class _Reader:
    """Converts the profiler's event tree, whose class is not public."""

    device: torch.device
    has_phase_marks: bool  # whether phases were recorded; otherwise they are inferred

    def read(self, results: Any) -> list[Event | int]:
        """Return the events by time. An integer is the time at which the record begins."""
        rows = sorted(self._rows(results), key=lambda row: row[0].start_time_ns)
        events: list[Event | int] = []
        phase: Phase = "forward"
        for event, in_node in rows:
            if event.tag.name == "Allocation":
                events += self._allocation(event)
            elif event.name.startswith(_MARK):
                events.append(_parse(event.start_time_ns, event.name.removeprefix(_MARK)))
            elif not self.has_phase_marks and (found := _phase_of(event, in_node=in_node)) not in (None, phase):
                assert found is not None
                phase = found
                events.append(PhaseStart(event.start_time_ns, phase))
        return events

    def _rows(self, results: Any) -> Iterator[tuple[Any, bool]]:
        """Yield every relevant event, and whether it is inside a backward node or an optimizer step."""
        todo: list[tuple[Any, bool]] = [(event, False) for event in reversed(results.experimental_event_tree())]
        while todo:
            event, in_node = todo.pop()
            if not self.has_phase_marks or event.tag.name == "Allocation" or event.name.startswith(_MARK):
                yield event, in_node
            inside = in_node or event.name.startswith((_NODE, _UPDATE))
            todo += [(child, inside) for child in reversed(event.children)]

    def _allocation(self, event: Any) -> list[Event | int]:
        fields = event.extra_fields
        same = fields.device.type == self.device.type and self.device.index in (None, fields.device.index)
        return [Allocation(event.start_time_ns, fields.ptr, fields.alloc_size)] if same and fields.ptr else []


def _phase_of(event: Any, *, in_node: bool) -> Phase | None:
    """Return the phase that an event starts, if any. A backward phase lasts until an operator that autograd records, or
    the optimizer's step."""
    if event.name.startswith(_UPDATE):
        return "update"
    if in_node or event.tag.name != "TorchOp":
        return None
    if event.name.startswith(_NODE):
        return "backward"
    return "forward" if event.extra_fields.sequence_number >= 0 else None


_PHASES: dict[str, Phase] = {phase: phase for phase in get_args(Phase)}
_NOTES: dict[str, Part | Literal["gone"]] = {"gone": "gone", **{part: part for part in get_args(Part)}}


def _parse(time: int, text: str) -> Event | int:
    kind, *rest = text.split("::")
    if kind == "start":
        return time
    if kind == "turn":
        return PhaseStart(time, _PHASES[rest[0]])
    address, num_bytes = rest
    return ProfilerNote(time, int(address), int(num_bytes), _NOTES[kind])
