"""Kills a worker at a random moment, and says what must not depend on it."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.run.metric import METRICS
from tests.worker.conftest import start, work


def outcome(run: RunFolder) -> dict[str, Any]:
    """Return the digests of the trained model and the newest checkpoint, and every metric that is not a time."""
    history = History.load(run.path)
    table = {name: history.series(name) for name in history.metrics if not METRICS[name].timing}
    newest = max((run.path / "checkpoints").glob("step-*"))
    files = [file for folder in (run.path / "model", newest) for file in sorted(folder.rglob("*"))]
    digests = {file.name: _digest(file) for file in files if file.suffix in {".safetensors", ".json"}}
    digests.pop("manifest.json", None)  # names the time of day in none of its fields, but the digests of the others
    return {"files": digests, "table": table}


def difference(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Name the files and metrics in which two outcomes differ."""
    return [
        f"{part} {name}"
        for part in expected
        for name in sorted(expected[part].keys() | found[part].keys())
        if expected[part].get(name) != found[part].get(name)
    ]


def resume_killed(recipe: Recipe, prepared: Callable[[Recipe], RunFolder], after: Sequence[int] = (4,)) -> RunFolder:
    """Train a recipe left alone, and again with a kill after each of so many steps; assert that both end alike.

    Returns:
        The run that was left alone.
    """
    straight, killed = prepared(recipe), prepared(recipe)
    assert work(straight) == 0, (straight.path / "worker.log").read_text()
    for steps in after:
        process = start(killed)
        while process.is_alive() and len(History.load(killed.path).series("train/loss")) <= steps:
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert work(killed) == 0, (killed.path / "worker.log").read_text()
    found = difference(outcome(straight), outcome(killed))
    assert not found, found[:9]
    return straight


def kill_at_random(run: RunFolder, chance: random.Random, longest: int = 12) -> bool | None:
    """Start or resume the worker and kill it: inside a save, or after a random number of steps.

    Args:
        run: Folder with a plan.
        chance: Generator that decides on the moment.
        longest: Steps that it may make before it is killed outside of a save.

    Returns:
        Whether it died inside a save; None where it had finished first.
    """
    checkpoints = run.path / "checkpoints"
    process = start(run)
    if chance.random() < 0.4:
        _wait(process, lambda: _is_saving(checkpoints))
        time.sleep(chance.random() * 0.004)
    else:
        journal = run.path / "journal.jsonl"
        begin = journal.stat().st_size if journal.exists() else 0
        steps = chance.randrange(0, longest)
        _wait(process, lambda: _count_steps(journal, begin) > steps)
        time.sleep(chance.random() * 0.02)
    finished = not process.is_alive()
    if not finished:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return None if finished else _is_saving(checkpoints)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _is_saving(checkpoints: Path) -> bool:
    return any(checkpoints.glob(".part-*"))


def _count_steps(journal: Path, begin: int) -> int:
    """Count the optimizer steps that a journal has gained, without parsing it: polling must cost the worker nothing."""
    if not journal.exists():
        return 0
    with journal.open("rb") as opened:
        opened.seek(begin)
        return opened.read().count(b'"train/loss"')


def _wait(process: Any, what: Callable[[], bool]) -> None:
    while process.is_alive() and not what():
        time.sleep(0.002)
