"""The model's own loss, computed on the rows that have a label.

Shape letters: B examples, T positions, R rows with a label, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.backward.core.loss_weight import IGNORED, check_causal_loss, forward_weights, weights_at
from sparsebp_cli.backward.decoder.decoder import argument_names
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards

_TRIED = 4  # positions of the forward that distinguishes losses


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


def has_own_loss(model: Any, head: Any) -> bool:
    """Return whether a model's own forward computes another loss than its ``loss_function``, for example with a term
    for large logits, like Bamba's ``z_loss_coefficient``. A forward that cannot run without its layers does so if
    transformers does not define it."""
    routers = {"output_router_logits": False} if "output_router_logits" in argument_names(model) else {}
    try:
        labels = torch.arange(_TRIED, device=head.weight.device)[None]
        made = torch.linspace(-8, 9, _TRIED * head.weight.shape[0], device=labels.device).sin_().mul_(8)
        with torch.no_grad():
            output = run_above_layers(model, head, made.view(1, _TRIED, -1), labels=labels, **routers)
            expected = model.loss_function(output.logits, labels, output.logits.shape[-1])
        return output.loss is None or not bool(torch.isclose(output.loss.float(), expected.float(), rtol=1e-6))
    except Exception:  # a model that needs more outputs of its layers may raise anything
        return not type(model).forward.__module__.startswith("transformers.")


@cache  # transformers registers every output class with torch permanently
def _kind_of_made() -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Made(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:  # other fields of its layers' output that a model reads
            if name.startswith("_"):
                raise AttributeError(name)

    return Made


def run_above_layers(model: Any, head: Any, made: Tensor, **given: object) -> Any:
    """Return the output of a forward whose head returns the values ``made``, (1, T, V), and whose layers do not run."""

    def run_stack(*_: object, **__: object) -> Any:
        return _kind_of_made()(last_hidden_state=made.new_zeros(*made.shape[:2], head.in_features))

    def run_head(_: Tensor) -> Tensor:
        return made.clone()

    with replace_forwards([(model.base_model, run_stack), (head, run_head)]):
        ids = torch.zeros(made.shape[:2], dtype=torch.long, device=made.device)
        return call_module(model, input_ids=ids, use_cache=False, return_dict=True, **given)
