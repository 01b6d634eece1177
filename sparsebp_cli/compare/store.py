"""Reads runs back from an MLflow store, a database or a server: those that SparseBP sent, and anybody else's.

A run of ours has its plan and what its journal says beside metrics as artifacts (``plan.json``, ``history.json``).
Where artifacts are out of reach, such as a database that was copied without its folder, the parameters stand in for
the plan.
Of somebody else's run the parameters are its recipe, all but a seed decide its group, and its metrics are as they are.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebp_cli.compare.choose import Candidate
from sparsebp_cli.compare.loaded import SEED, LoadedRun
from sparsebp_cli.compare.parameter import unflatten
from sparsebp_cli.errors import TrackingError
from sparsebp_cli.plan import Plan, content_hash
from sparsebp_cli.run import History, State
from sparsebp_cli.tracking import mask, resolve_uri
from sparsebp_cli.tracking.content import RUN_ID
from sparsebp_cli.tracking.store import open_client
from sparsebp_cli.tracking.uri import is_server, is_sqlite, one_line, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PAGE = 1000  # runs a query, MLflow's limit is 50,000
AT_ONCE = 8  # runs read from a server side by side
STATES = {
    "SCHEDULED": State.QUEUED,
    "RUNNING": State.RUNNING,
    "FINISHED": State.FINISHED,
    "FAILED": State.FAILED,
    "KILLED": State.INTERRUPTED,
}


def store_candidates(uri: str) -> list[Candidate]:
    """Return every run of a store, newest first. One query a thousand runs; no metric's history is read yet.

    Args:
        uri: A database or a server.

    Returns:
        The runs.

    Raises:
        TrackingError: The address cannot be used, or the store does not answer.
    """
    uri = resolve_uri(uri)
    if is_sqlite(uri) and not sqlite_file(uri).is_file():
        raise TrackingError(f"tracking store {mask(uri)}: there is no such file")
    if is_sqlite(uri) and not sqlite_file(uri).stat().st_size:  # MLflow would fill it, and reading changes nothing
        raise TrackingError(f"tracking store {mask(uri)}: the file is empty")
    try:
        client = open_client(_writable(uri))
        experiments = {e.experiment_id: e.name for e in _all_experiments(client)}
        runs = list(_all_runs(client, list(experiments)))
    except Exception as error:  # MLflow's own errors, those of requests, of sqlalchemy and of the system
        raise TrackingError(f"tracking store {mask(uri)}: {one_line(error)}") from error
    found = [_describe(client, uri, run, str(experiments[run.info.experiment_id])) for run in runs]
    return sorted(found, key=lambda candidate: (candidate.created, candidate.run_id), reverse=True)


def _writable(uri: str) -> str:
    """Return the address of what MLflow can open, for it locks and may write: of a read-only file, a copy's."""
    if not is_sqlite(uri):
        return uri
    file = sqlite_file(uri)
    if all(os.access(path, os.W_OK) for path in (file, file.parent)):
        return uri
    folder = Path(tempfile.mkdtemp(prefix="sparsebp-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for path in (file, file.with_name(f"{file.name}-wal")):
        if path.exists():
            shutil.copyfile(path, folder / path.name)
    return f"sqlite:///{folder / file.name}"


def load_all(candidates: Sequence[Candidate]) -> list[LoadedRun]:
    """Read runs, those of a server side by side.

    Args:
        candidates: Chosen runs.

    Returns:
        Them, in the same order.

    Raises:
        TrackingError: The store stopped answering.
    """
    if not any(is_server(candidate.place) for candidate in candidates):
        return [candidate.loaded for candidate in candidates]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda candidate: candidate.loaded, candidates))


def _all_experiments(client: MlflowClient) -> Iterator[Any]:
    page = None
    while True:
        found = client.search_experiments(max_results=PAGE, page_token=page)
        yield from found
        page = found.token
        if not page:
            return


def _all_runs(client: MlflowClient, experiments: list[str]) -> Iterator[Run]:
    page = None
    while experiments:
        found = client.search_runs(experiments, max_results=PAGE, page_token=page)
        yield from found
        page = found.token
        if not page:
            return


