"""A run's folder that takes no more: one line, an exit code that is not 0, and the run goes on when there is room."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.run import History, JournalWriter, RunFolder, State
from sparsebp_cli.worker.checkpoint import CheckpointFolder
from tests.worker.conftest import FORKS, _entry, work

pytestmark = pytest.mark.promise("R3")


def work_with(run: RunFolder, break_it: Any, kind: str) -> int:
    """Run a worker whose disk is full when it writes such a record, or its model."""
    process = FORKS.Process(target=_work_broken, args=(run.plan_file, break_it, kind))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _work_broken(plan_file: Path, break_it: Any, kind: str) -> None:
    break_it(kind)
    _entry(plan_file)


def fill_journal(kind: str) -> None:
    write = JournalWriter.write

    def refuse(self: JournalWriter, what: str, **fields: Any) -> None:
        if what == kind:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, what, **fields)

    JournalWriter.write = refuse  # type: ignore[method-assign]


def fill_journal_and_fail(kind: str) -> None:
    fill_journal(kind)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    CheckpointFolder.save = refuse  # type: ignore[method-assign,assignment]


def fill_at_open(_: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    JournalWriter.__init__ = refuse  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [(fill_journal, "end"), (fill_journal, "metrics"), (fill_journal_and_fail, "end"), (fill_at_open, "")],
)
def test_a_run_whose_end_cannot_be_written_says_so_in_one_line(
    tiny_recipe: Any, prepared: Any, break_it: Any, kind: str
) -> None:
    run = prepared(tiny_recipe(training={"max_steps": 3}, checkpoint={"every": 1}))
    assert work_with(run, break_it, kind) == 1
    said = run.log_file.read_text()
    assert "Traceback" not in said
    assert "the disk is full" in said.splitlines()[-1]
    assert "then resume" in said.splitlines()[-1]
    assert run.state() in {State.FAILED if kind == "metrics" else State.INTERRUPTED, State.QUEUED}
    assert work(run) == 0
    assert run.state() is State.FINISHED
    assert len(History.load(run.path).series("train/loss")) == 3
