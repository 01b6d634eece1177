"""Runs the gradient selector of a site with the options that every selector has.

Restriction to sites and layers, the warm-up of ``keep`` and error feedback are the same for all policies, so they are
implemented here. The warm-up is that of Yujun Lin et al., "Deep Gradient Compression" (ICLR 2018),
https://arxiv.org/abs/1712.01887, section 3.3, with the same factor every step instead of every epoch. Error feedback is
that of Frank Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014), applied to a site's gradient instead
of a parameter's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from math import prod

from torch import Tensor

from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean
from sparsebp_cli.policy import GradientSelector, Selection, Site, Step


class SelectorRunner:
    """Calls the selector of each site and stores the residuals of error feedback. No site may belong to two selectors,
    see :meth:`check_disjoint`. ``num_layers`` is 0 for a model without known layers.
    """

    def __init__(self, selectors: Sequence[GradientSelector], num_layers: int) -> None:
        self.residuals: dict[str, Tensor] = {}  # what error feedback adds later, by site, micro-batch and call
        self._scopes = [_Scope(selector, num_layers) for selector in selectors]
        self._at: dict[str, GradientSelector | None] = {}  # by site: patterns are matched once

    def check_disjoint(self, names: Sequence[str], layer_of: Callable[[str], int | None]) -> None:
        """Refuse a pattern that matches no site, and a site that belongs to two selectors (:class:`UsageError`)."""
        for scope in self._scopes:
            for pattern in scope.selector.where or ():
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise UsageError(f"where: {pattern!r} matches no site{did_you_mean(pattern, names)}")
        for name in names:
            found = [scope.selector for scope in self._scopes if scope.contains(name, layer_of(name))]
            if len(found) > 1:
                one, two = (type(selector).__name__ for selector in found[:2])
                raise UsageError(f"{one} and {two} both decide at {name!r}: give them other where or layers")

    def policy_at(self, site: Site, step: Step) -> GradientSelector | None:
        """Return the policy at a site and step, with the ``keep`` of the warm-up; None if the site stays dense."""
        if site.name not in self._at:
            found = (scope.selector for scope in self._scopes if scope.contains(site.name, site.layer))
            self._at[site.name] = next(found, None)
        selector = self._at[site.name]
        if selector is None or step.index >= selector.keep_warmup_steps:
            return selector
        keep: float = selector.model_dump(include={"keep"})["keep"]  # the contract checks that it has one
        return selector.model_copy(update={"keep": keep ** (step.index / selector.keep_warmup_steps)})

    @contextmanager
    def probing(self, *, feedback: bool) -> Iterator[None]:
        """Restore the residuals of error feedback after a probe; without ``feedback`` the probe starts with none."""
        before = self.residuals
        self.residuals = dict(before) if feedback else {}
        try:
            yield
        finally:
            self.residuals = before

    def select(
        self, policy: GradientSelector, grad_NO: Tensor, site: Site, step: Step
    ) -> tuple[Tensor, Selection | None]:
        """Return the gradient, with the residual of earlier steps added, and the policy's selection of it.

        Raises :class:`UnsupportedError` if error feedback meets a gradient with another number of dimensions than
        before.
        """
        if not policy.error_feedback:
            return grad_NO, policy.select(grad_NO, site, step)
        key, shape = f"{site.name}/{step.micro_batch}/{step.call}", (*site.batch_shape, site.num_features)
        before = self.residuals.get(key)
        if before is not None:
            before = _fit(before, shape, site.name)
            grad_NO = _add_where_both_are(grad_NO.view(shape), before.to(grad_NO.dtype)).view(grad_NO.shape)
        selection = policy.select(grad_NO, site, step)
        kept_NO = grad_NO if selection is None else selection.apply(grad_NO)
        left = (grad_NO - kept_NO).view(shape)
        self.residuals[key] = left if before is None else _retain_unmatched(left, before)
        return grad_NO, selection


class _Scope:
    """The sites at which one selector decides."""

    def __init__(self, selector: GradientSelector, num_layers: int) -> None:
        self.selector = selector
        self._layers = None if selector.layers is None else _number(selector.layers, num_layers)

    def contains(self, name: str, layer: int | None) -> bool:
        where = self.selector.where
        return (self._layers is None or layer in self._layers) and (
            where is None or any(fnmatchcase(name, pattern) for pattern in where)
        )


# A residual belongs to an example's index in the batch and a position, and stays until a gradient arrives at that index
# again. So the last batch of an epoch may be smaller, and batches may differ in length.


def _fit(before: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    if before.dim() == 2 and before.numel() == prod(shape):
        return before.view(shape)  # older checkpoints store (B*T, O)
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


def _retain_unmatched(left: Tensor, before: Tensor) -> Tensor:
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
