"""What an input saver with state may observe.

Shape letters: N rows (= B*T), D input width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sparsebp_cli.policy import Observed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ReaderGradients(Observed):
    """The gradients of the weights of all linears that read one input. Only input savers see them, in trial passes.

    Args:
        name: Name of the linear that reads the input first.
        gradients: Gradients of the weights by linear, in the order of their names, in the shapes of the weights.
        num_entries: Number of entries of the input, N times D.
    """

    gradients: Mapping[str, Tensor]
    num_entries: int


@dataclass(frozen=True)
class LinearInput(Observed):
    """The input of a linear in a forward, for an input saver. A recomputed forward shows it again.

    Args:
        name: Name of the linear; the first, if several linears read one tensor.
        x_ND: The input, all leading dimensions flattened to rows.
    """

    is_gradient: ClassVar[bool] = False
    x_ND: Tensor
