"""What goes with segments, and what is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sparsebp_cli.backward.segment.part import Segments
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Policy, TokenSelector


def make_segments(
    model: nn.Module, segments: int | Sequence[str] | None, *, policies: Sequence[Policy], sites: str
) -> list[Segments]:
    """Cut a model, if that is asked for.

    Args:
        model: Without wrappers.
        segments: How many, or the first module of each; None: it stays whole.
        policies: That are attached with them.
        sites: Where these are asked.

    Returns:
        One part of the engine, or none.

    Raises:
        UsageError: The model cannot be cut so.
        UnsupportedError: The model cannot be cut, or something does not go with segments.
    """
    if segments is None:
        return []
    if sites == "nodes":
        raise UnsupportedError(
            "segments hide the nodes of their layers: sites must be linears or branches, got 'nodes'"
        )
    for policy in policies:
        if isinstance(policy, TokenSelector):
            name = type(policy).__name__
            raise UnsupportedError(
                f"{name} with segments is not built: it runs layers for some positions in its own way"
            )
    return [Segments(model, segments)]
