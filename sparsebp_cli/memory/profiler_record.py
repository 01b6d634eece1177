"""The allocator's record of what ran inside a block, as PyTorch's profiler has it, with notes in between.

The profiler observes: it changes no operator, so a step that is recorded computes the same bits and holds the same
memory. A ``TorchDispatchMode`` does not: under one, autograd adds gradients of a tensor with several uses out of place.
And it does not see what operators take inside themselves. Notes are ranges with a name of their own, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from sparsebp_cli.errors import UsageError
from sparsebp_cli.memory.ledger import Allocation, Event, MemoryLedger, Note, Turn
from sparsebp_cli.memory.storage import plain_tensors
from sparsebp_cli.run.memory import MemoryCurve, Part, Phase

_MARK = "sparsebp::memory::"
_NODE = "autograd::engine::evaluate_function"  # names of PyTorch; tests hold them
_UPDATE = "Optimizer.step#"


class MemoryRecord:
    """Records what a device's allocator does. A context manager; :meth:`take_curve` tells afterwards.

    Args:
        device: Whose allocator: ``cpu``, or ``cuda`` with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_turns = False
        self._profile: profile | None = None

    def __enter__(self) -> MemoryRecord:
        """Begin.

        Returns:
            This.

        Raises:
            UsageError: A profiler is at work already.
        """
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 - no public question
            raise UsageError("memory cannot be traced while a profiler of PyTorch runs: take one of them at a time")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it tells of its own start and end on stderr
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        _mark("start")
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        assert self._profile is not None
        self._profile.__exit__(*error)  # type: ignore[no-untyped-call]

    def note(self, tensor: Tensor, part: Part) -> None:
        """Say what a tensor's storage is for, for the whole of its life.

        Args:
            tensor: On any device; one that wraps others stands for them.
            part: What for.
        """
        for plain in plain_tensors(tensor):
            if plain.device == self._device:
                storage = plain.untyped_storage()
                self.note_block(storage.data_ptr(), storage.nbytes(), part)

    def note_block(self, address: int, num_bytes: int, part: Part | Literal["gone"]) -> None:
        """Say what a block is for.

        Args:
            address: Of a storage; 0 for an empty one, of which nothing is noted.
            num_bytes: Its size.
            part: What for; ``gone`` when it is no more.
        """
        if address and num_bytes:
            _mark(f"{part}::{address}::{num_bytes}")

    def begin(self, phase: Phase) -> None:
        """Say that a phase begins. Where nobody says so, phases are told from what runs.

        Args:
            phase: Which.
        """
        self._has_turns = True
        _mark(f"turn::{phase}")

    def take_curve(self) -> MemoryCurve:
        """Return the live bytes over all that was recorded, and let go of the record, which is large.

        Returns:
            The curve.
        """
        assert self._profile is not None
        assert self._profile.profiler is not None
        entries = _Reader(self._device, told=self._has_turns).read(self._profile.profiler.kineto_results)
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
    """Turns the profiler's tree into events.

    Args:
        device: Whose allocations count.
        told: Whether phases were told; else they are found.
    """

    device: torch.device
    told: bool

    def read(self, results: Any) -> list[Event | int]:
        """Return the events by time; a number is the moment at which the record began."""
        rows = sorted(self._rows(results), key=lambda row: row[0].start_time_ns)
        events: list[Event | int] = []
        phase: Phase = "forward"
        for event, in_node in rows:
            if event.tag.name == "Allocation":
                events += self._allocation(event)
            elif event.name.startswith(_MARK):
                events.append(_parse(event.start_time_ns, event.name.removeprefix(_MARK)))
            elif not self.told and (found := _phase_of(event, in_node=in_node)) not in (None, phase):
                assert found is not None
                phase = found
                events.append(Turn(event.start_time_ns, phase))
        return events

    def _rows(self, results: Any) -> Iterator[tuple[Any, bool]]:
        """Every event of interest, and whether it is inside a node of a backward pass or a step of an optimizer."""
        todo = [(event, False) for event in reversed(results.experimental_event_tree())]
        while todo:
            event, in_node = todo.pop()
            if not self.told or event.tag.name == "Allocation" or event.name.startswith(_MARK):
                yield event, in_node
            inside = in_node or event.name.startswith((_NODE, _UPDATE))
            todo += [(child, inside) for child in reversed(event.children)]

    def _allocation(self, event: Any) -> list[Event | int]:
        fields = event.extra_fields
        same = fields.device.type == self.device.type and self.device.index in (None, fields.device.index)
        return [Allocation(event.start_time_ns, fields.ptr, fields.alloc_size)] if same and fields.ptr else []


def _phase_of(event: Any, *, in_node: bool) -> Phase | None:
    """A backward goes on until an operator runs that autograd will differentiate, or the optimizer's step begins."""
    if event.name.startswith(_UPDATE):
        return "update"
    if in_node or event.tag.name != "TorchOp":
        return None
    if event.name.startswith(_NODE):
        return "backward"
    return "forward" if event.extra_fields.sequence_number >= 0 else None


def _parse(time: int, text: str) -> Event | int:
    kind, *rest = text.split("::")
    if kind == "start":
        return time
    if kind == "turn":
        return Turn(time, rest[0])  # type: ignore[arg-type]  # written above, from a phase
    address, num_bytes = rest
    return Note(time, int(address), int(num_bytes), kind)  # type: ignore[arg-type]  # the same
