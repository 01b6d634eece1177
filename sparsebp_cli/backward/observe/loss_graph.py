"""Reads the autograd graph below a loss before its backward: whether it contains a site, and the FLOPs of every
product.

FLOPs follow from the shapes of inputs and outputs that nodes store, without computing values or unpacking saved
tensors. They do not include forwards that checkpointed layers repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from sparsebp_cli.backward.observe.graph import LEAF, walk
from sparsebp_cli.backward.observe.internals import outputs_of

Shape = tuple[int, ...]

# Kinds of nodes that run other nodes, and so may hide sites.
_HIDING = ("checkpoint", "compiledfunction", "segmentfunction")

UNSEEN = (
    "this loss does not depend on the attached layers, so no policy would act: run the forward after attach and "
    "outside of engine.disabled(), or put the backward inside engine.disabled(), too"
)


def has_site(loss: Tensor, engine: object) -> bool:
    """Return whether the graph of a loss contains a site of an engine, or a node that may hide one."""
    # The search ends at the first site, which is usually a few nodes below the loss.
    root = getattr(loss, "grad_fn", None)
    if root is None:
        return True
    return any(_engine_of(node) is engine or _hides(node) for node in walk(root))


def _engine_of(node: Node) -> object:
    if not isinstance(node, BackwardCFunction):
        return None
    context: Any = node
    found = getattr(context, "decider", None) or getattr(context, "selector", None) or getattr(context, "site", None)
    return getattr(found, "engine", None)


def _hides(node: Node) -> bool:
    return isinstance(node, BackwardCFunction) and any(word in node.name().lower() for word in _HIDING)


@dataclass
class Products:
    """FLOPs of the products in the backward of one or more losses, dense at the sites."""

    total: float = 0.0
    # Products outside of sites, by the parameter multiplied with; the empty name is for products without a parameter,
    # such as queries times keys.
    by_parameter: dict[str, float] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)  # kinds of nodes that hide products; if any, `total` is incomplete

    def add(self, loss: Tensor, names: Mapping[int, str]) -> None:
        """Add a loss before its backward; ``names`` are the names of the model's parameters by ``id``."""
        for node in walk(loss.grad_fn):
            kind = node.name()
            if isinstance(node, BackwardCFunction):
                self._add_function(node, kind)
                continue
            # Names of native nodes end in a version number.
            formula = _FORMULAS.get(kind.rstrip("0123456789"))
            if formula is None:
                if any(word in kind for word in ("Rnn", "Lstm", "Gru")):
                    self.unknown.add(kind)
                continue
            flops = formula(node)
            if flops is None:
                self.unknown.add(kind)
            elif flops:
                self.total += flops
                name = _parameter_of(node, names)
                self.by_parameter[name] = self.by_parameter.get(name, 0.0) + flops

    def _add_function(self, node: Any, kind: str) -> None:
        if hasattr(node, "decider"):  # a linear of the engine
            shape = _output(node)
            self.total += 2.0 * prod(shape) * node.input_shape[-1] * sum(map(bool, node.needs_input_grad[:2]))
        elif hasattr(node, "products"):  # an attention, outside of sites
            self.total += node.products
            self.by_parameter[""] = self.by_parameter.get("", 0.0) + node.products
        elif kind not in _WITHOUT_PRODUCTS:
            self.unknown.add(kind.removesuffix("Backward"))


# Python Functions without products: DDP's, and the padding of packed rows.
_WITHOUT_PRODUCTS = ("_DDPSinkBackward", "_WithPaddingBackward", "_WithoutPaddingBackward")


def _output(node: Any) -> Shape:
    return tuple(outputs_of(node)[0].shape)


def _input(node: Node, number: int) -> Shape | None:
    """Return the shape of an input if its gradient is computed, else None."""
    if number >= len(node.next_functions):
        return None
    child, output = node.next_functions[number]
    return None if child is None else tuple(outputs_of(child)[output].shape)


def _product(first: int) -> Callable[[Node], float | None]:
    """Return the FLOP formula of a product, batched or not, of the inputs ``first`` and the next."""

    def count(node: Node) -> float | None:
        left, right = _input(node, first), _input(node, first + 1)
        if left is None and right is None:
            return 0.0
        inner = left[-1] if left is not None else right[-2 if len(right) > 1 else 0] if right else 1
        each = 2.0 * prod(_output(node)) * inner
        return each * ((left is not None) + (right is not None))

    return count


def _batched_sum(node: Node) -> float | None:
    left, right = _input(node, 1), _input(node, 2)  # (b, n, k) and (b, k, m); the output has no b
    known = left or right
    if known is None:
        return 0.0
    inner = known[0] * (left[2] if left is not None else known[1])
    return 2.0 * prod(_output(node)) * inner * ((left is not None) + (right is not None))


def _attention(node: Node) -> float | None:
    query, key, value = (_input(node, number) for number in range(3))
    *rows, value_width = _output(node)
    if query is None and key is None and value is None:
        return 0.0
    width = query[-1] if query is not None else key[-1] if key is not None else None
    length = key[-2] if key is not None else value[-2] if value is not None else None
    if width is None or length is None:
        return None
    return 2.0 * prod(rows) * length * (3 * width + 2 * value_width)


def _convolution(node: Any) -> float | None:
    given, weight = _input(node, 0), _input(node, 1)
    if given is None and weight is None:
        return 0.0
    if weight is None:
        weight = tuple(node._saved_weight.shape)  # noqa: SLF001 - a parameter that is not trained
    if node._saved_transposed:  # noqa: SLF001
        if given is None:
            return None
        each = 2.0 * prod(given) * prod(weight[1:])
    else:
        each = 2.0 * prod(_output(node)) * prod(weight[1:])
    return each * ((_input(node, 0) is not None) + (_input(node, 1) is not None))


_FORMULAS: dict[str, Callable[[Any], float | None]] = {
    "MmBackward": _product(0),
    "BmmBackward": _product(0),
    "MvBackward": _product(0),
    "DotBackward": _product(0),
    "AddmmBackward": _product(1),
    "BaddbmmBackward": _product(1),
    "AddmvBackward": _product(1),
    "GroupedMmBackward": _product(0),
    "AddbmmBackward": _batched_sum,
    "ConvolutionBackward": _convolution,
    "ScaledDotProductFlashAttentionForCpuBackward": _attention,
    "ScaledDotProductFlashAttentionBackward": _attention,
    "ScaledDotProductEfficientAttentionBackward": _attention,
    "ScaledDotProductCudnnAttentionBackward": _attention,
}


def _parameter_of(node: Node, names: Mapping[int, str]) -> str:
    """Return the parameter that a product multiplies with, possibly viewed, cast or indexed."""
    for child, _ in node.next_functions:
        leaf = child
        while leaf is not None and leaf.name() != LEAF:
            leaf = leaf.next_functions[0][0] if len(leaf.next_functions) == 1 else None
        variable = getattr(leaf, "variable", None)
        if isinstance(variable, nn.Parameter) and variable.dim() > 1:
            return names.get(id(variable), "")
    return ""
