"""Group parameters by depth, for policies that freeze from the bottom."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import Parameter


def group_by_depth(parameters: Sequence[Parameter]) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the names of parameters below the layers, in each layer from the first, and above.

    Parameters before the first layer in the model's order, such as embeddings, are below; later ones outside of layers
    are above. A shared parameter counts at its first name, so a head that is tied to embeddings is below: while it is
    trained, the backward must reach the embeddings. Raises :class:`PolicyError` if there is no layer.
    """
    numbers = sorted({p.layer for p in parameters if p.layer is not None})
    if not numbers:
        raise PolicyError(
            "the policy freezes transformer layers by depth, but the model trains no parameter of a layer"
        )
    first = next(place for place, p in enumerate(parameters) if p.layer is not None)
    below = [p.name for p in parameters[:first]]
    layers = [[p.name for p in parameters if p.layer == number] for number in numbers]
    above = [p.name for p in parameters[first:] if p.layer is None]
    return below, layers, above
