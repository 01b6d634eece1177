"""Error feedback: add the cut part of a site's gradient, the residual, to the gradient of the next step.

After Frank Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014), applied to a site's gradient instead
of a parameter's. A residual belongs to an example's index in the batch and a position, and waits until a gradient
arrives at that index again. So the last batch of an epoch may be smaller, and batches may differ in length.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from sparsebp_cli.backward.core.loss_scale import apply_scale, remove_scale
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Selection, Site, Step


def add_residual(grad_NO: Tensor, before: Tensor, site: Site, step: Step) -> Tensor:
    """Return a gradient plus the residual of earlier steps, a result of :func:`fit`."""
    scaled = apply_scale(before, step.loss_scale).to(grad_NO.dtype)
    return _add_where_both_are(grad_NO.view(_shape(site)), scaled).view(grad_NO.shape)


def find_residual(
    grad_NO: Tensor, selection: Selection | None, before: Tensor | None, site: Site, step: Step
) -> Tensor:
    """Return the part of a gradient that a selection cuts, and the part of ``before`` that still waits."""
    # Subtract the weighted selection, exactly as the kernel uses it, so that the sum over steps loses nothing.
    kept_NO = grad_NO if selection is None else selection.apply(grad_NO)
    left = remove_scale(grad_NO - kept_NO, step.loss_scale).view(_shape(site))
    return left if before is None else _retain_unmatched(left, before)


def fit(before: Tensor, site: Site) -> Tensor:
    """Return a residual in the dimensions of a site's gradient. Raises :class:`UnsupportedError` if the number of
    dimensions or the number of features changed.
    """
    shape = _shape(site)
    if before.dim() == 2 and before.numel() == prod(shape):
        return before.view(shape)  # older checkpoints store (B*T, O)
    if before.dim() != len(shape) or before.shape[-1] != shape[-1]:
        shapes = f"{tuple(before.shape)}, then {shape}"
        raise UnsupportedError(f"error_feedback needs gradients of the same dimensions, got {shapes} at {site.name!r}")
    return before


def _shape(site: Site) -> tuple[int, ...]:
    return (*site.batch_shape, site.num_features)


def _add_where_both_are(grad: Tensor, before: Tensor) -> Tensor:
    if grad.shape == before.shape:
        return grad + before
    both = tuple(slice(min(sizes)) for sizes in zip(grad.shape, before.shape, strict=True))
    # Copy, because autograd may pass the same tensor to other nodes.
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
