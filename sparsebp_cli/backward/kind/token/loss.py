"""The loss of only the trained positions, with transformers' arithmetic.

Shape letters: B examples, T positions, N trained positions of all examples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.loss_weight import IGNORED, check_causal_loss, has_causal_loss, weights_at
from sparsebp_cli.backward.kind.token.layers import no_graph
from sparsebp_cli.backward.kind.token.row_plan import PositionMask, RowPlan
from sparsebp_cli.backward.kind.transfer import upload
from sparsebp_cli.backward.patch.boundary import fill
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards
from sparsebp_cli.backward.patch.rng import capture_generators, generators_at
from sparsebp_cli.errors import UnsupportedError

_TRIED = 4  # number of positions in the test that distinguishes losses
NumItems = Tensor | float | None  # number of targets in all micro-batches of a step; None: the mean over this batch


def check_loss(model: nn.Module) -> None:
    """Raise :class:`UnsupportedError` unless a model's loss is transformers' for causal language models."""
    if not has_causal_loss(model):
        function = loss_function_of(model)
        name = getattr(function, "__name__", repr(function))
        raise UnsupportedError(f"token selection supports only transformers' ForCausalLMLoss; the model uses {name}")


def check_own_loss(model: nn.Module, head: nn.Module, arguments: Mapping[str, object]) -> None:
    """Raise :class:`UnsupportedError` if the loss of a model's own forward differs from its ``loss_function``.

    The forward runs once on a few positions of the first example, with logits that distinguish common losses.
    """
    first = next(x for x in map(arguments.get, ("input_ids", "inputs_embeds")) if isinstance(x, Tensor))
    shape, length = first.shape[:2], min(first.shape[1], _TRIED)
    cut = {name: x[:1, :length] for name, x in arguments.items() if isinstance(x, Tensor) and x.shape[:2] == shape}
    labels = torch.arange(length, device=first.device)[None]

    def waves(*args: Tensor, **kwargs: Tensor) -> Tensor:
        logits: Tensor = call_module(head, *args, **kwargs)
        count = torch.arange(logits.numel(), device=logits.device, dtype=torch.float32)
        return (10.0 * count.sin()).view_as(logits).to(logits.dtype)

    with no_graph(first.device), generators_at(capture_generators(first.device), first.device):
        with replace_forwards([(head, waves)]):
            output: Any = type(model).forward(model, **(cut | {"labels": labels, "return_dict": True}))
        expected = loss_function_of(model)(output.logits, labels, output.logits.shape[-1])
    if not torch.isclose(output.loss.float(), expected.float(), rtol=0.02):
        raise UnsupportedError(
            f"token selection supports only ForCausalLMLoss, but the forward of {type(model).__name__} computes "
            f"another loss: {float(output.loss):.4g} where ForCausalLMLoss gives {float(expected):.4g}"
        )


def loss_function_of(model: nn.Module) -> Callable[..., Tensor]:
    """Return the loss function of a transformers model."""
    function: object = model.loss_function
    assert callable(function)
    return function


def scale(num_items: NumItems, marks: PositionMask) -> NumItems:
    """Return the divisor of the summed losses of trained tokens, so that the loss is a mean over trained tokens.

    ``num_items`` is the number of targets in all micro-batches of a step, None for the mean of this batch. The function
    multiplies it by the fraction of this batch's targets that is trained.
    """
    num_targets, num_trained = int(marks.target.sum()), int(marks.trained.sum())
    if num_items is None or num_trained in (0, num_targets):
        return num_items
    return num_items * (num_trained / num_targets)


def row_loss(model: nn.Module, logits: Tensor, plan: RowPlan, num_items: NumItems, marks: PositionMask) -> Tensor:
    """Return the loss of a plan's trained rows, with logits (1, N, V); ``num_items`` as in :func:`scale`."""
    check_causal_loss(model)
    function = loss_function_of(model)
    labels = plan.label_N[None]
    # If no position of the whole step is trained, num_items may be zero and the loss NaN.
    items = scale(num_items, marks) if plan.num_trained else None
    loss = function(
        logits, labels, logits.shape[-1], num_items_in_batch=items, shift_labels=labels, **_shift_weights(model, marks)
    )
    return loss if plan.num_trained else loss * 0.0


def _shift_weights(model: nn.Module, marks: PositionMask) -> dict[str, Tensor]:
    """Return the user's weights of the trained positions, as an argument of the loss; 0 without trained positions."""
    index_N = marks.trained.flatten().nonzero().flatten()
    weight_N = weights_at(model, index_N)
    if weight_N is None:
        return {}
    return {"shift_weights": weight_N if len(weight_N) else weight_N.new_zeros(1)}


def masked_labels(labels_BT: Tensor, marks: PositionMask) -> Tensor:
    """Return labels (B, T) that train only the chosen positions, for the reference implementation."""
    trains_BT = torch.zeros_like(marks.trained)
    trains_BT[:, 1:] = marks.trained[:, :-1]
    return labels_BT.masked_fill(~upload(labels_BT.device, trains_BT)[0], IGNORED)


def guard_unlabelled(logits_BTV: Tensor, labels_BT: Tensor, marks: PositionMask) -> Tensor:
    """Return logits whose backward refuses a gradient at a position without a label. The script's loss may read labels
    that were not chosen, which get no gradient, but no other position that was not computed."""
    has_label_BT = nn.functional.pad(labels_BT[:, 1:] != IGNORED, (0, 1))
    may_read_BT = has_label_BT.to(logits_BTV.device) | marks.trained.to(logits_BTV.device)
    return fill(logits_BTV, may_read_BT, "logits")


def spread_logits(logits_NV: Tensor, marks: PositionMask) -> Tensor:
    """Return logits (B, T, V) for the user's loss. Rows that were not computed are 0 and have no gradient."""
    size = logits_NV.shape[-1]
    index = upload(logits_NV.device, marks.trained.flatten().nonzero().flatten())[0]
    all_rows = logits_NV.new_zeros(marks.trained.numel(), size).index_copy(0, index, logits_NV)
    return all_rows.view(*marks.trained.shape, size)
