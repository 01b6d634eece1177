"""Packed rows under trl's fused head.

It receives the rows that have a label as one sequence, with shifted labels.

Shape letters: B examples, T positions, R rows with a label, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.loss_weight import IGNORED
from sparsebp_cli.backward.kind.packing.batch import PackedBatch
from sparsebp_cli.backward.kind.packing.loss import labels_at
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards


def run_fused(
    stack: nn.Module,
    batch: PackedBatch,
    row_R: Tensor,
    target_BT: Tensor,
    run: Callable[[Tensor], Any],
    take: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Run trl's forward on packed rows, and return its output in the shape of the whole batch.

    ``row_R`` are the rows of the positions that have a label. ``run`` calls the forward with shifted labels (1, R).
    ``take`` selects rows of the last layer's output.
    """
    size, place_R = batch.read_BT.shape, batch.place_R
    target_R = labels_at(target_BT, place_R)
    if not len(place_R):  # run one row without a label, so that the loss is zero but has a graph
        place_R = row_R = place_R.new_zeros(1)
        target_R = target_BT.new_full((1,), IGNORED)

    def cut(*args: object, **kwargs: object) -> Any:
        output = call_module(stack, *args, **kwargs)
        output.last_hidden_state = take(output.last_hidden_state, row_R)
        return output

    with replace_forwards([(stack, cut)]):
        output = run(target_R[None])

    def spread(value: Tensor | None) -> Tensor | None:
        if value is None or value.shape != (1, len(place_R)):
            return value
        whole = torch.zeros(batch.read_BT.numel(), dtype=value.dtype, device=value.device)
        return whole.scatter(0, place_R, value[0]).view(size)[:, :-1]

    return type(output)(**{field.name: spread(getattr(output, field.name)) for field in fields(output)})
