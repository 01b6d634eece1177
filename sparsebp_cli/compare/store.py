"""Read runs from an MLflow store, a database or a server: runs of SparseBP and of other programs.

A run of SparseBP has its plan and the rest of its event log as artifacts (``plan.json``, ``history.json``). If
artifacts are out of reach, as for a database that was copied without its folder, the parameters replace the plan. For a
run of another program the parameters are its recipe. If it has several values at a step, the latest counts, as in
MLflow's own list. See :mod:`sparsebp_cli.compare.grouping` for its seed and its group.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparsebp_cli.compare.choose import RunCandidate
from sparsebp_cli.compare.database import REQUESTS_AT_ONCE, ClientSource, Database
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.stored import Batch, Point, Source, StoredMetrics, StoredRun
from sparsebp_cli.composition.backward import STORED
from sparsebp_cli.errors import RunNotFoundError, TrackingError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.store_address import sqlite_file
from sparsebp_cli.run import History, State
from sparsebp_cli.run.journal import name_cause
from sparsebp_cli.run.record_type import EndRecord
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking import resolve_uri
from sparsebp_cli.tracking.content import RUN_ID, TRIAL, read_labels
from sparsebp_cli.tracking.store import is_server, is_sqlite, one_line

STATES = {
    "SCHEDULED": State.QUEUED,
    "RUNNING": State.RUNNING,
    "FINISHED": State.FINISHED,
    "FAILED": State.FAILED,
    "KILLED": State.INTERRUPTED,
}


def store_candidates(uri: str) -> list[RunCandidate]:
    """Return every run of a store, newest first, without reading any metric's history. Raise ``TrackingError`` if the
    address cannot be used or the store does not answer."""
    uri = resolve_uri(uri)
    if is_sqlite(uri) and not sqlite_file(uri).is_file():
        raise TrackingError(f"tracking store {mask(uri)}: there is no such file")
    if is_sqlite(uri) and not sqlite_file(uri).stat().st_size:  # MLflow would create tables, but reading must not write
        raise TrackingError(f"tracking store {mask(uri)}: the file is empty")
    store = _Store(uri)
    found = [store.describe(run) for run in store.find_runs()]
    return sorted(found, key=lambda candidate: (candidate.created, candidate.run_id), reverse=True)


def _writable(uri: str) -> str:
    """Return an address that MLflow can open with a lock: for a read-only file, a copy's address."""
    if not is_sqlite(uri):
        return uri
    file = sqlite_file(uri)
    # SQLite writes a journal beside the file, so the folder must be writable too.
    if all(os.access(path, os.W_OK) for path in (file, file.parent)):
        return uri
    folder = Path(tempfile.mkdtemp(prefix="sparsebp-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Copy SQLite's log too, if any: only it has the newest values.
    for path in (file, file.with_name(f"{file.name}-wal")):
        if path.exists():
            shutil.copyfile(path, folder / path.name)
    return f"sqlite:///{folder / file.name}"


def load_all(candidates: Sequence[RunCandidate]) -> tuple[list[LoadedRun], list[str]]:
    """Read the chosen runs, from a server concurrently. Return those that can be read, and a line for each other run.
    Raise ``RunNotFoundError`` if none can be read, ``TrackingError`` if the store stopped answering."""
    if any(is_server(candidate.place) for candidate in candidates):
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:  # reads only artifacts; metrics are read on first use
            read = list(pool.map(_load, candidates))
    else:
        read = list(map(_load, candidates))
    loaded = [run for run in read if isinstance(run, LoadedRun)]
    problems = [(one.run_id, error) for one, error in zip(candidates, read, strict=True) if isinstance(error, str)]
    if problems and not loaded:
        raise RunNotFoundError("; ".join(f"run {run_id} cannot be read: {error}" for run_id, error in problems))
    return loaded, [f"run {run_id} is left out: {error}" for run_id, error in problems]


def _load(candidate: RunCandidate) -> LoadedRun | str:
    """Return the run, or the reason why this version cannot read its plan."""
    try:
        return candidate.loaded
    except RunNotFoundError as error:
        return str(error)


class _Store:
    """A store, whose errors become one line that names it."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._source: Source = ClientSource(uri)
        self._batch = Batch(self._find_series)

    def find_runs(self) -> Sequence[StoredRun]:
        try:
            readable = _writable(self._uri)
            self._source = client = ClientSource(readable)
            if is_sqlite(readable) and (database := Database(sqlite_file(readable), client.read_artifact)).is_known():
                self._source = database
            return self._source.find_runs()
        except Exception as error:  # errors of MLflow, requests, sqlalchemy and the system
            raise self._error(error) from error

    def _find_series(self, name: str, run_ids: Sequence[str]) -> Mapping[str, Sequence[Point]]:
        try:
            return self._source.find_series(name, run_ids)
        except Exception as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> TrackingError:
        return TrackingError(f"tracking store {mask(self._uri)}: {one_line(error)}")

    def describe(self, run: StoredRun) -> RunCandidate:
        recipe: dict[str, object] = {"name": run.name, "tracking": {"experiment": run.experiment}, **run.params}
        recipe = unflatten(run.params) if RUN_ID in run.tags else recipe
        return RunCandidate(
            run_id=run.tags.get(RUN_ID, run.run_id),
            name=str(recipe.get("name") or run.name or run.run_id),
            created=run.created,
            recipe=recipe,
            tags=run.tags,
            load=lambda: self._load(run, recipe),
            other_id=run.run_id,
            metrics={name: row.value for name, row in run.latest.items()},
            known_state=str(_state(run)),
            place=self._uri,
            stored_labels=read_labels(run.tags),
        )

    def _load(self, run: StoredRun, recipe: dict[str, object]) -> LoadedRun:
        ours, state, source = RUN_ID in run.tags, _state(run), mask(self._uri)
        history = History(metrics=StoredMetrics(self._batch, run, first_counts=ours))
        if ours:
            self._fill(history, run)
        if ours and (plan := self._plan(run, recipe)) is not None:
            found = LoadedRun.of_plan(plan, history, state, source)
        else:
            found = LoadedRun(
                run_id=run.tags.get(RUN_ID, run.run_id),
                name=str(recipe.get("name") or run.run_id),
                seed=None,
                group="",
                recipe=recipe,
                created=run.created,
                history=history,
                state=state,
                git_sha=run.tags.get("mlflow.source.git.commit", ""),
                source=source,
            )
        found.sequential = TRIAL in run.tags
        found.steps_logged = max((row.step for row in run.latest.values()), default=0)
        return found

    def _fill(self, history: History, run: StoredRun) -> None:
        kept = self._source.read_artifact(run, "history.json")
        if kept is None:
            if text := run.tags.get("sparsebp.text"):
                end = EndRecord(kind="end", attempt=1, time=0.0, status=str(_state(run)), step=0, text=text)
                history.ends = [name_cause(end)]
        else:
            history.take(kept)

    def _plan(self, run: StoredRun, recipe: dict[str, object]) -> Plan | None:
        provenance = {
            "sparsebp_version": run.tags.get("sparsebp.version", ""),
            "git_sha": run.tags.get("mlflow.source.git.commit", ""),
            "recipe_file": run.tags.get("mlflow.source.name", ""),
        }
        restored = {
            "run_id": run.tags[RUN_ID],
            "created": run.created,
            "recipe": recipe,
            "provenance": provenance,
        }
        for content in filter(None, (self._source.read_artifact(run, "plan.json"), restored)):
            try:
                return Plan.model_validate_json(json.dumps(content), context=STORED)
            except ValueError:  # from another version, or with a parameter that MLflow truncated
                continue
        return None


def _state(run: StoredRun) -> State:
    state = run.tags.get("sparsebp.state", "")
    return State(state) if state in set(State) else STATES.get(run.status, State.RUNNING)


def unflatten(params: Mapping[str, str]) -> dict[str, object]:
    """Return a recipe from the dotted parameters that ``tracking`` sent. Text that looks like a number becomes one."""
    root: dict[str, object] = {}
    for path, text in params.items():
        *parents, last = path.split(".")
        place = root
        for part in parents:
            below = place.setdefault(part, {})
            if not isinstance(below, dict):
                break
            place = below
        place[last] = _value(text)
    found = _lists(root)
    return found if isinstance(found, dict) else {}


def _value(text: str) -> object:
    try:
        # Only Python's JSON reads NaN and Infinity as numbers; keep them as text.
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def _lists(value: object) -> object:
    if not isinstance(value, dict):
        return value
    children = {key: _lists(child) for key, child in value.items()}
    if children and all(key.isdecimal() for key in children):
        return [children[key] for key in sorted(children, key=int)]
    return children
