"""Metrics of one optimizer step: memory, kept share, selection and routing."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparsebp_cli.backward import Route
from sparsebp_cli.backward.core.report import Chosen
from sparsebp_cli.backward.observe.saved_bytes import tensor_bytes
from sparsebp_cli.memory.storage import tensors_in
from sparsebp_cli.policy import GradientSelector
from sparsebp_cli.policy.discovery import find_policy
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import metric
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.sharding import local_part
from sparsebp_cli.worker.step_memory import PeakMemory


def memory_metrics(model: nn.Module, optimizer: Any, peak: PeakMemory) -> dict[str, float]:
    """Return the bytes of weights and optimizer state on this rank, and its peak memory since the run began."""
    state = tensors_in(dict(optimizer.state))
    name = metric.PEAK_ALLOCATED_BYTES if peak.device.type == "cuda" else metric.PEAK_RESIDENT_BYTES
    return {
        metric.WEIGHT_BYTES.name: float(tensor_bytes(local_part(p) for p in model.parameters())),
        metric.OPTIMIZER_BYTES.name: float(tensor_bytes(local_part(value) for value in state)),
        name.name: float(peak.bytes()),
    }


def kept_share(own: float | None, ranks: Ranks) -> float | None:
    """Return the mean kept share of gradient entries over all ranks, which all have equally many rows; None if no
    gradient arrived on any rank."""
    if ranks.count == 1:
        return own
    total, known = ranks.all_sum([own or 0.0, float(own is not None)])
    return total / known if known else None


def route_metrics(route: Route | None) -> dict[str, float | None]:
    """Return how far a router let the gradient of a step propagate; empty without a router."""
    if route is None:
        return {}
    return {
        metric.NODES.name: route.num_nodes / route.num_backwards,
        metric.NODES_RUN.name: route.nodes_reached,
        metric.PARAMETERS_REACHED.name: float(len(route.parameters)),
        metric.MISS_RATE.name: route.miss_rate,
    }


def selection_metrics(chosen: Chosen | None, ranks: Ranks, recipe: Recipe) -> dict[str, float | None]:
    """Return shares and scoring time of the tokens or examples selected before the forward, over all ranks. Without a
    gradient policy the trained share also is the kept share."""
    if chosen is None:
        return {}
    counts = (chosen.trained, chosen.targets, chosen.carried, chosen.real)
    trained, targets, carried, real = ranks.all_sum([float(count) for count in counts])
    trained_share = trained / targets if targets else None
    values = {
        metric.TRAINED_SHARE.name: trained_share,
        metric.CARRIED_SHARE.name: carried / real if real else None,
        metric.SCORING_SECONDS.name: ranks.all_max([chosen.scoring_seconds])[0],
    }
    if any(find_policy(entry.name).kind == GradientSelector.__name__ for entry in recipe.policy):
        return values
    return values | {metric.KEPT_SHARE.name: trained_share}
