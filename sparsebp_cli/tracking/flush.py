"""Send an event log to MLflow. The store ends up with the same table, however often and in whatever pieces it is sent.

- The first value of a (metric, step) counts, as in the event log. MLflow drops a row with identical key, time, step and
  value, so sending it again changes nothing.
- The MLflow run is searched by its tag ``sparsebp.run_id`` before one is created.
- Infinite values are sent as NaN, because MLflow would store 1.8e308, a number that was never measured. The tag
  ``sparsebp.not_finite`` names such metrics, and the event log keeps the sign.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from filelock import FileLock

from sparsebp_cli.errors import SparseBPError, TrackingError
from sparsebp_cli.plan import Plan, content_hash
from sparsebp_cli.run import History, RunFolder, durable, read
from sparsebp_cli.run.budget import LARGEST_SMALL, read_json, size_of
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.run.label import Labels
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking.content import (
    RUN_ID,
    STATUS,
    artifacts,
    clean_name,
    dataset_input,
    find_state,
    parameters,
    run_name,
    tags,
)
from sparsebp_cli.tracking.store import (
    default_uri,
    experiment_id,
    mend_places,
    one_line,
    open_client,
    resolve_uri,
    restore_command,
    sqlite_lock,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


FILE = "tracking.json"
DATASET = "dataset input"  # its key among the parts that were sent; no artifact has this name


@dataclass(frozen=True)
class SyncResult:
    """The result of one synchronisation."""

    points_sent: int = 0  # metric values that the store accepted
    complete: bool = False  # whether the store now has every complete record of the event log
    problem: str = ""  # why it is incomplete, in one line; empty if complete
    uri: str = ""  # the store's address without credentials; empty if unknown
    mlflow_run_id: str = ""  # the run's id there; empty if it was not reached
    is_refused: bool = False  # whether the store's address itself is unusable

    def advice(self, run_id: str) -> str:
        """Return in one line what the store lacks, and how to send it; empty if complete."""
        if self.complete:
            return ""
        send = self.elsewhere(run_id) if self.is_refused else f"`sparsebp sync {run_id}` sends it later"
        return f"{self.problem}; the event log keeps everything, and {send}"

    def elsewhere(self, run_id: str) -> str:
        """Return the command for a run whose address is refused. Such a run can only be sent to another store."""
        return f"`sparsebp sync {run_id} --uri {shlex.quote(default_uri())}` sends it"


class SentPoint(NamedTuple):
    """One metric value, and the byte range of its record in the event log."""

    name: str
    value: float
    time_ms: int
    step: int
    start: int
    end: int


@dataclass
class Sent:
    """What the store already has, kept as ``tracking.json`` in the run's folder. It holds no credentials."""

    uri: str  # the masked address; another store gets everything again
    mlflow_run_id: str = ""  # the run there
    offset: int = 0  # bytes of the event log that were sent
    # hash of each part (tags, status, artifacts by name) as last sent
    described: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, run_folder: Path, uri: str) -> Self:
        """Read the file. A missing, damaged or foreign file means that nothing was sent."""
        try:
            kept = cls(**read_json(run_folder / FILE, LARGEST_SMALL))
        except (OSError, ValueError, TypeError):
            return cls(uri)
        if kept.uri != uri:
            return cls(uri)
        if kept.offset > size_of(run_folder / JOURNAL):
            kept.offset = 0  # another event log was sent
        return kept

    def save(self, run_folder: Path) -> None:
        """Write the file, atomically."""
        durable.write_file(run_folder / FILE, json.dumps(asdict(self)))


def send_again(run_folder: Path) -> None:
    """Record that the event log was replaced: the next send starts at its beginning. The store keeps points once."""
    with FileLock(run_folder / "tracking.lock", timeout=LOCK_SECONDS):
        try:
            kept = Sent(**read_json(run_folder / FILE, LARGEST_SMALL))
        except (OSError, ValueError, TypeError):
            return  # nothing was sent
        kept.offset = 0
        kept.save(run_folder)


BATCH = 1000  # MLflow's limit
LOCK_SECONDS = 60.0


