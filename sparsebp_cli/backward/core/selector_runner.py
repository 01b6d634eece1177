"""One decision of a gradient policy: the options that every selector has, and the policy itself.

Layers in or out, the warm-up of ``keep`` and error feedback are the same for all policies, so they are carried out
here. The warm-up is that of Yujun Lin et al., "Deep Gradient Compression" (ICLR 2018), https://arxiv.org/abs/1712.01887,
section 3.3, by the same factor every step instead of every epoch; error feedback that of Frank Seide et al., "1-Bit
Stochastic Gradient Descent" (Interspeech 2014), applied to the gradient of a site instead of that of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from torch import Tensor

from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import GradientSelector, Selection, Site, Step


class SelectorRunner:
    """Asks one selector, and keeps what error feedback adds at the next step.

    Args:
        selector: The policy.
        num_layers: Decoder layers of the model; 0: it has none that are known.
    """

    def __init__(self, selector: GradientSelector, num_layers: int) -> None:
        self.selector = selector
        self.cut: dict[str, Tensor] = {}  # by site, micro-batch and call
        self._layers = None if selector.layers is None else _number(selector.layers, num_layers)

    def policy_at(self, site: Site, step: Step) -> GradientSelector | None:
        """Return who decides here and now, with the share that the warm-up allows; None: dense.

        Args:
            site: Where.
            step: When.

        Returns:
            The policy.
        """
        if self._layers is not None and site.layer not in self._layers:
            return None
        steps = self.selector.keep_warmup_steps
        if step.index >= steps:
            return self.selector
        keep: float = self.selector.model_dump(include={"keep"})["keep"]  # the contract checks that it has one
        return self.selector.model_copy(update={"keep": keep ** (step.index / steps)})

    @contextmanager
    def aside(self, *, feedback: bool) -> Iterator[None]:
        """Decide for a probe: what error feedback will add is afterwards as it was before.

        Args:
            feedback: Whether it adds, in the probe, what was cut before it.

        Yields:
            None: As long as the probe lasts.
        """
        before = self.cut
        self.cut = dict(before) if feedback else {}
        try:
            yield
        finally:
            self.cut = before

    def take(
        self, policy: GradientSelector, grad_NO: Tensor, site: Site, step: Step
    ) -> tuple[Tensor, Selection | None]:
        """Ask the policy.

        Args:
            policy: From :meth:`policy_at`.
            grad_NO: The gradient that arrived.
            site: Where.
            step: When.

        Returns:
            The gradient with what was cut before added, and what is kept of it.

        Raises:
            UnsupportedError: Error feedback, and the gradient has other dimensions than a step before.
        """
        if not policy.error_feedback:
            return grad_NO, policy.select(grad_NO, site, step)
        key, shape = f"{site.name}/{step.micro_batch}/{step.call}", (*site.batch_shape, site.num_features)
        before = self.cut.get(key)
        if before is not None:
            before = _fit(before, shape, site.name)
            grad_NO = _add_where_both_are(grad_NO.view(shape), before.to(grad_NO.dtype)).view(grad_NO.shape)
        selection = policy.select(grad_NO, site, step)
        kept_NO = grad_NO if selection is None else selection.apply(grad_NO)
        left = (grad_NO - kept_NO).view(shape)
        self.cut[key] = left if before is None else _keep_waiting(left, before)
        return grad_NO, selection


# What was cut waits at its place, which is an example's number in the batch and a position, until a gradient comes to
# that place again. So the last batch of an epoch may be smaller, and batches may differ in length.


def _fit(before: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    if before.dim() == 2 and before.numel() == prod(shape):
        return before.view(shape)  # from a checkpoint that was written with rows of all examples in one dimension
    if before.dim() != len(shape) or before.shape[-1] != shape[-1]:
        shapes = f"{tuple(before.shape)}, then {shape}"
        raise UnsupportedError(f"error_feedback needs gradients of the same dimensions, got {shapes} at {name!r}")
    return before


def _add_where_both_are(grad: Tensor, before: Tensor) -> Tensor:
    if grad.shape == before.shape:
        return grad + before
    both = tuple(slice(min(sizes)) for sizes in zip(grad.shape, before.shape, strict=True))
    grad = grad.clone()
    grad[both] += before[both]
    return grad


def _keep_waiting(left: Tensor, before: Tensor) -> Tensor:
    sizes = [max(pair) for pair in zip(left.shape, before.shape, strict=True)]
    if list(left.shape) == sizes:
        return left
    waiting = left.new_zeros(sizes)
    waiting[tuple(slice(size) for size in before.shape)] = before.to(left.dtype)
    waiting[tuple(slice(size) for size in left.shape)] = left
    return waiting


def _number(layers: list[int], num_layers: int) -> frozenset[int]:
    wrong = [layer for layer in layers if not -num_layers <= layer < num_layers]
    if wrong:
        allowed = f"{-num_layers} to {num_layers - 1}" if num_layers else "none: no layers were found"
        raise UnsupportedError(f"layers: the model has no layer {wrong[0]}; allowed: {allowed}")
    return frozenset(layer % num_layers for layer in layers)
