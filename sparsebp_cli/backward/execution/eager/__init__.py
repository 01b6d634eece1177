"""Eager update: the backward pass updates each parameter as soon as its gradient is complete, and frees the
gradient.
"""

from sparsebp_cli.backward.core.report import EagerReport
from sparsebp_cli.backward.execution.eager.clipping import Clipping
from sparsebp_cli.backward.execution.eager.update import EagerUpdate

__all__ = ["Clipping", "EagerReport", "EagerUpdate"]
