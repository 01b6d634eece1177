"""Eager update: each parameter is updated while the backward runs, and its gradient is freed."""

from sparsebp_cli.backward.eager.clip import CLIPS, Clipping
from sparsebp_cli.backward.eager.passing import EagerReport
from sparsebp_cli.backward.eager.update import EagerUpdate

__all__ = ["CLIPS", "Clipping", "EagerReport", "EagerUpdate"]
