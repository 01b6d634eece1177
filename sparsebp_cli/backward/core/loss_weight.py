"""Weights of single targets in the loss of a causal language model.

The loss is the weighted sum over the number of targets: labels that are not ignored, as dense training divides, so a
weight of 1 changes nothing and a weight of 0 takes the gradient of a token away. With ``num_items_in_batch`` it is
divided by that number.

While a forward runs that has weights, the model's ``loss_function`` is :class:`WeightedLoss`. Whatever computes the
loss of the rows that it has kept calls the same function and says which positions these are. A forward may call the
model again before it ends, so each call has its own weights, and the innermost call's are in effect.

Shape letters: B examples, T positions, N targets, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.errors import UnsupportedError, UsageError

LOSS_WEIGHT = "loss_weight"  # the column, (B, T): the weight of each label
IGNORED = -100


class LossWeights:
    """Lets a model's forward take ``loss_weight``, (B, T), as an argument, or in advance for the next forwards.

    Raises :class:`UnsupportedError` if the model has no loss that could be weighted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._causal = _find_causal(model)
        self._plain = self._causal.loss_function
        self._calls: list[WeightedLoss | None] = []  # the forwards that run, the innermost last; None: without weights
        self.given: Tensor | None = None  # of the next forwards with gradients, until it is changed
        # Whether a loss of the script's own may have them: where a policy leaves out rows of weight 0.
        self.may_be_own = False
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        # always_call: a forward that fails must not leave its weights to the next one.
        after = model.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        self._handles = (before, after)

    def remove(self) -> None:
        """Take the argument away again."""
        for handle in self._handles:
            handle.remove()

    def _before(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = dict(kwargs)
        # Evaluations do not weigh. See decision 80.
        weight_BT = kwargs.pop(LOSS_WEIGHT, self.given if torch.is_grad_enabled() else None)
        self._calls.append(None if weight_BT is None else WeightedLoss(self._plain, weight_BT))
        self._apply()
        return args, kwargs

    def _apply(self) -> None:
        """Give the model the loss of the innermost call."""
        if self._calls and self._calls[-1] is not None:
            self._causal.loss_function = self._calls[-1]
        else:
            self._causal.__dict__.pop("_loss_function", None)  # transformers' own follows from the model's class again

    def _after(self, _: nn.Module, __: Any, kwargs: dict[str, Any], output: object) -> None:
        call = self._calls.pop() if self._calls else None  # empty: a hook before this one's has raised
        self._apply()
        if call is None:
            return
        labels = kwargs.get("labels")
        if self.may_be_own and labels is None:
            return  # the script weighs its own loss
        if output is None or call.was_called or (labels is not None and not bool((labels != IGNORED).any())):
            return  # it failed, or there was nothing to weigh
        raise UsageError(
            "loss_weight weighs the model's own loss, and this forward computed none: pass it the labels, or weigh "
            "your own loss yourself"
        )


class WeightedLoss:
    """transformers' ``ForCausalLMLoss`` with a weight for each target, in one forward."""

    was_called: bool

    def __init__(self, plain: Callable[..., Tensor], weight_BT: Tensor) -> None:
        self.plain, self.weight_BT = plain, weight_BT
        self.was_called = False

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        shift_weights: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Return the loss. ``shift_labels`` are the labels of rows that the caller has chosen, and ``shift_weights``
        their weights, from :func:`weights_at`."""
        self.was_called = True
        if shift_weights is None:
            if shift_labels is not None or self.weight_BT.shape != labels.shape:
                got = "labels of rows" if shift_labels is not None else f"labels {tuple(labels.shape)}"
                raise UnsupportedError(
                    f"loss_weight {tuple(self.weight_BT.shape)} must have the shape of the labels, and the loss sees "
                    f"{got}: a policy or a script that takes examples out of the batch does not go with it"
                )
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            shift_weights = nn.functional.pad(self.weight_BT, (0, 1))[..., 1:]
        assert shift_labels is not None
        label_N = shift_labels.reshape(-1).to(logits.device)
        # In float32, as transformers' ForCausalLMLoss casts its logits.
        loss_N = nn.functional.cross_entropy(
            logits.float().reshape(-1, vocab_size), label_N, ignore_index=ignore_index, reduction="none"
        )
        divisor = (label_N != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        divisor = divisor.to(loss_N.device) if isinstance(divisor, Tensor) else divisor
        return (loss_N * shift_weights.reshape(-1).to(loss_N)).sum() / divisor


def weights_at(model: nn.Module, index_N: Tensor) -> Tensor | None:
    """Return the weights, (N,), of the targets that positions predict; None in a forward that has none. ``index_N``
    numbers the B * T positions."""
    function: object = getattr(model, "loss_function", None)
    if not isinstance(function, WeightedLoss):
        return None
    function.was_called = True
    weight_BT = nn.functional.pad(function.weight_BT, (0, 1))[..., 1:]
    return weight_BT.reshape(-1).to(index_N.device).index_select(0, index_N)


def forward_weights(model: nn.Module) -> Tensor | None:
    """Return the weights, (B, T), of the labels of the forward that runs; None in a forward that has none."""
    function: object = getattr(model, "loss_function", None)
    return function.weight_BT if isinstance(function, WeightedLoss) else None


def has_weights(model: nn.Module) -> bool:
    """Return whether the forward that runs has weights."""
    return isinstance(getattr(model, "loss_function", None), WeightedLoss)


def calls_loss_function(model: nn.Module) -> bool:
    """Whether a model's own forward names the ``loss_function``; one that does not may compute any other loss."""
    # transformers decorates its forwards; only the innermost code has the names that it uses.
    code: object = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return "loss_function" in getattr(code, "co_names", ())


def _find_causal(model: nn.Module) -> Any:
    # Looked up and not imported: a model of plain torch is attached without transformers.
    loaded = sys.modules.get("transformers.modeling_utils")
    for module in model.modules():
        if loaded is not None and isinstance(module, loaded.PreTrainedModel):
            causal = sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
            if module.loss_function is causal and calls_loss_function(module):
                return module
            break
    raise UnsupportedError(
        f"loss_weight weighs transformers' ForCausalLMLoss, which {type(model).__name__} does not compute"
    )
