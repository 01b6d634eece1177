"""The layout of the newest batch, kept for the next forward on it.

A reference, and the model itself before its update, run on the batch that is trained: its rows are arranged once. What
is compared is what the layout follows from, value by value, so that nothing has to be known of tensors or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np
import torch

from sparsebp_cli.backward.kind.packing.groups import Bools, Ints
from sparsebp_cli.backward.kind.packing.layout import PackedLayout, make_layout


@final
class LastLayout:
    """Makes layouts, and gives the last one again where it would be made once more."""

    reused: int

    def __init__(self) -> None:
        self.reused = 0  # times that one was given again
        self._facts: Mapping[str, object] = {}
        self._layout: PackedLayout | None = None

    def make(  # noqa: PLR0913 - as of make_layout
        self,
        needed_BT: Bools,
        token_BT: Ints | None,
        position_BT: Ints,
        device: torch.device,
        *,
        is_causal: bool,
        place_BT: Ints,
        alone_BT: Bools,
        begins_BT: Bools | None,
        read_BT: Bools | None,
        most_read: float,
    ) -> PackedLayout:
        """Return :func:`~sparsebp_cli.backward.kind.packing.layout.make_layout` of these."""
        # All arguments: a layout follows from them alone.
        facts = {name: value for name, value in locals().items() if name != "self"}
        if self._layout is not None and all(_same(value, self._facts[name]) for name, value in facts.items()):
            self.reused += 1
            return self._layout
        self._layout = make_layout(
            needed_BT,
            token_BT,
            position_BT,
            device,
            is_causal=is_causal,
            place_BT=place_BT,
            alone_BT=alone_BT,
            begins_BT=begins_BT,
            read_BT=read_BT,
            most_read=most_read,
        )
        # Copies: an array may be a view of a tensor of the caller's, which changes in place.
        self._facts = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in facts.items()}
        return self._layout


def _same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and one == other
