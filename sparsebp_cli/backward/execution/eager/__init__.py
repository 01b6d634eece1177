"""Eager update: each parameter is updated while the backward runs, and its gradient is freed."""

from sparsebp_cli.backward.core.report import EagerReport
from sparsebp_cli.backward.execution.eager.clipping import Clipping
from sparsebp_cli.backward.execution.eager.update import EagerUpdate

__all__ = ["Clipping", "EagerReport", "EagerUpdate"]
