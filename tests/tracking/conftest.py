"""Real stores: a sqlite database made once, and MLflow's own server in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.run import RunFolder
from tests.tracking.material import write_run
from tests.tracking.server import Server

MakeRun = Callable[..., RunFolder]


@pytest.fixture
def store(fresh_database: Path, home_folder: Path) -> Path:
    """The default store of this test, initialised."""
    home_folder.mkdir()
    return Path(shutil.copy(fresh_database, home_folder / "mlflow.db"))


@pytest.fixture
def make_run(home_folder: Path) -> MakeRun:
    """A function that makes a run with a plan and a journal of some steps."""

    def make(steps: int = 30, *, end: str | None = "finished", **more: Any) -> RunFolder:
        return write_run(steps, end=end, **more)

    return make


@pytest.fixture
def server(tmp_path: Path, fresh_database: Path) -> Iterator[Server]:
    """A server that is running."""
    found = Server(tmp_path / "server", fresh_database)
    try:
        found.start()
        yield found
    finally:
        found.kill()