def _describe(client: MlflowClient, uri: str, run: Run, experiment: str) -> Candidate:
    params, tags, info = dict(run.data.params), dict(run.data.tags), run.info
    ours = RUN_ID in tags
    recipe = unflatten(params) if ours else {"name": info.run_name, "tracking": {"experiment": experiment}, **params}
    return Candidate(
        run_id=tags.get(RUN_ID, info.run_id),
        name=str(recipe.get("name") or info.run_name or info.run_id),
        created=(info.start_time or 0) / 1000,
        recipe=recipe,
        tags=tags,
        load=lambda: _load(client, uri, run, recipe),
        other_id=info.run_id,
        metrics=dict(run.data.metrics),
        known_state=str(_state(run)),
        place=uri,
    )


def _state(run: Run) -> State:
    told = run.data.tags.get("sparsebp.state", "")
    return State(told) if told in set(State) else STATES.get(run.info.status, State.RUNNING)


def _load(client: MlflowClient, uri: str, run: Run, recipe: dict[str, Any]) -> LoadedRun:
    try:
        history = _history(client, run)
        plan = _plan(client, run, recipe) if RUN_ID in run.data.tags else None
    except Exception as error:
        raise TrackingError(f"tracking store {mask(uri)}: {one_line(error)}") from error
    state, source = _state(run), mask(uri)
    if plan is not None:
        return LoadedRun.of_plan(plan, history, state, source)
    kept = {key: value for key, value in recipe.items() if not SEED.search(key) and key not in {"name", "tracking"}}
    seeds = [value for key, value in recipe.items() if SEED.search(key)]
    return LoadedRun(
        run_id=run.data.tags.get(RUN_ID, run.info.run_id),
        name=str(recipe.get("name") or run.info.run_id),
        seed=next((int(seed) for seed in seeds if str(seed).isdecimal()), None),
        group=content_hash([run.info.experiment_id, kept or recipe.get("name")]),
        recipe=recipe,
        created=(run.info.start_time or 0) / 1000,
        history=history,
        state=state,
        git_sha=run.data.tags.get("mlflow.source.git.commit", ""),
        source=source,
    )


def _history(client: MlflowClient, run: Run) -> History:
    history = History()
    for name in run.data.metrics:
        points: dict[int, tuple[float, float]] = {}
        for point in client.get_metric_history(run.info.run_id, name):
            points.setdefault(point.step, (point.timestamp / 1000, float(point.value)))
        history.metrics[name] = points
    kept = _artifact(client, run, "history.json") if RUN_ID in run.data.tags else None
    if kept is not None:
        history.facts, history.environments = kept["facts"], kept["environments"]
        history.ends = kept["ends"]
        history.notes = [(attempt, level, text) for attempt, level, text in kept["notes"]]
        history.warm = [(attempt, step) for attempt, step in kept["warm"]]
        history.layers = {int(step): values for step, values in kept["layers"].items()}
        history.examples = {int(step): values for step, values in kept["examples"].items()}
        history.test_examples = {int(step): values for step, values in kept.get("test_examples", {}).items()}
    elif text := run.data.tags.get("sparsebp.text"):
        history.ends = [{"text": text}]
    return history


def _plan(client: MlflowClient, run: Run, recipe: dict[str, Any]) -> Plan | None:
    kept = _artifact(client, run, "plan.json")
    provenance = {
        "sparsebp_version": run.data.tags.get("sparsebp.version", ""),
        "git_sha": run.data.tags.get("mlflow.source.git.commit", ""),
        "recipe_file": run.data.tags.get("mlflow.source.name", ""),
    }
    told = {
        "run_id": run.data.tags[RUN_ID],
        "created": (run.info.start_time or 0) / 1000,
        "recipe": recipe,
        "provenance": provenance,
    }
    for content in filter(None, (kept, told)):
        try:
            return Plan.model_validate_json(json.dumps(content))
        except ValueError:  # of another version, or a parameter that MLflow cut: what it says still stands
            continue
    return None


def _artifact(client: MlflowClient, run: Run, name: str) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            content = json.loads(Path(client.download_artifacts(run.info.run_id, name, folder)).read_bytes())
        except Exception:  # it was never sent, or its folder is elsewhere
            return None
    return content if isinstance(content, dict) else None
