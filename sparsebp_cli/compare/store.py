"""Read runs from an MLflow store, a database or a server: runs of SparseBP and of other programs.

A run of SparseBP has its plan and the rest of its event log as artifacts (``plan.json``, ``history.json``). If
artifacts are out of reach, as for a database that was copied without its folder, the parameters replace the plan. For a
run of another program the parameters are its recipe. If it has several values at a step, the latest counts, as in
MLflow's own list. See :mod:`sparsebp_cli.compare.grouping` for its seed and its group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from sparsebp_cli.compare.choose import RunCandidate
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.stored import REQUESTS_AT_ONCE, Store, StoredMetrics, StoredRun
from sparsebp_cli.composition.backward import STORED
from sparsebp_cli.errors import RunNotFoundError, TrackingError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.loader import rename_in_plan
from sparsebp_cli.recipe.store_address import sqlite_file
from sparsebp_cli.run import History, State
from sparsebp_cli.run.journal import name_cause
from sparsebp_cli.run.record_type import EndRecord
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking import resolve_uri
from sparsebp_cli.tracking.content import RUN_ID, TRIAL, read_labels
from sparsebp_cli.tracking.store import is_server, is_sqlite

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
    if is_sqlite(uri) and not sqlite_file(uri).stat().st_size:
        raise TrackingError(f"tracking store {mask(uri)}: the file is empty")
    store = Store(uri)
    found = [_describe(store, run) for run in store.find_runs()]
    return sorted(found, key=lambda candidate: (candidate.created, candidate.run_id), reverse=True)


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


def _describe(store: Store, run: StoredRun) -> RunCandidate:
    recipe: dict[str, object] = {"name": run.name, "tracking": {"experiment": run.experiment}, **run.params}
    recipe = unflatten(run.params) if RUN_ID in run.tags else recipe
    return RunCandidate(
        run_id=run.tags.get(RUN_ID, run.run_id),
        name=str(recipe.get("name") or run.name or run.run_id),
        created=run.created,
        recipe=recipe,
        tags=run.tags,
        load=lambda: _load_run(store, run, recipe),
        other_id=run.run_id,
        metrics={name: point.value for name, point in run.latest.items()},
        known_state=str(_state(run)),
        place=store.uri,
        stored_labels=read_labels(run.tags),
    )


def _load_run(store: Store, run: StoredRun, recipe: dict[str, object]) -> LoadedRun:
    ours, state, source = RUN_ID in run.tags, _state(run), mask(store.uri)
    history = History(metrics=StoredMetrics(store, run, first_counts=ours))
    if ours:
        _fill(history, store, run)
    if ours and (plan := _make_plan(store, run, recipe)) is not None:
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
    found.steps_logged = max((point.step for point in run.latest.values()), default=0)
    return found


def _fill(history: History, store: Store, run: StoredRun) -> None:
    kept = store.read_artifact(run.run_id, "history.json")
    if kept is None:
        if text := run.tags.get("sparsebp.text"):
            end = EndRecord(kind="end", attempt=1, time=0.0, status=str(_state(run)), step=0, text=text)
            history.ends = [name_cause(end)]
    else:
        history.take(kept)


def _make_plan(store: Store, run: StoredRun, recipe: dict[str, object]) -> Plan | None:
    provenance = {
        "sparsebp_version": run.tags.get("sparsebp.version", ""),
        "git_sha": run.tags.get("mlflow.source.git.commit", ""),
        "recipe_file": run.tags.get("mlflow.source.name", ""),
    }
    restored = {"run_id": run.tags[RUN_ID], "created": run.created, "recipe": recipe, "provenance": provenance}
    for content in filter(None, (store.read_artifact(run.run_id, "plan.json"), restored)):
        try:
            return Plan.model_validate_json(rename_in_plan(json.dumps(content).encode()), context=STORED)
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
