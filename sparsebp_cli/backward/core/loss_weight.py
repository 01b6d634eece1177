"""Weights of single targets in the loss of a causal language model.

The loss is the weighted sum divided by the number of targets, which are the labels that are not ignored. Dense training
uses the same divisor, so a weight of 1 changes nothing and a weight of 0 removes the gradient of a token. With
``num_items_in_batch`` that number is the divisor.

During a forward with weights, the model's ``loss_function`` is :class:`WeightedLoss`. Code that computes the loss of
selected rows calls the same function with the weights of these positions.

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
IGNORED = -100  # the label of no target, as in PyTorch's cross entropy


class LossWeights:
    """Lets a model's forward accept ``loss_weight``, (B, T), as an argument, or in advance for the next forwards.

    Raises :class:`UnsupportedError` if the model does not compute transformers' ``ForCausalLMLoss``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._causal = _find_causal(model)
        self._loss = WeightedLoss(self._causal.loss_function)
        self.given: Tensor | None = None  # weights of the next forwards with gradients, until changed
        # Whether the weights may belong to the script's own loss: if a policy skips rows of weight 0.
        self.may_be_own = False
        # The state before each running forward, since a model may call itself with other weights.
        self._outer: list[tuple[Tensor | None, bool, bool]] = []
        # Prepended, so that _before has run whenever _after runs.
        before = model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        # always_call, so that a failed forward does not leave its weights to the next one.
        after = model.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        self._handles = (before, after)

    def remove(self) -> None:
        """Remove the argument from the model's forward."""
        for handle in self._handles:
            handle.remove()

    def _before(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = dict(kwargs)
        # Evaluations use no weights. See decision 5.
        given = self.given if torch.is_grad_enabled() and not self._outer else None
        weight_BT = kwargs.pop(LOSS_WEIGHT, given)
        is_installed = self._causal.__dict__.get("_loss_function") is self._loss
        self._outer.append((self._loss.weight_BT, self._loss.was_called, is_installed))
        self._install(weight_BT, was_called=False, is_installed=weight_BT is not None)
        return args, kwargs

    def _install(self, weight_BT: Tensor | None, *, was_called: bool, is_installed: bool) -> None:
        self._loss.weight_BT, self._loss.was_called = weight_BT, was_called
        if is_installed:
            self._causal.loss_function = self._loss
        elif self._causal.__dict__.get("_loss_function") is self._loss:
            self._causal.__dict__.pop("_loss_function")  # the model's class then determines transformers' own again

    def _after(self, _: nn.Module, __: Any, kwargs: dict[str, Any], output: object) -> None:
        weight_BT, was_called = self._loss.weight_BT, self._loss.was_called
        outer_BT, outer_called, is_installed = self._outer.pop()
        self._install(outer_BT, was_called=outer_called, is_installed=is_installed)
        if weight_BT is None:
            return
        labels = kwargs.get("labels")
        if self.may_be_own and labels is None:
            return  # the script weighs its own loss
        if output is None or was_called or (labels is not None and not bool((labels != IGNORED).any())):
            return  # the forward failed, or there was no target to weigh
        raise UsageError(
            "loss_weight changes the model's own loss, but this forward computed no loss: pass labels to the "
            "forward, or weight your own loss in the script"
        )


class WeightedLoss:
    """transformers' ``ForCausalLMLoss`` with a weight for each target."""

    was_called: bool

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        self.plain = plain
        self.weight_BT: Tensor | None = None  # None outside of a forward with weights
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
        """Return the loss. ``shift_labels`` are the labels of rows that the caller selected, and ``shift_weights`` are
        their weights, from :func:`weights_at`."""
        self.was_called = True
        if shift_weights is None:
            assert self.weight_BT is not None
            if shift_labels is not None or self.weight_BT.shape != labels.shape:
                got = "shift_labels" if shift_labels is not None else f"labels of shape {tuple(labels.shape)}"
                raise UnsupportedError(
                    f"loss_weight has the shape {tuple(self.weight_BT.shape)}, but the loss function got {got}: "
                    "loss_weight is not supported if a policy or the script removes examples from the batch"
                )
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            shift_weights = nn.functional.pad(self.weight_BT, (0, 1))[..., 1:]
        assert shift_labels is not None
        label_N = shift_labels.reshape(-1).to(logits.device)
        # In float32, like transformers' ForCausalLMLoss.
        loss_N = nn.functional.cross_entropy(
            logits.float().reshape(-1, vocab_size), label_N, ignore_index=ignore_index, reduction="none"
        )
        divisor = (label_N != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        divisor = divisor.to(loss_N.device) if isinstance(divisor, Tensor) else divisor
        return (loss_N * shift_weights.reshape(-1).to(loss_N)).sum() / divisor


def weights_at(model: nn.Module, index_N: Tensor) -> Tensor | None:
    """Return the weights, (N,), of the targets that positions predict; None in a forward without weights. ``index_N``
    are indices of the B * T positions."""
    function: object = getattr(model, "loss_function", None)
    if not isinstance(function, WeightedLoss) or function.weight_BT is None:
        return None
    function.was_called = True
    weight_BT = nn.functional.pad(function.weight_BT, (0, 1))[..., 1:]
    return weight_BT.reshape(-1).to(index_N.device).index_select(0, index_N)


def forward_weights(model: nn.Module) -> Tensor | None:
    """Return the weights, (B, T), of the labels in the running forward; None in a forward without weights."""
    function: object = getattr(model, "loss_function", None)
    return function.weight_BT if isinstance(function, WeightedLoss) else None


def has_causal_loss(model: nn.Module) -> bool:
    """Return whether the loss of a transformers model is ``ForCausalLMLoss``, with or without weights."""
    function: object = getattr(model, "loss_function", None)
    function = function.plain if isinstance(function, WeightedLoss) else function
    return function is sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss


def check_causal_loss(model: nn.Module) -> None:
    """Raise :class:`UsageError` if the loss of a model is no longer ``ForCausalLMLoss``."""
    if not has_causal_loss(model):
        raise UsageError(
            "'loss_function' was replaced after the model was attached: call engine.detach(), set 'loss_function', "
            "and attach the model again"
        )


def calls_loss_function(model: nn.Module) -> bool:
    """Return whether a model's own forward names ``loss_function``. Otherwise it may compute another loss."""
    # transformers decorates its forwards, and only the innermost code object contains the names.
    code: object = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return "loss_function" in getattr(code, "co_names", ())


def _find_causal(model: nn.Module) -> Any:
    # Look up the module instead of importing it, so that plain torch models need no transformers.
    loaded = sys.modules.get("transformers.modeling_utils")
    for module in model.modules():
        if loaded is not None and isinstance(module, loaded.PreTrainedModel):
            if has_causal_loss(module) and calls_loss_function(module):
                return module
            break
    raise UnsupportedError(
        f"loss_weight supports only transformers' ForCausalLMLoss, which {type(model).__name__} does not compute"
    )
