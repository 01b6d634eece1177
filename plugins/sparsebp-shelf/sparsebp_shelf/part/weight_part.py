"""Represent parts of a weight matrix that are trained while the rest of it is frozen.

A part is data: rows, columns, blocks or entries. ``restrict`` defines its meaning: the gradient of every part equals
the restricted dense gradient.

Shape letters: D input width, O output width, K kept, S side of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, final

from typing_extensions import override

from sparsebp_cli.errors import PolicyError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class WeightPart(ABC):
    """A part of a weight (O, D), however a layer stores it.

    Args:
        index_K: int64 numbers of the trained units, each once, in any order, at least one.
    """

    index_K: Tensor
    word: ClassVar[str]  # name of the units

    @abstractmethod
    def count(self, num_outputs: int, num_inputs: int) -> int:
        """Return the number of rows, columns, blocks or entries of a weight.

        Args:
            num_outputs: O, at least 1.
            num_inputs: D, at least 1.

        Returns:
            At least 1.

        Raises:
            PolicyError: The weight does not consist of whole units.
        """

    def share(self, num_outputs: int, num_inputs: int) -> float:
        """Return the fraction of the weight's entries that belongs to the part.

        Args:
            num_outputs: O, at least 1.
            num_inputs: D, at least 1.

        Returns:
            A fraction in (0, 1].
        """
        return len(self.index_K) / self.count(num_outputs, num_inputs)

    def claim(self, num_outputs: int, num_inputs: int) -> float:
        """Return the fraction of wgrad's multiplications that the part needs.

        Args:
            num_outputs: O, at least 1.
            num_inputs: D, at least 1.

        Returns:
            A fraction in (0, 1].
        """
        return self.share(num_outputs, num_inputs)

    @abstractmethod
    def restrict(self, matrix_OD: Tensor) -> Tensor:
        """Return a copy of this part of a weight or of its gradient.

        Args:
            matrix_OD: Whole matrix, output by input.

        Returns:
            (K, D) for rows, (O, K) for columns, (K, S, S) for blocks, (K,) for entries.
        """

    @abstractmethod
    def write(self, matrix_OD: Tensor, part: Tensor) -> None:
        """Write the part's values into a weight, in place.

        Args:
            matrix_OD: Whole matrix, output by input; entries outside of the part do not change.
            part: Values of the part, in the shape that :meth:`restrict` returns.
        """

    def check(self, num_outputs: int, num_inputs: int) -> None:
        """Raise an error unless the part fits a weight.

        Args:
            num_outputs: O of the weight.
            num_inputs: D of the weight.

        Raises:
            PolicyError: The index is not a list of int64 numbers, is empty, repeats a number, or exceeds the weight; or
                the weight does not consist of whole blocks.
        """
        import torch

        size = self.count(num_outputs, num_inputs)
        if self.index_K.dtype != torch.int64 or self.index_K.dim() != 1:
            raise PolicyError(
                f"the indices of {self.word} of a weight must be an int64 tensor of 1 dimension, got "
                f"{self.index_K.dtype} of {self.index_K.dim()} dimensions"
            )
        if not self.index_K.numel():
            raise PolicyError(f"a policy must choose 1 to {size} {self.word} of a weight, got none")
        if hasattr(self.index_K, "fake_mode"):
            return  # tensors of a forecast have no data, so the numbers are unknown
        sorted_K = self.index_K.sort().values
        least, most = int(sorted_K[0]), int(sorted_K[-1])
        if least < 0 or most >= size:
            number = least if least < 0 else most
            raise PolicyError(f"the indices of {self.word} of a weight must be from 0 to {size - 1}, got {number}")
        if bool((sorted_K[1:] == sorted_K[:-1]).any()):
            raise PolicyError(f"each of the {self.word} of a weight may be chosen only once, but a number occurs twice")


@final
class WeightRows(WeightPart):
    """Rows of a weight: all inputs of some outputs."""

    word = "rows"

    @override
    def count(self, num_outputs: int, num_inputs: int) -> int:
        return num_outputs

    @override
    def restrict(self, matrix_OD: Tensor) -> Tensor:
        return matrix_OD.index_select(0, self.index_K)

    @override
    def write(self, matrix_OD: Tensor, part: Tensor) -> None:
        matrix_OD.index_copy_(0, self.index_K, part)


@final
class WeightColumns(WeightPart):
    """Columns of a weight: some inputs of all outputs. Only these input features are saved."""

    word = "columns"

    @override
    def count(self, num_outputs: int, num_inputs: int) -> int:
        return num_inputs

    @override
    def restrict(self, matrix_OD: Tensor) -> Tensor:
        return matrix_OD.index_select(1, self.index_K)

    @override
    def write(self, matrix_OD: Tensor, part: Tensor) -> None:
        matrix_OD.index_copy_(1, self.index_K, part)


@final
@dataclass(frozen=True, eq=False)
class WeightBlocks(WeightPart):
    """Square blocks of a weight, numbered row by row. Only the input features that blocks read are saved.

    Args:
        index_K: int64 numbers of the trained blocks, each once, in any order, at least one.
        num_inputs: D, which defines the numbering.
        size: S, side of a block; O and D are multiples of it.
    """

    num_inputs: int
    size: int
    word = "blocks"

    @override
    def count(self, num_outputs: int, num_inputs: int) -> int:
        for width, what in ((num_outputs, "outputs"), (num_inputs, "inputs")):
            if width % self.size:
                raise PolicyError(
                    f"blocks of a weight: the number of {what} must be a multiple of the block size {self.size}, got "
                    f"{width}"
                )
        return num_outputs * num_inputs // self.size**2

    @override
    def restrict(self, matrix_OD: Tensor) -> Tensor:
        row_K, column_K = self._places
        blocks_KSS: Tensor = self._grid(matrix_OD)[row_K, :, column_K, :]
        return blocks_KSS

    @override
    def write(self, matrix_OD: Tensor, part: Tensor) -> None:
        row_K, column_K = self._places
        self._grid(matrix_OD)[row_K, :, column_K, :] = part

    @cached_property
    def read_columns(self) -> Tensor:
        """Features of the input that any block reads, ascending, a multiple of S of them."""
        import torch

        first: Tensor = self._places[1].unique() * self.size
        return (first[:, None] + torch.arange(self.size, device=first.device)).reshape(-1)

    @cached_property
    def by_column(self) -> list[tuple[list[int], Tensor]]:
        """For each column of blocks in :attr:`read_columns`, return the index positions of its blocks and their output
        features."""
        import torch

        row_K, column_K = (each.tolist() for each in self._places)
        groups: dict[int, list[int]] = {}
        for place, column in enumerate(column_K):
            groups.setdefault(column, []).append(place)
        inside = torch.arange(self.size, device=self.index_K.device)
        found = []
        for column in sorted(groups):
            first = torch.tensor([row_K[place] * self.size for place in groups[column]], device=inside.device)
            found.append((groups[column], (first[:, None] + inside).reshape(-1)))
        return found

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Row and column of each block in the grid of blocks, (K,)."""
        width = self.num_inputs // self.size
        return self.index_K // width, self.index_K % width

    def _grid(self, matrix_OD: Tensor) -> Tensor:
        grid: Tensor = matrix_OD.unflatten(1, (-1, self.size)).unflatten(0, (-1, self.size))
        return grid


@final
@dataclass(frozen=True, eq=False)
class WeightElements(WeightPart):
    """Single entries of a weight, numbered row by row. The backward computes the whole gradient and keeps them.

    Args:
        index_K: int64 numbers of the trained entries, each once, in any order, at least one.
        num_inputs: D, which defines the numbering.
    """

    num_inputs: int
    word = "entries"

    @override
    def count(self, num_outputs: int, num_inputs: int) -> int:
        return num_outputs * num_inputs

    @override
    def claim(self, num_outputs: int, num_inputs: int) -> float:
        return 1.0

    @override
    def restrict(self, matrix_OD: Tensor) -> Tensor:
        return matrix_OD[self.index_K // self.num_inputs, self.index_K % self.num_inputs]

    @override
    def write(self, matrix_OD: Tensor, part: Tensor) -> None:
        matrix_OD[self.index_K // self.num_inputs, self.index_K % self.num_inputs] = part
