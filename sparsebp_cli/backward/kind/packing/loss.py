"""The model's own loss, computed on the rows that have a label.

Shape letters: B examples, T positions, R rows with a label, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.backward.core.loss_weight import IGNORED, check_causal_loss, forward_weights, weights_at


def run_loss(model: Any, logits_RV: Tensor, target_BT: Tensor, place_R: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Return the loss from the model's own function; ``place_R`` are the positions of the rows."""
    check_causal_loss(model)
    target_R, count = labels_at(target_BT, place_R), _count(model, target_BT, given)
    if not len(place_R):  # like the plain loss of a batch without labels: NaN as a mean, 0 with a given divisor
        place_R, target_R = place_R.new_zeros(1), target_BT.new_full((1,), IGNORED)
    loss: Tensor = model.loss_function(
        logits_RV[None],
        target_R[None],
        logits_RV.shape[-1],
        num_items_in_batch=count,
        shift_labels=target_R[None],
        **({} if (weight_R := weights_at(model, place_R)) is None else {"shift_weights": weight_R}),
    )
    return loss


def labels_at(target_BT: Tensor, place_R: Tensor) -> Tensor:
    """Return the labels that rows predict."""
    return target_BT.flatten().index_select(0, place_R)


def weigh_labels(model: Any, target_BT: Tensor, place_R: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Return the factor of each row's cross-entropy in transformers' mean or sum, in float32."""
    weight_R, count = weights_at(model, place_R), _count(model, target_BT, given)
    if weight_R is None:
        weight_R = torch.ones_like(place_R, dtype=torch.float32)
    count = len(place_R) if count is None else count
    return weight_R.float() / (count.to(weight_R.device) if isinstance(count, Tensor) else count)


def _count(model: Any, target_BT: Tensor, given: Mapping[str, Any]) -> Any:
    """Return the divisor of the loss; None: the number of labels that have a row."""
    count = given.get("num_items_in_batch")
    if count is None and forward_weights(model) is not None:  # labels of weight 0 count, but have no row here
        count = (target_BT != IGNORED).sum()
    return count
