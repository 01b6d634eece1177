"""Parts of a weight matrix that are trained while the rest of it is frozen.

A part is data: which rows or columns. What it means is defined by ``restrict``; every gradient of a part equals the
restricted dense gradient.

Shape letters: D input width, O output width, K kept.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from sparsebp_cli.errors import PolicyError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class WeightPart(ABC):
    """Rows or columns of a weight (O, D), whatever way round a layer stores it.

    Args:
        index_K: int64 numbers of the rows or columns, each once, in any order, at least one.
    """

    index_K: Tensor
    dim: ClassVar[int]  # the dimension of (O, D) that is restricted
    word: ClassVar[str]  # what is counted

    def claim(self, num_outputs: int, num_inputs: int) -> float:
        """Return the share of the weight's entries, and of wgrad's multiplications, that belongs to the part.

        Args:
            num_outputs: O, at least 1.
            num_inputs: D, at least 1.

        Returns:
            A share in (0, 1].
        """
        return len(self.index_K) / (num_outputs, num_inputs)[self.dim]

    def restrict(self, matrix_OD: Tensor) -> Tensor:
        """Return a copy of this part of a weight or of its gradient.

        Args:
            matrix_OD: Whole matrix, output by input.

        Returns:
            (K, D) for rows, (O, K) for columns.
        """
        return matrix_OD.index_select(self.dim, self.index_K)

    def write(self, matrix_OD: Tensor, part: Tensor) -> None:
        """Write the part's values into a weight, in place.

        Args:
            matrix_OD: Whole matrix, output by input; entries outside of the part do not change.
            part: As :meth:`restrict` returns it.
        """
        matrix_OD.index_copy_(self.dim, self.index_K, part)

    def check(self, num_outputs: int, num_inputs: int) -> None:
        """Raise an error unless the part fits a weight.

        Args:
            num_outputs: O of the weight.
            num_inputs: D of the weight.

        Raises:
            PolicyError: The index is not a list of int64 numbers, is empty, repeats a number, or leaves the weight.
        """
        import torch

        size = (num_outputs, num_inputs)[self.dim]
        if self.index_K.dtype != torch.int64 or self.index_K.dim() != 1:
            raise PolicyError(
                f"{self.word} of a weight: got {self.index_K.dtype} of {self.index_K.dim()} dimensions, allowed: "
                "int64 of 1 dimension"
            )
        numbers = self.index_K.tolist()
        if not numbers:
            raise PolicyError(f"{self.word} of a weight: got none, allowed: 1 to {size}")
        outside = next((number for number in numbers if not 0 <= number < size), None)
        if outside is not None:
            raise PolicyError(f"{self.word} of a weight: got number {outside}, allowed: 0 to {size - 1}")
        if len(set(numbers)) < len(numbers):
            raise PolicyError(f"{self.word} of a weight: a number occurs twice, allowed: each at most once")


@final
class WeightRows(WeightPart):
    """Rows of a weight: all inputs of some outputs."""

    dim = 0
    word = "rows"


@final
class WeightColumns(WeightPart):
    """Columns of a weight: some inputs of all outputs. Only these features of the layer's input are saved."""

    dim = 1
    word = "columns"