class Flusher:
    """Sends the new part of a run's event log at each :meth:`flush`. Its position is kept in memory and on disk."""

    plan: Plan
    uri: str
    points_sent: int

    def __init__(self, run: RunFolder, uri: str | None = None) -> None:
        """Read the plan, without opening the store. Without ``uri``, the plan or the environment names the store. Raise
        ``TrackingError`` if the store's address cannot be used, ``RunNotFoundError`` if the run has no plan."""
        self.run = run
        self.plan = Plan.load(run.plan_file)
        self.uri = resolve_uri(uri or self.plan.recipe.tracking.uri)
        self.points_sent = 0
        self._client: MlflowClient | None = None
        self._sent = Sent(mask(self.uri))
        self._restart(self._sent)

    def flush(self) -> SyncResult:
        """Send every complete new record, then changed tags, artifacts and status. Raise ``TrackingError`` if the store
        cannot be used; the next call continues after the part that was sent."""
        before = self.points_sent
        if self.run.is_gone():  # locking and opening the store would recreate the folder
            raise TrackingError(f"run {self.run.run_id}: {self.run.describe_move()}")
        try:
            # The local runner and `sparsebp sync` may send the same run at once.
            with FileLock(self.run.path / "tracking.lock", timeout=LOCK_SECONDS):
                client = self._client or open_client(self.uri)
                if self._client is None:
                    mend_places(self.uri)
                    self._client = client
                kept = Sent.load(self.run.path, mask(self.uri))
                if kept.mlflow_run_id != self._sent.mlflow_run_id or kept.offset < self._sent.offset:
                    self._restart(kept)  # this process sent to another MLflow run, or from another event log
                self._sent = kept
                mlflow_run = self._attach(client)
                self._send_points(client)
                self._describe(client, mlflow_run)
        except Exception as error:
            # MLflow does not wrap errors of requests, sqlalchemy and the system, so catch all.
            self._client = None
            raise TrackingError(f"tracking store {mask(self.uri)}: {one_line(error)}") from error
        return SyncResult(self.points_sent - before, True, "", mask(self.uri), self._sent.mlflow_run_id)

    def _restart(self, kept: Sent) -> None:
        self._sent = kept
        self._history, self._read_to, self._last_time = History(), 0, self.plan.created
        self._pending: deque[SentPoint] = deque()

    def _attach(self, client: MlflowClient) -> Run:
        """Find the MLflow run, or create it."""
        from mlflow.entities import ViewType

        found = self._known_run(client)
        if found is None:
            with sqlite_lock(self.uri):
                experiment = experiment_id(client, self.uri, self.plan.recipe.tracking.experiment)
                rule = f"tags.`{RUN_ID}` = '{self.run.run_id}'"
                runs = client.search_runs([experiment], rule, ViewType.ALL, order_by=["attributes.start_time ASC"])
                found = runs[0] if runs else self._create(client, experiment)
            self._restart(Sent(mask(self.uri), found.info.run_id))
            self._sent.save(self.run.path)
        if found.info.lifecycle_stage == "deleted":
            restore = restore_command(self.uri, "runs", f"--run-id {found.info.run_id}")
            raise TrackingError(f"run {found.info.run_id} was deleted in MLflow; `{restore}` restores it")
        return found

    def _known_run(self, client: MlflowClient) -> Run | None:
        from mlflow.exceptions import MlflowException

        if not self._sent.mlflow_run_id:
            return None
        try:
            return client.get_run(self._sent.mlflow_run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # the store was emptied or replaced
                return None
            raise

    def _create(self, client: MlflowClient, experiment: str) -> Run:
        first = next((record["time"] for record, _ in read(self.run.path)), self.plan.created)
        return client.create_run(
            experiment, start_time=int(first * 1000), tags={RUN_ID: self.run.run_id}, run_name=run_name(self.plan)
        )

    def _send_points(self, client: MlflowClient) -> None:
        while self._pending and self._pending[0].end <= self._sent.offset:
            self._pending.popleft()  # another process sent it
        for record, end in read(self.run.path, self._read_to):
            for name, value in self._history.add(record).items():
                if record["kind"] == "metrics" and end > self._sent.offset and isinstance(value, int | float):
                    time_ms = int(record["time"] * 1000)
                    point = SentPoint(clean_name(name), float(value), time_ms, record["step"], self._read_to, end)
                    self._pending.append(point)
            self._read_to, self._last_time = end, record["time"]
            while len(self._pending) >= BATCH:
                self._send_batch(client)
        while self._pending:
            self._send_batch(client)
        if self._sent.offset != self._read_to:
            self._sent.offset = self._read_to
            self._sent.save(self.run.path)

    def _send_batch(self, client: MlflowClient) -> None:
        from mlflow.entities import Metric

        batch = [self._pending[index] for index in range(min(BATCH, len(self._pending)))]
        rows = [Metric(p.name, math.nan if math.isinf(p.value) else p.value, p.time_ms, p.step) for p in batch]
        with sqlite_lock(self.uri):
            # Override MLFLOW_ENABLE_ASYNC_LOGGING: errors must surface here, before the offset moves.
            client.log_batch(self._sent.mlflow_run_id, metrics=rows, synchronous=True)
        for _ in batch:
            self._pending.popleft()
        self.points_sent += len(batch)
        # A partly sent record is sent again as a whole, which changes nothing.
        self._sent.offset = self._pending[0].start if self._pending else batch[-1].end
        self._sent.save(self.run.path)

    def _send_dataset(self, client: MlflowClient) -> None:
        """Send the training data as an input, once. MLflow merges equal inputs."""
        found = dataset_input(self.plan, self._history)
        if found is None or self._sent.described.get(DATASET) == found.dataset.digest:
            return
        with sqlite_lock(self.uri):
            client.log_inputs(self._sent.mlflow_run_id, [found])
        self._sent.described[DATASET] = found.dataset.digest
        self._sent.save(self.run.path)

    def _describe(self, client: MlflowClient, mlflow_run: Run) -> None:
        from mlflow.entities import Param, RunTag

        run_id, state = mlflow_run.info.run_id, find_state(self.run, self._history)
        wanted = tags(self.plan, self._history, state, Labels.load(self.run.path))
        with sqlite_lock(self.uri):
            params = {k: v for k, v in parameters(self.plan).items() if k not in mlflow_run.data.params}
            labels = {k: v for k, v in wanted.items() if mlflow_run.data.tags.get(k, "") != v}
            client.log_batch(
                run_id,
                params=[Param(k, v) for k, v in params.items()],
                tags=[RunTag(k, v) for k, v in labels.items()],
                synchronous=True,
            )
            if state.over:
                ended = int(self._last_time * 1000)
                if (mlflow_run.info.status, mlflow_run.info.end_time) != (STATUS[state], ended):
                    client.set_terminated(run_id, STATUS[state], ended)
            elif mlflow_run.info.status != STATUS[state]:
                client.update_run(run_id, STATUS[state])
        self._send_dataset(client)
        for name, text in artifacts(self.plan, self._history).items():
            digest = content_hash(text)
            if self._sent.described.get(name) != digest:
                client.log_text(run_id, text, name)
                self._sent.described[name] = digest
                self._sent.save(self.run.path)


def sync(run: RunFolder, uri: str | None = None) -> SyncResult:
    """Send the rest of a run's event log to its store. Repeated calls change nothing, and the run may still be running.
    Never raise: report an unusable store as ``problem``."""
    flusher = None
    try:
        flusher = Flusher(run, uri)
        return flusher.flush()
    except SparseBPError as error:
        sent = flusher.points_sent if flusher else 0
        uri = mask(flusher.uri) if flusher else ""
        return SyncResult(sent, False, str(error), uri, is_refused=flusher is None and isinstance(error, TrackingError))


def delete_record(run: RunFolder) -> str:
    """Mark a run as deleted in its store; `mlflow gc` then erases it. Do nothing for a run that was never sent. Return
    why its record stays, in one line; empty if it is deleted."""
    try:
        kept = Sent(**read_json(run.path / FILE, LARGEST_SMALL))
        uri = resolve_uri(Plan.load(run.plan_file).recipe.tracking.uri)
    except (OSError, ValueError, TypeError):
        return ""
    except SparseBPError as error:
        return str(error)
    if not kept.mlflow_run_id:
        return ""
    elsewhere = f"this record is in {kept.uri}, but the run's store is now {mask(uri)}" if kept.uri != mask(uri) else ""
    try:
        client = open_client(uri)
        with sqlite_lock(uri):
            # The address differs if the store was moved; MLflow's ids are unique, so the id suffices.
            if client.get_run(kept.mlflow_run_id).info.lifecycle_stage != "deleted":
                client.delete_run(kept.mlflow_run_id)
    except Exception as error:  # the client raises many kinds of errors
        return elsewhere or one_line(error)
    return ""
