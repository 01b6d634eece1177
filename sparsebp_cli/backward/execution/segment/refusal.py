"""Refuses gradients that would be lost, where they arrive."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from sparsebp_cli.errors import UnsupportedError


class Refusal:
    """Hook of a tensor inside a segment: a gradient that arrives there would be lost.

    Args:
        name: Of the layer that computed it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, grad: Tensor) -> NoReturn:  # noqa: ARG002 - torch's signature
        raise UnsupportedError(
            f"segments: the loss uses what {self._name!r} computes inside a segment, where there is no graph: "
            "only outputs of segments, and the last segment, have one"
        )
