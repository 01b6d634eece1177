"""Runs with a journal, and what TensorBoard and trackio themselves read of what they were given."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.run import RunFolder
from sparsebp_cli.tracker import TrackedRun
from tests.tracking.material import write_run

MakeRun = Callable[..., RunFolder]
Install = Callable[..., None]

# An honest tracker of a package that is not ours, and three others. The first keeps a line for each number, by its id.
PLUGIN = """
import json
from pathlib import Path
from sparsebp_cli.tracker import Tracker

class Lines:
    ids = True
    def __init__(self, run):
        self.file = run.home / f"{run.run_id}.lines"
        self.place = str(self.file)
    def write(self, records):
        old = self.file.read_text() if self.file.exists() else ""
        old = old[: old.rfind("\\n") + 1]  # without the line that a kill has cut
        known = {json.loads(line)[0] for line in old.splitlines()} if self.ids else set()
        new = [[one.id, one.step, one.metrics] for one in records if one.metrics and one.id not in known]
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(old + "".join(json.dumps(each) + "\\n" for each in new))
        part.replace(self.file)
    def close(self):
        pass

class Again(Lines):
    ids = False

class Late(Lines):
    def __init__(self, run):
        super().__init__(run)
        self.kept = []
    def write(self, records):
        self.kept += records
    def close(self):
        super().write(self.kept)

class Newest(Lines):
    def write(self, records):
        file = self.file.with_suffix(".newest")
        newest = int(file.read_text()) if file.exists() else 0
        super().write([one for one in records if one.step > newest])
        file.write_text(str(max([newest, *(one.step for one in records)])))

class Down(Lines):
    def write(self, records):
        raise ConnectionError("http://me:CANARY@tracker does not answer")

class Hung(Lines):
    def write(self, records):
        import threading
        threading.Event().wait()

lines, again, late, newest, down, hung = map(Tracker, (Lines, Again, Late, Newest, Down, Hung))
lacking = Tracker(Lines, package="nothing_of_this_name", install="lines[all]")
wrong = Lines
"""


@pytest.fixture
def make_run(home_folder: Path) -> MakeRun:
    """A function that makes a run with a plan and a journal of some steps."""

    def make(steps: int = 3, *, end: str | None = "finished", **tracking: Any) -> RunFolder:
        return write_run(steps, end=end, tracking=tracking)

    return make


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that installs a package of trackers, here and for child processes."""

    def install(text: str = PLUGIN, **entries: str) -> None:
        folder = tmp_path / "packages"
        info = folder / "sparsebp_lines-0.1.0.dist-info"
        info.mkdir(parents=True)
        (folder / "sparsebp_lines.py").write_text(text)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sparsebp-lines\nVersion: 0.1.0\n")
        rows = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[sparsebp.trackers]\n{rows}")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder))
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, "sparsebp_lines", raising=False)

    return install


@pytest.fixture
def trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of trackio's databases. It reads its environment when it is imported, which trl may have done."""
    folder = tmp_path / "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(folder))  # for child processes
    importlib.import_module("trackio.sqlite_storage")
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", folder)
    return folder


def read_lines(run: TrackedRun) -> Iterator[tuple[str, int, float]]:
    """Yield the numbers that the honest tracker has of a run."""
    import json

    file = run.home / f"{run.run_id}.lines"
    for line in file.read_text().splitlines() if file.exists() else ():
        _, step, metrics = json.loads(line)
        yield from ((name, step, value) for name, value in metrics.items())


def load_events(run: TrackedRun) -> Any:
    """Return what TensorBoard's own reader has of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.home / "tensorboard" / run.title), size_guidance={"scalars": 0, "tensors": 0})
    return found.Reload()


def read_tensorboard(run: TrackedRun) -> Iterator[tuple[str, int, float]]:
    """Yield the numbers that TensorBoard's own reader finds of a run."""
    events = load_events(run)
    for tag in events.Tags()["scalars"]:
        yield from ((tag, event.step, event.value) for event in events.Scalars(tag))


def read_trackio(run: TrackedRun) -> Iterator[tuple[str, int, float]]:
    """Yield the numbers that trackio's own store returns of a run."""
    from trackio.sqlite_storage import SQLiteStorage

    for row in SQLiteStorage.get_logs(run.experiment, run.title, run_id=run.run_id):
        for name, value in row.items():
            if name not in {"timestamp", "step"}:
                yield name, row["step"], float(value)
