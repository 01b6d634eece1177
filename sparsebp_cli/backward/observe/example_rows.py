"""Assigns the rows of a linear's output to examples if its input shape alone does not.

Most models keep examples in the first dimension. Some pass the rows of all examples to a linear in one dimension: OPT
in its MLP, mixtures of experts in their shared experts. Then this module reads the order of the rows from the autograd
graph, back to the reshape that joined them. If it cannot prove an order, it reports the order as unknown, and the
engine refuses policies that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from sparsebp_cli.backward.observe.internals import outputs_of
from sparsebp_cli.backward.patch.forward import NotCopyable

# Arguments of models whose first dimension is examples.
_MAIN = ("input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values", "labels")
_RESHAPES = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"))
# Operators whose output row i depends on input row i alone.
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
_PRODUCTS = {"MmBackward0": 0, "AddmmBackward0": 1}  # index of the input whose rows are the rows of the product
_MOST_NODES = 64
TIME_FIRST = "its module has batch_first=False, so positions come first"
UNPROVED = "its input has no dimension for examples"


class BatchRows(NamedTuple):
    """The rows of one call of a linear."""

    shape: tuple[int, ...]  # the output's shape without features; examples first, if known
    unknown: str = ""  # why the example of a row is unknown; empty if it is known


class BatchNote(NotCopyable):
    """A hook before the model's forward that reports the possible batch sizes, read from the first dimensions of
    its inputs.
    """

    def __init__(self, note: Callable[[frozenset[int]], None]) -> None:
        self._note = note

    def __call__(self, _: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Report the sizes, except under torch.compile."""
        if not torch.compiler.is_compiling():
            self._note(frozenset(_sizes(args, kwargs)))


def _sizes(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[int]:
    main = _with_examples((*args, *(kwargs.get(name) for name in _MAIN)))
    for value in main or _with_examples(kwargs.values()):
        yield value.shape[0]


def _with_examples(values: Iterable[object]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.dim() > 0]


def find_rows(x: Tensor, sizes: frozenset[int], *, time_first: bool) -> BatchRows | None:
    """Return the rows of a linear's input; None if its first dimension is examples.

    ``sizes`` are the possible batch sizes, empty if unknown; ``time_first``: the linear is in a torch module with
    ``batch_first=False``.
    """
    shape = tuple(x.shape[:-1])
    if time_first:
        return BatchRows(shape, TIME_FIRST)
    if not shape or shape[0] in sizes or (len(shape) > 1 and not sizes):
        return None
    if len(shape) > 1:
        return BatchRows(shape, f"its input has the shape {shape}, but the model got {_describe(sizes)}")
    found = _joined_from(x)
    if found is None:
        return BatchRows(shape, UNPROVED) if sizes else None
    unknown = "" if not sizes or found[0] in sizes else (f"its input was {found}, but the model got {_describe(sizes)}")
    return BatchRows(found, unknown)


def _describe(sizes: frozenset[int]) -> str:
    return f"{' or '.join(str(size) for size in sorted(sizes))} examples"


def _joined_from(x: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions that were joined into the rows of ``x``, the outermost first."""
    if x.grad_fn is None:
        base = x._base  # noqa: SLF001 - the tensor that a view is of has no public name
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
    """Yield the inputs of a node whose output row i depends only on input row i."""
    inputs = [
        (child, tuple(outputs_of(child)[output].shape)) for child, output in node.next_functions if child is not None
    ]
    name = node.name()
    if name in _ROW_BY_ROW or name in _RESHAPES:
        yield from inputs
    elif name in _PRODUCTS or (isinstance(node, BackwardCFunction) and hasattr(node, "decider")):
        child, output = node.next_functions[_PRODUCTS.get(name, 0)]
        if child is not None:
            yield child, tuple(outputs_of(child)[output].shape)


def find_time_first(model: nn.Module) -> frozenset[str]:
    """Return the names of modules inside PyTorch's attention layers with positions before examples."""
    found: set[str] = set()
    for name, module in model.named_modules():
        attention = module if isinstance(module, nn.MultiheadAttention) else getattr(module, "self_attn", None)
        if isinstance(attention, nn.MultiheadAttention) and not attention.batch_first:
            prefix = f"{name}." if name else ""
            found |= {prefix + inner for inner, _ in module.named_modules() if inner}
    return frozenset(found)
