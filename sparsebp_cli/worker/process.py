"""The processes (ranks) that train together on one machine, and the small values that they exchange.

These values go over gloo, on the host. Gradients and weights are exchanged by DDP and FSDP2.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import Recipe, TargetOptions

T = TypeVar("T")
LONGEST_WAIT = timedelta(minutes=30)  # for another rank, such as the first one while it writes a checkpoint
# Names the file through which ranks of one machine find each other. torchrun offers a port that was free before;
# the first rank would bind it seconds later, when another program may have taken it.
MEETING_FILE = "SPARSEBP_MEETING_FILE"


def process_options(recipe: Recipe) -> TargetOptions:
    """Return the target options that all kinds of target share: number of processes and sharding."""
    given = {name: value for name, value in recipe.target.options.items() if name in TargetOptions.model_fields}
    return TargetOptions.model_validate(given)


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train together, and collective operations between them. Every rank must
    call a collective operation."""

    rank: int = 0  # from 0; only rank 0 writes files
    count: int = 1  # number of processes
    is_sharded: bool = False  # each rank holds a part of weights, gradients and optimizer state

    @classmethod
    def join(cls, recipe: Recipe) -> Self:
        """Initialise the process group of a recipe with several processes, or return a single rank. Raise DataError if
        there are fewer CUDA devices than processes."""
        options = process_options(recipe)
        if options.processes == 1:
            return cls()
        import torch
        from torch import distributed

        on_cuda = recipe.target.device != "cpu" and torch.cuda.is_available()
        if on_cuda and torch.cuda.device_count() < options.processes:
            raise DataError(
                f"target.processes: {options.processes}, but torch finds {torch.cuda.device_count()} CUDA devices here"
            )
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            init_method=f"file://{os.environ[MEETING_FILE]}",
            rank=int(os.environ["RANK"]),
            world_size=options.processes,
            timeout=LONGEST_WAIT,
        )
        return cls(distributed.get_rank(), distributed.get_world_size(), options.sharding == "fsdp2")

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files."""
        return self.rank == 0

    def all_max(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over the ranks."""
        return self._reduce(values, "MAX")

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over the ranks."""
        return self._reduce(values, "SUM")

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_max([0.0])

    def gather(self, value: T) -> list[T]:
        """Return one picklable value of each rank, by rank, on the first rank; an empty list on the others."""
        if self.count == 1:
            return [value]
        from torch import distributed

        found: list[Any] | None = [None] * self.count if self.is_first else None
        distributed.gather_object(value, found)
        return found or []

    def broadcast(self, value: T) -> T:
        """Return the first rank's picklable value on every rank; the values of the others are ignored."""
        if self.count == 1:
            return value
        from torch import distributed

        values = [value]
        distributed.broadcast_object_list(values)
        return values[0]

    def _reduce(self, values: Sequence[float], operation: str) -> list[float]:
        if self.count == 1:
            return list(values)
        import torch
        from torch import distributed

        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor, getattr(distributed.ReduceOp, operation))
        reduced: list[float] = tensor.tolist()
        return reduced
