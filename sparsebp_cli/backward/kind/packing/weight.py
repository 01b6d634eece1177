"""Rows whose loss has weight zero: tokens by ``loss_weight``, and whole examples by ``example_weight``.

Attention never crosses examples, and a row that is not read gets no gradient. So if the script's own loss reads logits,
packing does not compute an example of weight 0. trl logs the outputs of its fused head for all examples; there, such an
example runs without gradient.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsebp_cli.backward.core.loss_weight import forward_weights
from sparsebp_cli.backward.kind.packing.batch import BATCH
from sparsebp_cli.backward.kind.packing.groups import Bools
from sparsebp_cli.backward.patch.boundary import ReadsUncomputedError
from sparsebp_cli.errors import UnsupportedError, UsageError

BY_EXAMPLE = {*BATCH, "attention_mask", "labels"}  # arguments with a row for each example


def find_weightless(model: nn.Module, shape: tuple[int, int], weight_B: Tensor | None) -> Bools | None:
    """Return the positions (B, T) whose output has weight zero in the loss of the running forward; None: no position.

    ``weight_B`` are the weights of whole examples in the script's own loss.
    """
    weight_BT = forward_weights(model)
    if weight_BT is None and weight_B is None:
        return None
    found = torch.zeros(shape, dtype=torch.bool)
    if weight_BT is not None and tuple(weight_BT.shape) == shape:  # the loss refuses other shapes
        found[:, :-1] = weight_BT[:, 1:].cpu() == 0
    if weight_B is not None:
        found[_dead(weight_B, shape[0]).cpu()] = True
    numbers: Bools = found.numpy()
    return numbers if numbers.any() else None


def _dead(weight_B: Tensor, num_examples: int) -> Tensor:
    """Return which examples have weight zero."""
    if weight_B.dim() == 0 or len(weight_B) != num_examples:
        raise UsageError(
            f"example_weight must have one row for each of {num_examples} examples, got shape {tuple(weight_B.shape)}"
        )
    return weight_B.detach().reshape(num_examples, -1).eq(0).all(1)


@final
class DeadExamples:
    """Examples of weight zero under trl's fused head, which run without gradient.

    Packing does not know the script's loss. So in the first batch with such examples it reads the gradient that arrives
    at them. If it is zero, they run without gradient from the next batch on.
    """

    weight_B: Tensor | None  # weights of the next batches
    number: int
    trained_share: float
    is_announced: bool  # whether an update's plan has fixed the parts of the coming batches

    def __init__(self) -> None:
        self.weight_B = None
        self.trained_share = 1.0  # fraction of the last batch's examples that was trained
        self.is_announced = False
        self.number = 0  # examples that ran without gradient so far
        self._is_silent: bool | None = None  # whether no gradient arrives at them; None: not yet known

    @property
    def note(self) -> str:
        """A sentence for the report; empty for nothing."""
        if self._is_silent is False:
            return "; examples of weight 0 are not skipped, because the loss gives them a gradient"
        return f"; {self.number:,} examples of weight 0 run without a gradient" if self.number else ""

    def find_trained(self, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the part of a coming batch that is trained, by the weights of its examples; None: the whole batch."""
        weight_B = batch.get("example_weight")
        given = {name: value for name, value in batch.items() if name != "example_weight"}
        parts = None if weight_B is None else self._split(given, weight_B)
        return None if parts is None else _take(given, parts[0])

    def _split(self, given: Mapping[str, Any], weight_B: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return the indices of the examples that are trained, and of the others; None: all are trained."""
        is_whole = self._is_silent is False and not self.is_announced
        if weight_B is None or is_whole or not _has_rows(given):
            return None
        dead_B = _dead(weight_B, len(given["labels"])).to(given["labels"].device)
        if not bool(dead_B.any()):
            return None
        if bool(dead_B.all()):  # keep one, since the loss must have a graph
            dead_B[0] = False
        return (~dead_B).nonzero()[:, 0], dead_B.nonzero()[:, 0]

    def run(
        self,
        given: Mapping[str, Any],
        live: Callable[[dict[str, Any]], Any],
        dead: Callable[[dict[str, Any]], Any],
    ) -> Any:
        """Return the output of a batch; ``live`` runs examples with gradient, ``dead`` without."""
        parts, self.trained_share = self._split(given, self.weight_B), 1.0
        if parts is None:
            return live(dict(given))
        first, rest = live(_take(given, parts[0])), _take(given, parts[1])
        if not self._is_silent:  # use the same parts, so that sums over trained examples are the same in both cases
            return _join(first, self._watch(live(rest)), parts, given)
        with torch.no_grad():
            second = dead(rest)
        self.number += len(parts[1])
        self.trained_share = len(parts[0]) / (len(parts[0]) + len(parts[1]))
        return _join(first, second, parts, given)

    def _watch(self, output: Any) -> Any:
        """Record in the backward whether a gradient arrives at the outputs of examples of weight zero."""

        def look(grad: Tensor) -> None:
            self._is_silent = self._is_silent is not False and not bool((grad != 0).any())

        for field in fields(output):
            value = getattr(output, field.name)
            if isinstance(value, Tensor) and value.requires_grad and value.dim():
                value.register_hook(look)
        return output


def _has_rows(given: Mapping[str, Any]) -> bool:
    """Return whether each tensor among the arguments has a row for each example, so that it can be split."""
    size = given["labels"].shape[:1]
    return all(name in BY_EXAMPLE and v.shape[:1] == size for name, v in given.items() if isinstance(v, Tensor))


def _take(given: Mapping[str, Any], example_D: Tensor) -> dict[str, Any]:
    return {n: v.index_select(0, example_D) if isinstance(v, Tensor) else v for n, v in given.items()}


def _join(first: Any, second: Any, parts: tuple[Tensor, Tensor], given: Mapping[str, Any]) -> Any:
    """Return an output of trl's fused head, joined from the outputs of two parts of the batch."""
    values: dict[str, Any] = {}
    for field in fields(first):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if isinstance(one, Tensor) and one.dim():
            if other.requires_grad:
                values[field.name] = torch.cat((one, other))[torch.cat(parts).argsort()]
            else:
                values[field.name] = _Joined.apply(one, other, *parts)  # type: ignore[no-untyped-call]
        elif one is not None and field.name != "loss":
            raise UnsupportedError(f"lossless cannot give the output {field.name} of trl's fused head (fused_lm_head)")
    count = given.get("num_items_in_batch")
    if count is None:
        count = values["label_mask"].sum().clamp(min=1)
    return type(first)(loss=-values["log_probs"].sum() / count, **values)


class _Joined(torch.autograd.Function):
    """Joins rows of two parts of a batch; the second part has no graph."""

    @staticmethod
    def forward(ctx: Any, live: Tensor, dead: Tensor, live_L: Tensor, dead_D: Tensor) -> Tensor:
        ctx.save_for_backward(live_L, dead_D)
        whole = live.new_empty(len(live_L) + len(dead_D), *live.shape[1:])
        return whole.index_copy_(0, live_L, live).index_copy_(0, dead_D, dead.to(live.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        live_L, dead_D = ctx.saved_tensors
        (grad,) = grads
        if bool((grad.index_select(0, dead_D) != 0).any()):
            raise ReadsUncomputedError(
                "lossless skips examples of weight 0, because they got no gradient in the first batch; now one of "
                "them has a gradient: do not pass example_weight to engine.columns"
            )
        return grad.index_select(0, live_L), None, None, None
