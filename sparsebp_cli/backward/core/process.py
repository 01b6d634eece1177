"""Whether gradients are reduced over several processes, and which of them this is."""

from __future__ import annotations

from collections.abc import Iterable

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from sparsebp_cli.composition import PolicyFacts, Setup, refuse
from sparsebp_cli.policy import Policy

SEVERAL = "several (DDP or FSDP)"


def current_rank() -> int:
    """Return which of the processes that train together this is, from 0; 0 for one alone."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def count_processes(model: nn.Module) -> int:
    """Return how many processes train together: 2 where the model is made for several, however many there are."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return distributed.get_world_size()
    return 2 if any(isinstance(module, DistributedDataParallel) for module in model.modules()) else 1


def refuse_processes(model: nn.Module, policies: Iterable[Policy] = (), **options: object) -> None:
    """Refuse what would leave the processes with different gradients, or waiting for each other.

    Asked again before a backward, since a model can be wrapped after it was attached.

    Args:
        model: That is trained.
        policies: That are at work.
        **options: Of ``attach``, that are in force.

    Raises:
        UnsupportedError: There are several processes, or the model is made for them.
    """
    facts = {**options, "processes": count_processes(model), "loop": "own"}
    refuse(Setup([PolicyFacts.of(policy) for policy in policies], facts, words={"processes": SEVERAL}))
