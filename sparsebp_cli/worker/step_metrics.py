"""Compute the metrics of a training step: memory, and what policies kept, routed or chose in it."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from sparsebp_cli.backward import Route
from sparsebp_cli.backward.core.report import Chosen
from sparsebp_cli.backward.observe.saved_bytes import tensor_bytes
from sparsebp_cli.policy import GradientSelector, Policy
from sparsebp_cli.run import metric
from sparsebp_cli.worker.peak_memory import PeakMemory
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.sharding import local_part
from sparsebp_cli.worker.storage import plain_tensors, tensors_in


def memory_metrics(model: nn.Module, optimizer: AcceleratedOptimizer, peak: PeakMemory) -> dict[str, float]:
    """Return the bytes of weights and optimizer state on this rank, and its peak memory since the run began. Weights
    include the tensors that the optimizer trains instead of them, and the scales of quantised weights."""
    state = tensors_in(dict(optimizer.state))
    trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
    parameters = {id(parameter): parameter for parameter in (*model.parameters(), *trained)}.values()
    weights = (part for each in parameters for part in (*plain_tensors(local_part(each)), *tensors_in(vars(each))))
    name = metric.PEAK_ALLOCATED_BYTES if peak.device.type == "cuda" else metric.PEAK_RESIDENT_BYTES
    return {
        metric.WEIGHT_BYTES.name: float(tensor_bytes(weights)),
        metric.OPTIMIZER_BYTES.name: float(tensor_bytes(local_part(value) for value in state)),
        name.name: float(peak.bytes()),
    }


def kept_share(own: float | None, ranks: Ranks) -> float | None:
    """Return the mean fraction of gradient entries kept over all ranks, which have equally many rows; None if no
    gradient arrived on any rank."""
    if ranks.count == 1:
        return own
    total, known = ranks.all_sum([own or 0.0, float(own is not None)])
    return total / known if known else None


def route_metrics(route: Route | None) -> dict[str, float | None]:
    """Return how far a router let a step's gradient propagate; empty without a router."""
    if route is None:
        return {}
    return {
        metric.NODES.name: route.num_nodes / route.num_backwards,
        metric.NODES_RUN.name: route.nodes_reached,
        metric.PARAMETERS_REACHED.name: float(len(route.parameters)),
        metric.MISS_RATE.name: route.miss_rate,
    }


def selection_metrics(chosen: Chosen | None, ranks: Ranks, policies: Sequence[Policy]) -> dict[str, float | None]:
    """Return fractions and scoring time of the tokens or examples selected before the forward, over all ranks. Without
    a gradient policy the fraction trained is also the fraction kept."""
    if chosen is None:
        return {}
    counts = (chosen.trained, chosen.targets, chosen.carried, chosen.real)
    trained, targets, carried, real = ranks.all_sum([float(count) for count in counts])
    trained_share = trained / targets if targets else None
    values = {
        metric.TRAINED_SHARE.name: trained_share,
        metric.CARRIED_SHARE.name: carried / real if real else None,
        metric.SCORING_SECONDS.name: ranks.all_max([float(chosen.scoring_seconds)])[0],
    }
    if any(isinstance(policy, GradientSelector) for policy in policies):
        return values
    return values | {metric.KEPT_SHARE.name: trained_share}
