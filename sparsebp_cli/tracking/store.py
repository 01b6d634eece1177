"""Open an MLflow store, and work around two limits of MLflow 3.17.

Processes that create the same sqlite database at the same time break it, so a lock serialises them. With the default
retries a dead server blocks a caller for minutes, so the number of retries is reduced.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from sparsebp_cli.errors import TrackingError, first_line
from sparsebp_cli.recipe.store_address import SERVERS, find_problem, sqlite_file
from sparsebp_cli.run import durable, home
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking.moved import follow_move

if TYPE_CHECKING:
    from mlflow import MlflowClient


KIND = "mlflow.experimentKind"  # decides which pages MLflow shows first: without it, those for chat applications
MODEL_DEVELOPMENT = "custom_model_development"
LONGEST_LINE = 300


def resolve_uri(plan_uri: str | None) -> str:
    """Return the URI of the MLflow store: the recipe's, else ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in SparseBP's
    home. It may hold a password, so show it only through :func:`mask`. Raise ``TrackingError`` for a folder, an unknown
    scheme, or a relative sqlite path."""
    uri = plan_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return default_uri()
    if problem := find_problem(uri):
        raise TrackingError(f"{'tracking.uri' if plan_uri else 'MLFLOW_TRACKING_URI'} {problem}")
    return uri


def default_uri() -> str:
    """Return the URI of ``mlflow.db`` in SparseBP's home."""
    return f"sqlite:///{home() / 'mlflow.db'}"


def is_server(uri: str) -> bool:
    """Return whether the store is an MLflow server, not a database that is opened directly."""
    return uri.lower().startswith(SERVERS)


def is_sqlite(uri: str) -> bool:
    """Return whether the store is a single file."""
    return uri.lower().startswith("sqlite")


def artifact_root(uri: str) -> Path:
    """Return the artifact folder of a database: ``mlartifacts`` next to the sqlite file, else in SparseBP's home.
    MLflow's own default is the working folder."""
    return (sqlite_file(uri).parent if is_sqlite(uri) else home()) / "mlartifacts"


def one_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's text, masked, at most 300 characters; else its class name. Add what
    the user can do if known: install a driver, or bypass a proxy."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
        return f"{error.name} is not installed: python -m pip install {package.get(error.name, error.name)}"
    line = mask(first_line(error))
    line = line if len(line) <= LONGEST_LINE else (line[:LONGEST_LINE].rpartition(" ")[0] or line[:LONGEST_LINE])
    proxy = "proxy" in line.lower() or any("proxy" in type(one).__name__.lower() for one in _causes(error))
    return f"{line}; the request went through a proxy of this shell: set NO_PROXY=HOST to bypass it" if proxy else line


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


LOCK_SECONDS = 120.0  # creating a database takes about 5 s, and other processes may wait for the same lock

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "GIT_PYTHON_REFRESH": "quiet",
}


def open_client(uri: str) -> MlflowClient:
    """Connect to a store whose URI ``resolve_uri`` returned. Create a missing sqlite database, one process at a time.
    The client raises many kinds of errors; the caller must turn them into one line."""
    for name, value in ENVIRONMENT.items():
        # The user's settings take precedence.
        os.environ.setdefault(name, value)
    if is_sqlite(uri):  # report an impossible path before the import, which takes seconds
        sqlite_file(uri).parent.mkdir(parents=True, exist_ok=True)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if is_server(uri):
        return MlflowClient(uri)
    with sqlite_lock(uri):
        _create_database(uri)
        return MlflowClient(uri)


def restore_infinity(value: float) -> float:
    """Return a value as it was logged: MLflow's databases store infinity as the largest float."""
    return math.copysign(math.inf, value) if abs(value) == sys.float_info.max else value


@contextmanager
def sqlite_lock(uri: str) -> Iterator[None]:
    """Hold the lock next to a sqlite file, so that a second writer waits. Other stores need no lock."""
    if not is_sqlite(uri):
        yield
        return
    file = sqlite_file(uri)
    place = file.with_name(file.name + ".lock")
    # Open the file first: where it cannot be created, as in /proc, FileLock would wait as if another process held the
    # lock.
    os.close(os.open(place, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
    with FileLock(place, timeout=LOCK_SECONDS):
        yield


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """Return an experiment's id, and set its kind if it has none. Create the experiment if it does not exist. Raise
    ``TrackingError`` if it was deleted there, ``MlflowException`` if refused."""
    from mlflow.exceptions import MlflowException

    if found := client.get_experiment_by_name(name):
        if found.lifecycle_stage == "deleted":  # its name stays taken until `mlflow gc`
            restore = restore_command(uri, "experiments", f"--experiment-id {found.experiment_id}")
            raise TrackingError(f"the experiment {name!r} was deleted in MLflow; `{restore}` restores it")
        if KIND not in found.tags:
            client.set_experiment_tag(found.experiment_id, KIND, MODEL_DEVELOPMENT)
        return str(found.experiment_id)
    root = None if is_server(uri) else artifact_root(uri).as_uri()
    try:
        return str(client.create_experiment(name, artifact_location=root, tags={KIND: MODEL_DEVELOPMENT}))
    except MlflowException:
        if found := client.get_experiment_by_name(name):  # another process created it in the meantime
            return str(found.experiment_id)
        raise


def mend_places(uri: str) -> None:
    """Make a moved sqlite store name the artifact folder beside it; see ``moved.py``. Call it before writing or serving
    artifacts: reading a store must not change it."""
    if is_sqlite(uri):
        with sqlite_lock(uri):
            follow_move(sqlite_file(uri), artifact_root(uri))


def restore_command(uri: str, kind: str, which: str) -> str:
    """Return the shell command of MLflow that undoes a deletion. A password in ``uri`` is masked."""
    return f"MLFLOW_TRACKING_URI={shlex.quote(mask(uri))} mlflow {kind} restore {which}"


def _create_database(uri: str) -> None:
    """Create a missing database. The file appears atomically, so a kill leaves nothing broken. Fail at once where
    MLflow would retry for 90 seconds: no server, no rights, or not a database."""
    import sqlalchemy
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    root = artifact_root(uri).as_uri()  # MLflow's default is the working folder
    if is_sqlite(uri) and not sqlite_file(uri).exists():
        file = sqlite_file(uri)
        part = file.with_name(file.name + ".part")
        part.unlink(missing_ok=True)
        # Close its connections before renaming the file.
        SqlAlchemyStore(f"sqlite:///{part}", root).engine.dispose()
        durable.move(part, file)
        return
    engine = sqlalchemy.create_engine(uri)
    try:
        has_tables = sqlalchemy.inspect(engine).has_table("experiments")
    finally:
        engine.dispose()
    if not has_tables:
        SqlAlchemyStore(uri, root)
