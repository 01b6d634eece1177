"""The processes that train together on one machine: which of them this is, and what they tell each other.

A process and its number are called a rank. What is said here is small and goes over gloo, on the host; gradients and
weights go their own way (DDP, FSDP2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import Recipe, TargetOptions

LONGEST_WAIT = timedelta(minutes=30)  # for another rank, such as for the first while it writes a checkpoint


def process_options(recipe: Recipe) -> TargetOptions:
    """Return how many processes a recipe's target has, and what each of them holds.

    Args:
        recipe: With any kind of target.

    Returns:
        The target's options, those alone that every kind has.
    """
    given = {name: value for name, value in recipe.target.options.items() if name in TargetOptions.model_fields}
    return TargetOptions.model_validate(given)


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Args:
        rank: Its number, from 0. The first alone writes.
        count: How many there are.
        is_sharded: Whether each holds a part of the model's weights, gradients and optimizer state.
    """

    rank: int = 0
    count: int = 1
    is_sharded: bool = False

    @classmethod
    def join(cls, recipe: Recipe) -> Self:
        """Meet the other ranks; alone, that is nothing.

        Args:
            recipe: Of the plan that all of them carry out.

        Returns:
            Which one this is.

        Raises:
            DataError: There are not as many CUDA devices as processes.
        """
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
        distributed.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout=LONGEST_WAIT)
        return cls(distributed.get_rank(), distributed.get_world_size(), options.sharding == "fsdp2")

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def highest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over the ranks."""
        return self._reduce(values, "MAX")

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over the ranks."""
        return self._reduce(values, "SUM")

    def wait(self) -> None:
        """Wait until every rank has come here."""
        self.highest([0.0])

    def collect(self, value: Any) -> list[Any]:
        """Bring one value of each rank to the first.

        Args:
            value: Anything that can be pickled.

        Returns:
            All of them by rank; for any other rank none.
        """
        if self.count == 1:
            return [value]
        from torch import distributed

        found: list[Any] | None = [None] * self.count if self.is_first else None
        distributed.gather_object(value, found)
        return found or []

    def hear(self, value: Any) -> Any:
        """Return the first rank's value.

        Args:
            value: Anything that can be pickled; that of other ranks is not looked at.

        Returns:
            The value, on every rank.
        """
        if self.count == 1:
            return value
        from torch import distributed

        told = [value]
        distributed.broadcast_object_list(told)
        return told[0]

    def _reduce(self, values: Sequence[float], operation: str) -> list[float]:
        if self.count == 1:
            return list(values)
        import torch
        from torch import distributed

        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor, getattr(distributed.ReduceOp, operation))
        reduced: list[float] = tensor.tolist()
        return reduced
