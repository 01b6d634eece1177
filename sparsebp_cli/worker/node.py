"""Connect the launchers of a run on several nodes: each knows whether the others live, and why their ranks ended.

They meet in a store that the first node's launcher serves. The ranks meet there too, so that no rank must outlive the
others. Each launcher counts seconds in the store. A node that stops counting is lost. A launcher whose run is over
elsewhere kills its own ranks, because they may wait much longer for a lost node's ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sparsebp_cli.errors import DataError, RunFailedError
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import durable
from sparsebp_cli.worker.process import CODE_FILE, NodePlace
from sparsebp_cli.worker.rank import Reason

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

BEAT_SECONDS = 0.5
LOST_SECONDS = 60.0  # without a sign of life from a node
GRACE_SECONDS = 30.0  # for ranks that should have ended by themselves
LEAVE_SECONDS = 10.0  # for the other launchers to read how the run ended
LOST_CODE = 4  # the worker's exit code if a node is lost
TOKEN = ".node-"  # prefix of a file by which the other nodes recognise the run's folder


class NodeGroup:
    """All launchers of a run, as seen by this one."""

    place: NodePlace
    grace_seconds: float

    def __init__(self, place: NodePlace, options: TargetOptions, run_folder: Path) -> None:
        """Meet the other launchers. Raise DataError on the first node if its port is taken, on the others if the first
        one does not answer within ``target.peer_timeout_min``."""
        self.place, self._count, self._folder = place, options.nodes, run_folder
        self._per_node = options.processes // options.nodes
        self._minutes, self._patience = options.peer_timeout_min, timedelta(minutes=options.peer_timeout_min)
        self._lost_seconds = min(LOST_SECONDS, self._patience.total_seconds())
        self.grace_seconds = min(GRACE_SECONDS, self._patience.total_seconds())
        self._store = self._connect(serves=place.node == 0)
        self._started = time.monotonic()
        self._seen: dict[int, float] = {}  # time of each node's last sign of life
        self._hosts: dict[int, str] = {}
        self._ends: dict[int, Reason | None] = {}
        self._over: int | None = None
        self._is_cut = False  # the connection to the store broke
        self._left = threading.Event()
        self._peers = range(1, self._count) if place.node == 0 else range(1)
        self._store.set(f"host/{place.node}", socket.gethostname())
        # Use a separate connection: on a shared one, a waiting get would block the signs of life.
        threading.Thread(target=self._beat, args=(self._connect(),), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self.place.node == 0:
            for file in self._folder.glob(f"{TOKEN}*"):
                file.unlink(missing_ok=True)

    def check_folder(self) -> None:
        """Raise DataError if the run's folder on this node is not the first node's folder."""
        if self.place.node == 0:
            for stale in self._folder.glob(f"{TOKEN}*"):
                stale.unlink(missing_ok=True)
            token = secrets.token_hex(8)
            (self._folder / f"{TOKEN}{token}").touch()
            self._store.set("token", token)
            return
        file = self._folder / f"{TOKEN}{self._store.get('token').decode()}"
        deadline = time.monotonic() + self.grace_seconds  # a network file system shows a new file late
        while not file.exists():
            if time.monotonic() > deadline:
                raise unshared(self.place, self._folder)
            time.sleep(BEAT_SECONDS)

    def is_over(self) -> bool:
        """Whether the run has ended elsewhere, so that this node's ranks wait in vain."""
        if self.place.node == 0:
            return any(self._is_lost(node) or self._ends.get(node) is not None for node in self._peers)
        return self._over is not None or 0 in self._ends or self._is_lost(0)

    def find_cause(self, own: Reason | None) -> Reason | None:
        """Wait for the other nodes' ends, and return the first cause of a failure. ``own`` is this node's reason."""
        self._store.set("end/0", _write(own))
        deadline = time.monotonic() + self.grace_seconds + self._lost_seconds
        while time.monotonic() < deadline and any(not self._is_gone(node) for node in self._peers):
            if own is not None and not own.is_echo and not all(node in self._seen for node in self._peers):
                break  # it has not started, and will read the end when it does
            time.sleep(BEAT_SECONDS)
        told = [reason for reason in (own, *self._ends.values()) if reason is not None]
        lost = [self._describe_lost(node) for node in self._peers if node not in self._ends and self._is_lost(node)]
        causes = sorted((reason for reason in told if not reason.is_echo), key=lambda reason: reason.time)
        return next(iter([*causes, *lost, *told]), None)

    def finish(self, code: int) -> None:
        """On the first node: tell the others the run's exit code, and wait until they have read it."""
        if file := os.environ.get(CODE_FILE):
            durable.write_file(Path(file), str(code))
        self._store.set("over", str(code))
        deadline = time.monotonic() + LEAVE_SECONDS
        # The store lives in this process: a node that has not read by its end loses the connection.
        living = [node for node in self._peers if node in self._seen and not self._is_lost(node)]
        while time.monotonic() < deadline and not self._store.check([f"left/{node}" for node in living]):
            time.sleep(BEAT_SECONDS / 5)

    def report(self, reason: Reason | None) -> int:
        """On another node: tell the first one why this node's ranks ended, and return the run's exit code. Raise
        RunFailedError if the first node is lost."""
        try:
            self._store.set(f"end/{self.place.node}", _write(reason))
            while self._over is None:
                if self._is_lost(0):
                    raise RunFailedError(self._describe_lost(0).text)
                time.sleep(BEAT_SECONDS / 5)
            self._store.set(f"left/{self.place.node}", "")
        except RuntimeError:  # the connection broke
            raise RunFailedError(self._describe_lost(0).text) from None
        return self._over

    def _beat(self, store: TCPStore) -> None:
        before: dict[int, bytes] = {}
        with suppress(RuntimeError):  # without a connection, the other side stops counting too
            number = 0
            while not self._left.wait(BEAT_SECONDS):
                number += 1
                store.set(f"beat/{self.place.node}", str(number))
                for node in self._peers:
                    self._look_at(store, node, before)
                if self.place.node and store.check(["over"]):
                    self._over = int(store.get("over"))
        if not self._left.is_set():
            self._is_cut = True

    def _look_at(self, store: TCPStore, node: int, before: dict[int, bytes]) -> None:
        # Check first: a get waits until the key exists.
        if store.check([f"beat/{node}"]) and (beat := store.get(f"beat/{node}")) != before.get(node):
            # Use this node's clock, because clocks of several nodes differ.
            before[node], self._seen[node] = beat, time.monotonic()
            if node not in self._hosts:
                self._hosts[node] = store.get(f"host/{node}").decode()
        if node not in self._ends and store.check([f"end/{node}"]):
            self._ends[node] = _read(store.get(f"end/{node}"))

    def _is_gone(self, node: int) -> bool:
        return node in self._ends or self._is_lost(node)

    def _is_lost(self, node: int) -> bool:
        if self._is_cut:
            return True
        if node in self._seen:
            return time.monotonic() - self._seen[node] > self._lost_seconds
        return time.monotonic() - self._started > self._patience.total_seconds()

    def _describe_lost(self, node: int) -> Reason:
        name = f"node {node} of {self._count}"
        if node in self._hosts:
            silence = "the connection broke" if self._is_cut else f"it sent nothing for {self._lost_seconds:g} seconds"
            text = f"{name} ({self._hosts[node]}) is lost: {silence}"
        else:
            text = f"{name} did not start within {self._minutes:g} minutes (target.peer_timeout_min)"
        return Reason(node * self._per_node, text, LOST_CODE, time.time(), is_echo=False)

    def _connect(self, *, serves: bool = False) -> TCPStore:
        try:
            return self.place.connect(self._patience, serves=serves)
        except RuntimeError as error:
            if serves:
                reason = (str(error).splitlines() or [""])[0]
                raise DataError(f"port {self.place.port} of the first node cannot be used: {reason}") from None
            where = f"{self.place.host}:{self.place.port}"
            raise DataError(
                f"node {self.place.node}: the first node does not answer at {where} within {self._minutes:g} minutes "
                "(target.peer_timeout_min)"
            ) from None


def unshared(place: NodePlace, folder: Path) -> DataError:
    """Return the error of a node that does not see the first node's files."""
    return DataError(
        f"node {place.node} ({socket.gethostname()}) does not see the first node's files in the run's folder {folder}: "
        "target.nodes needs a file system that all nodes share"
    )


def refuse_unshared(place: NodePlace, folder: Path) -> DataError:
    """Tell the first node that this node does not see the run's folder, and return the error."""
    error = unshared(place, folder)
    with suppress(RuntimeError):
        store = place.connect(timedelta(seconds=LOST_SECONDS))
        store.set(f"host/{place.node}", socket.gethostname())
        reason = Reason(place.node, str(error), error.exit_code, time.time(), is_echo=False)
        store.set(f"end/{place.node}", _write(reason))
    return error


def _write(reason: Reason | None) -> str:
    return json.dumps(None if reason is None else asdict(reason))


def _read(text: bytes) -> Reason | None:
    values = json.loads(text)
    return None if values is None else Reason(**values)
