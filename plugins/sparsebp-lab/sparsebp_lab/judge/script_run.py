"""Create an MLflow run for a user's script, which logs into it, and read the run afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from sparsebp_cli.errors import TrackingError
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking.store import experiment_id, one_line, open_client, resolve_uri, restore_infinity

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")


@dataclass(frozen=True)
class ScriptRun:
    """A run of one script. The script's ``mlflow.start_run()`` and transformers' callback log into it."""

    run_id: str
    experiment: str
    uri: str = field(repr=False)  # may hold a password

    @classmethod
    def create(cls, experiment: str, name: str, tags: Mapping[str, str]) -> ScriptRun:
        """Create a run in the store of ``MLFLOW_TRACKING_URI``, else in SparseBP's own. Raises ``TrackingError``."""
        uri = resolve_uri(None)

        def make(client: MlflowClient) -> ScriptRun:
            found = experiment_id(client, uri, experiment)
            return cls(client.create_run(found, run_name=name, tags=dict(tags)).info.run_id, found, uri)

        return _ask(uri, make)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which MLflow finds the run."""
        return {
            "MLFLOW_TRACKING_URI": self.uri,
            "MLFLOW_EXPERIMENT_ID": self.experiment,
            "MLFLOW_RUN_ID": self.run_id,
        }

    def finish(self, *, failed: bool) -> dict[str, float]:
        """Close the run if its script has not, and return the last value of each metric. Raises ``TrackingError``."""

        def close(client: MlflowClient) -> dict[str, float]:
            found = client.get_run(self.run_id)
            if found.info.status == "RUNNING" or failed:
                client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")
            return {name: restore_infinity(float(value)) for name, value in found.data.metrics.items()}

        return _ask(self.uri, close)


def _ask(uri: str, question: Callable[[MlflowClient], T]) -> T:
    try:
        return question(open_client(uri))
    except TrackingError:
        raise
    except Exception as error:  # errors of MLflow, SQLAlchemy, requests or the system
        raise TrackingError(f"cannot use the MLflow store {mask(uri)}: {one_line(error)}") from error
