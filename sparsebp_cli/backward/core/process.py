"""Detection of training in several processes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from sparsebp_cli.policy import Policy
from sparsebp_cli.policy.composition import PolicyFacts, Setup, refuse

SEVERAL = "several (DDP or FSDP)"


def count_processes(model: nn.Module) -> int:
    """Return the number of processes that train together; at least 2 if the model is wrapped in DDP."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return distributed.get_world_size()
    return 2 if any(isinstance(module, DistributedDataParallel) for module in model.modules()) else 1


def refuse_processes(model: nn.Module, policies: Iterable[Policy] = (), **options: object) -> None:
    """Refuse combinations with which processes would have different gradients, or would wait for each other forever.

    The engine repeats this check before a backward, since a model can be wrapped after attach. ``options`` are the
    options of ``attach``. Raises :class:`UnsupportedError` from the table of combinations.
    """
    facts = {**options, "processes": count_processes(model), "loop": "own"}
    refuse(Setup([PolicyFacts.of(policy) for policy in policies], facts, words={"processes": SEVERAL}))
