"""Which rows of a linear's output belong to which example, where its input does not show that by itself.

Most models keep examples in the first dimension. Some give a linear the rows of all examples in one dimension, as OPT
its MLP and mixtures of experts their shared ones: there the order of the rows is read off the autograd graph, up to the
reshape that joined them. Whatever cannot be proved is told as unknown, and refused when a policy asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from sparsebp_cli.backward.patch.forward import ForwardOverride

# What a model calls the argument whose first dimension is examples.
_MAIN = ("input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values", "labels")
_RESHAPES = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"))
# Row i of what these compute depends on row i of their input alone.
_ROW_BY_ROW = frozenset(
    f"{name}Backward0"
    for name in (
        *("Add", "Clamp", "ClampMin", "Clone", "Div", "Gelu", "Leaky_relu", "Mul", "NativeDropout", "NativeLayerNorm"),
        *(
            "Mean",
            "Neg",
            "Pow",
            "Relu",
            "Rsqrt",
            "Sigmoid",
            "Silu",
            "Softplus",
            "Sub",
            "Tanh",
            "ToCopy",
            "FusedRmsNorm",
        ),
    )
)
_PRODUCTS = {"MmBackward0": 0, "AddmmBackward0": 1}  # which input's rows those of the product are
_MOST_NODES = 64
UNPROVED = "rows lie in one dimension, and nothing proves their order"


class BatchRows(NamedTuple):
    """What is known of the rows that one call of a linear gives.

    Args:
        shape: The output's shape without features, with examples first where they are known.
        unknown: Why the example of a row is not known; empty where it is.
    """

    shape: tuple[int, ...]
    unknown: str = ""


class BatchNote(ForwardOverride):
    """A hook before the model's forward: notes how many examples the model is given.

    Args:
        note: Called with the numbers of examples that the first dimensions of its inputs may be.
    """

    def __init__(self, note: Callable[[frozenset[int]], None]) -> None:
        self._note = note

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Note it; what is compiled keeps no note."""
        if not torch.compiler.is_compiling():
            self._note(frozenset(_sizes(args, kwargs)))


def _sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[int]:
    main = [value for value in (*args, *(kwargs.get(name) for name in _MAIN)) if _has_examples(value)]
    for value in main or [value for value in kwargs.values() if _has_examples(value)]:
        yield value.shape[0]


def _has_examples(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def find_rows(x: Tensor, sizes: frozenset[int], *, time_first: bool) -> BatchRows | None:
    """Return what is known of the rows of a linear's input; None where its first dimension is examples.

    Args:
        x: The input.
        sizes: Numbers of examples that the model was given; empty: not known.
        time_first: Whether the linear is in a module of PyTorch with ``batch_first=False``.

    Returns:
        The rows.
    """
    shape = tuple(x.shape[:-1])
    if time_first:
        return BatchRows(shape, "it is in a module with batch_first=False, which has positions first")
    if not shape or shape[0] in sizes or (len(shape) > 1 and not sizes):
        return None
    if len(shape) > 1:
        return BatchRows(shape, f"its first dimension is {shape[0]}, and the model was given {_tell(sizes)}")
    found = _joined_from(x)
    if found is None:
        return BatchRows(shape, UNPROVED) if sizes else None
    unknown = (
        "" if not sizes or found[0] in sizes else f"rows come from {found}, and the model was given {_tell(sizes)}"
    )
    return BatchRows(found, unknown)


def _tell(sizes: frozenset[int]) -> str:
    return f"{' or '.join(str(size) for size in sorted(sizes))} examples"


def _joined_from(x: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions that were joined to the rows of ``x``, the first one outermost."""
    if x.grad_fn is None:
        base = x._base  # noqa: SLF001 - a view knows it by no other name
        same = base is not None and base.is_contiguous() and x.is_contiguous() and base.data_ptr() == x.data_ptr()
        if base is None or not same or base.dim() < 3 or base.shape[-1] != x.shape[-1] or base.numel() != x.numel():
            return None
        return tuple(base.shape[:-1])
    num_rows, waiting, seen = x.shape[0], [(x.grad_fn, tuple(x.shape))], 0
    while waiting and seen < _MOST_NODES:
        node, shape = waiting.pop()
        seen += 1
        if node.name() in _RESHAPES:
            source = tuple(node._saved_self_sym_sizes)  # type: ignore[attr-defined]  # noqa: SLF001 - PyTorch's name
            if len(source) > 2 and source[-1] == shape[-1]:
                return source[:-1]
            if source != shape:
                continue
        waiting += [(child, size) for child, size in _row_inputs(node) if len(size) == 2 and size[0] == num_rows]
    return None


def _row_inputs(node: Node) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """The inputs of which row i alone is what row i of the output depends on, as far as that is known."""
    inputs = [
        (child, tuple(child._input_metadata[output].shape))  # noqa: SLF001 - the same
        for child, output in node.next_functions
        if child is not None
    ]
    name = node.name()
    if name in _ROW_BY_ROW or name in _RESHAPES:
        yield from inputs
    elif name in _PRODUCTS or (isinstance(node, BackwardCFunction) and hasattr(node, "decider")):
        child, output = node.next_functions[_PRODUCTS.get(name, 0)]
        if child is not None:
            yield child, tuple(child._input_metadata[output].shape)  # noqa: SLF001


def find_time_first(model: nn.Module) -> frozenset[str]:
    """Return the names of modules inside of PyTorch's attention layers that have positions before examples."""
    found: set[str] = set()
    for name, module in model.named_modules():
        attention = module if isinstance(module, nn.MultiheadAttention) else getattr(module, "self_attn", None)
        if isinstance(attention, nn.MultiheadAttention) and not attention.batch_first:
            prefix = f"{name}." if name else ""
            found |= {prefix + inner for inner, _ in module.named_modules() if inner}
    return frozenset(found)
