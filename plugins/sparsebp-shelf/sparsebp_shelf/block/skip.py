"""Return what modules of residual blocks return that are left out of the forward.

Shape letters: B examples, T positions, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparsebp_cli.errors import UnsupportedError
from sparsebp_shelf.block.layout import BlockPart


def skip(part: BlockPart, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
    """Return an output that adds nothing to the residual stream, in the form that the module returns.

    A norm before the block returns its own input. Other modules return zeros, which take no memory unless the layer
    writes to them. Further outputs, such as an attention's weights, are None.
    """
    given = (*args, kwargs.get("hidden_states"), *kwargs.values())
    hidden_BTD = next((value for value in given if isinstance(value, Tensor)), None)
    if hidden_BTD is None:
        raise UnsupportedError(
            f"the block {part.name!r} cannot be skipped, because its forward gets no tensor as an argument"
        )
    if part.role == "before":
        return hidden_BTD
    # Expanded from one zero where the layer does not write. See decision 13.
    zeros_BTD = hidden_BTD.new_zeros(hidden_BTD.shape if part.is_written else ()).expand(hidden_BTD.shape)
    return (zeros_BTD, *[None] * (part.num_outputs - 1)) if part.num_outputs else zeros_BTD
