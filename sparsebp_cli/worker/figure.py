"""Figures of a step that are read off after it: bytes that are held, and where a router let the gradient go."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparsebp_cli.backward import Route
from sparsebp_cli.backward.memory import tensor_bytes
from sparsebp_cli.backward.memory_storage import tensors_in
from sparsebp_cli.run import metric
from sparsebp_cli.worker.peak import PeakMemory
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
