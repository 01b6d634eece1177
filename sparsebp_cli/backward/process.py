"""Whether gradients are reduced over several processes, and which of them this is."""

from __future__ import annotations

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from sparsebp_cli.errors import UnsupportedError


def current_rank() -> int:
    """Return which of the processes that train together this is, from 0; 0 for one alone."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def refuse_several_processes(model: nn.Module, what: str) -> None:
    """Refuse what would leave the processes with different gradients, or waiting for each other.

    Args:
        model: That is trained.
        what: What cannot be done; the beginning of the sentence.

    Raises:
        UnsupportedError: There are several processes, or the model is made for them.
    """
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if several or any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedError(f"{what} works in one process: without DDP or FSDP")
