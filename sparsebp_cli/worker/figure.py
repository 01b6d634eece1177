"""Figures of a step that are read off after it: bytes held, entries kept, and where a router let the gradient go."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparsebp_cli.backward import Route
from sparsebp_cli.backward.observe.saved_bytes import tensor_bytes
from sparsebp_cli.memory.storage import tensors_in
from sparsebp_cli.run import metric
from sparsebp_cli.worker.peak import PeakMemory
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.sharding import own_part


def held_bytes(model: nn.Module, optimizer: Any, peak: PeakMemory) -> dict[str, float]:
    """Return what weights and optimizer state take on this rank, and the peak.

    Args:
        model: Trained.
        optimizer: Of its parameters.
        peak: Since the run began.

    Returns:
        Bytes by metric name.
    """
    state = tensors_in(dict(optimizer.state))
    name = metric.PEAK_ALLOCATED_BYTES if peak.device.type == "cuda" else metric.PEAK_RESIDENT_BYTES
    return {
        metric.WEIGHT_BYTES.name: float(tensor_bytes(own_part(p) for p in model.parameters())),
        metric.OPTIMIZER_BYTES.name: float(tensor_bytes(own_part(value) for value in state)),
        name.name: float(peak.bytes()),
    }


def kept_share(own: float | None, ranks: Ranks) -> float | None:
    """Return which share of gradient entries was kept over all ranks: each has as many rows.

    Args:
        own: On this rank; None when no gradient arrived.
        ranks: Every one must ask.

    Returns:
        The share, in [0, 1]; None when no gradient arrived anywhere.
    """
    if ranks.count == 1:
        return own
    total, known = ranks.total([own or 0.0, float(own is not None)])
    return total / known if known else None


def tell_route(route: Route | None) -> dict[str, float | None]:
    """Return where a router let the gradient go.

    Args:
        route: Of a step; None without a router.

    Returns:
        Values by metric name; none without a router.
    """
    if route is None:
        return {}
    return {
        metric.NODES.name: route.num_nodes / route.num_backwards,
        metric.NODES_RUN.name: route.nodes_reached,
        metric.PARAMETERS_REACHED.name: float(len(route.parameters)),
        metric.MISS_RATE.name: route.miss_rate,
    }
