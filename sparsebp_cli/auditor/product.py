"""Matrix products in a backward pass, and the rows of the gradient in them that are exactly zero."""

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
    """Return whether an operator, as ``__torch_dispatch__`` receives it, is a matrix product, with or without a sum."""
    return operator.overloadpacket in _PRODUCTS


def factors_of(operator: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that an operator multiplies, without the one that the product is added to."""
    tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
    return tensors[1:] if operator.overloadpacket in _SUMS else tensors


def find_zero(left: Tensor, right: Tensor, kind: str, *, weight_is_left: bool) -> Tensor | None:
    """Return which rows contribute nothing to a product because they are exactly zero; None if the factors cannot be
    read. In ``dgrad`` a row of the gradient gives one row of the result; ``weight_is_left``: the gradient is the second
    factor, transposed. In ``wgrad`` it gives one term of the sum, with a row of the saved input, and the term is zero
    if either is."""
    if not (is_plain(left) and is_plain(right)):
        return None
    if kind == DGRAD:
        return (right == 0).all(dim=0) if weight_is_left else (left == 0).all(dim=1)
    return (left == 0).all(dim=0) | (right == 0).all(dim=1)
