"""Products of two matrices in a backward pass, and which rows of the gradient in them are exactly zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.auditor.operation import DGRAD
from sparsebp_cli.auditor.storage import is_plain

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm, _ATEN.addmm, _ATEN.addmm_)
_SUMS = (_ATEN.addmm, _ATEN.addmm_, _ATEN.baddbmm, _ATEN.baddbmm_, _ATEN.addbmm, _ATEN.addbmm_, _ATEN.addmv)


def is_product(operator: Any) -> bool:
    """Return whether an operator is a product of two matrices, with or without a sum.

    Args:
        operator: As ``__torch_dispatch__`` receives it.

    Returns:
        Whether it is.
    """
    return operator.overloadpacket in _PRODUCTS


def factors_of(operator: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return what an operator multiplies: not what it adds the product to.

    Args:
        operator: As ``__torch_dispatch__`` receives it.
        args: Its arguments.

    Returns:
        Tensors, in their order.
    """
    tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
    return tensors[1:] if operator.overloadpacket in _SUMS else tensors


def find_zero(left: Tensor, right: Tensor, kind: str, *, weight_is_left: bool) -> Tensor | None:
    """Return which rows contribute nothing to a product, because they are exactly zero.

    Args:
        left: The first factor.
        right: The second.
        kind: ``dgrad``: a row of the gradient makes one row of the result. ``wgrad``: it makes one term of the sum,
            with a row of the saved input; the term is nothing when either is zero.
        weight_is_left: Of dgrad, whether the gradient is the second factor, transposed.

    Returns:
        One truth value a row; None for tensors that cannot be looked at.
    """
    if not (is_plain(left) and is_plain(right)):
        return None
    if kind == DGRAD:
        return (right == 0).all(dim=0) if weight_is_left else (left == 0).all(dim=1)
    return (left == 0).all(dim=0) | (right == 0).all(dim=1)
