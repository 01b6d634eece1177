"""Write TensorBoard's event file for each run, which ``tensorboard --logdir`` shows.

The file is a function of the event log: every byte follows from the plan and the ordered records, not from a clock or a
process. So a session only appends what the file lacks. It completes a write that a kill interrupted, and skips records
that are already there. TensorBoard reads a growing file; it could not follow a replaced one.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.errors import TrackingError
from sparsebp_cli.tracker import TrackedRecord, TrackedRun, Tracker

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

FOLDER = "SPARSEBP_TENSORBOARD"  # environment variable: the folder for --logdir
SHOWN = ("info", "warning", "error")  # levels of notes


class TensorBoardSession:
    """Append to one run's event file what it lacks."""

    place: str

    def __init__(self, run: TrackedRun) -> None:
        """Find the file; the first write creates it."""
        chosen = os.environ.get(FOLDER)
        folder = Path(chosen).expanduser() if chosen else run.home / "tensorboard"
        # TensorBoard names a run by its folder, and recognises the file by a part of its name.
        self._file = folder / run.title / f"events.out.tfevents.{int(run.created)}.sparsebp"
        self.place = str(folder)
        self._position = 0  # file position after the last given record
        self._head = list(_describe(run))

    def write(self, records: Sequence[TrackedRecord]) -> None:
        """Add the events of some records."""
        events = [*self._head, *(event for record in records for event in _make_events(record))]
        part = _encode(events)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()
        with self._file.open("r+b") as file:
            if file.seek(0, os.SEEK_END) < self._position:
                raise TrackingError(f"{self._file} was truncated or removed, and will be written again")
            file.seek(self._position)
            there = file.read(len(part))
            if not part.startswith(there):  # of another journal
                there = b""
                file.truncate(self._position)
            file.seek(self._position + len(there))
            file.write(part[len(there) :])
        self._position += len(part)
        self._head = []

    def close(self) -> None:
        """Do nothing: a session holds nothing between writes."""


def _describe(run: TrackedRun) -> Iterator[Event]:
    """Yield the events at the start of a file."""
    from tensorboard.compat.proto.event_pb2 import Event

    yield Event(wall_time=run.created, file_version="brain.Event:2")
    recipe = json.dumps(run.recipe, indent=1, sort_keys=True)
    yield Event(wall_time=run.created, step=0, summary=_say("recipe", f"```\n{recipe}\n```"))


def _make_events(record: TrackedRecord) -> Iterator[Event]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    content, summary = record.content, None
    if record.metrics:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=one) for tag, one in record.metrics.items()])
    elif record.kind == "note" and content["level"] in SHOWN:
        summary = _say("notes", f"{content['level']}: {content['text']}")
    elif record.kind == "end":
        summary = _say("end", f"{content['status']} {content['text']}")
    if summary is not None:
        yield Event(wall_time=record.time, step=record.step, summary=summary)


def _say(tag: str, text: str) -> Summary:
    """Return a Markdown text for the page of texts."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def _encode(events: Sequence[Event]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    found = io.BytesIO()
    writer = RecordWriter(found)
    for event in events:
        writer.write(event.SerializeToString(deterministic=True))
    return found.getvalue()


TENSORBOARD = Tracker(TensorBoardSession, package="tensorboard", install="sparsebp-tools[tensorboard]")
