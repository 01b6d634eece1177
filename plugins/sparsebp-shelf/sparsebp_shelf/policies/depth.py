"""Parameters by depth, for policies that freeze from the bottom."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import Parameter


def group_by_depth(parameters: Sequence[Parameter]) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the names of parameters below the layers, in each layer from the first, and above.

    What comes before the first layer in the model's order is below, such as embeddings; what comes later outside of
    layers is above. A shared parameter is where its first name is, so a head that is tied to embeddings is below: the
    backward cannot end above it while it is trained. Raises :class:`PolicyError` if there is no layer.
    """
    numbers = sorted({p.layer for p in parameters if p.layer is not None})
    if not numbers:
        raise PolicyError("no parameter that the model would train lies in a layer: nothing can be frozen by depth")
    first = next(place for place, p in enumerate(parameters) if p.layer is not None)
    below = [p.name for p in parameters[:first]]
    layers = [[p.name for p in parameters if p.layer == number] for number in numbers]
    above = [p.name for p in parameters[first:] if p.layer is None]
    return below, layers, above
