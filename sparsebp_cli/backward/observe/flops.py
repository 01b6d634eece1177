"""Counts executed multiplications when operators reach the device's kernels.

The formulas come from ``torch.utils.flop_counter``. We add formulas for operators that it does not count, overcounts or
refuses: attention on a CPU, attention with fewer heads of keys than of queries (pytorch #177188), grouped products and
convolutions, LSTM layers on a CPU, in-place sums of products, products with a vector, and sparse products, in which
each stored entry is multiplied. As in PyTorch, attention counts the whole square, causal or not. The engine's kernels
need no formula, since they multiply gathered rows by ordinary matrix products.

Counting slows a pass down, so count on passes that are not timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from sparsebp_cli.backward.observe.internals import count_stored
from sparsebp_cli.backward.observe.module_trace import ModuleTrace, is_in_backward

if TYPE_CHECKING:
    from torch._ops import OpOverload


class FlopCount:
    """FLOPs by operator, and by module if modules are traced; a multiplication and an addition count 2.

    Attributes:
        by_operator: FLOPs of forward and backward together.
        forward: FLOPs by the innermost running module.
        backward: FLOPs by the innermost module whose forward created the running node; ``""``: outside of modules.
        recomputed: FLOPs of forwards repeated inside the backward, by module; not part of ``backward``.
        is_ahead: Whether the forward is computing gradients of its backward.
    """

    def __init__(self) -> None:
        self.by_operator: Counter[str] = Counter()
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.recomputed: Counter[str] = Counter()
        self.is_ahead = False

    @property
    def total(self) -> int:
        """FLOPs of all operators."""
        return sum(self.by_operator.values())

    def add(self, operator: str, flops: int, modules: ModuleTrace | None) -> None:
        """Count one operator.

        Args:
            operator: Name of the operator, such as ``aten.mm``.
            flops: Number of its FLOPs in this call.
            modules: Finds the operator's module; None: do not count by module.
        """
        self.by_operator[operator] += flops
        if modules is None or not flops:
            return
        if self.is_ahead:
            self.backward[modules.current] += flops
        elif not is_in_backward():
            self.forward[modules.current] += flops
        elif modules.is_running:
            self.recomputed[modules.current] += flops
        else:
            self.backward[modules.current] += flops


@dataclass(frozen=True)
class DensePass:
    """The counted FLOPs of a forward and backward without policies."""

    loss: torch.Tensor  # its graph exists, without the saved tensors
    trace: ModuleTrace
    flops: FlopCount


@dataclass(frozen=True)
class PassEstimate:
    """Estimated fractions of a dense pass's FLOPs under a policy, by module. A module that is not listed keeps all.

    The engine multiplies the fractions of several policies.
    """

    backward: Mapping[str, float] = field(default_factory=dict)  # in [0, 1]
    recomputed: Mapping[str, float] = field(default_factory=dict)  # for forwards repeated in the backward, in [0, 1]
    forward: Mapping[str, float] = field(default_factory=dict)  # at least 0; may exceed 1
    # The same fractions with counts rounded up to computable shapes; empty: no rounding.
    allowed_backward: Mapping[str, float] = field(default_factory=dict)
    allowed_recomputed: Mapping[str, float] = field(default_factory=dict)


@contextmanager
def count_flops(modules: ModuleTrace | None = None) -> Iterator[FlopCount]:
    """Count the FLOPs of everything that runs in the block, forward or backward.

    Args:
        modules: A trace entered before, for counts by module; None: no counts by module.

    Yields:
        FlopCount: Grows while the block runs.
    """
    count = FlopCount()
    with _Counting(count, modules):
        yield count


def counting_now() -> FlopCount | None:
    """Return the innermost active count of this thread, or None."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Counting)]
    return modes[-1].count if modes else None


@contextmanager
def counting_as_backward() -> Iterator[None]:
    """Count operators in the block as the backward of the running module, in all counts of this thread."""
    counts = [mode.count for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Counting)]
    for count in counts:
        count.is_ahead = True
    try:
        yield
    finally:
        for count in counts:
            count.is_ahead = False


class _Counting(TorchDispatchMode):
    def __init__(self, count: FlopCount, modules: ModuleTrace | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.modules = count, modules

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        formula = find_formula(func)
        if formula is None:
            # The same exception as in torch.utils.flop_counter.
            if func is not torch.ops.prim.device.default and func not in _WHOLE:
                with self:  # under inference mode composite operators arrive undecomposed
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
                _WHOLE.add(func)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self.count.add(str(func.overloadpacket), int(formula(*args, **kwargs, out_val=result)), self.modules)
        return result


def find_formula(operator: OpOverload) -> Callable[..., int] | None:
    """Return the FLOP formula of an operator, called with its arguments and its result as ``out_val``.

    None for an operator that multiplies nothing.
    """
    packet = operator.overloadpacket
    formula: Callable[..., int] | None = _FORMULAS.get(packet) or flop_registry.get(packet)
    return formula or _FOREIGN.get(str(packet))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> int:
    if grad is None:  # autograd also calls the kernel without a gradient, and it returns at once
        return 0
    # Three products with the key width: scores again, gradients of query and key. Two with the value width.
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _sequences(query: torch.Tensor, value: torch.Tensor, *ends: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the pairs of a query and a key in all heads, and the sizes of a query and of a value.

    Tensors are (rows, heads, size) with the end of each sequence, or (batch, rows, heads, size) without ends.
    """
    sizes = query.shape[-1], value.shape[-1]
    if ends[0] is None or ends[1] is None:
        return query[..., 0].numel() * value.shape[1], *sizes
    lengths = (end.diff().tolist() for end in ends if end is not None)
    return query.shape[1] * sum(a * b for a, b in zip(*lengths, strict=True)), *sizes


def _varlen(query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *rest: Any, **__: object) -> int:
    pairs, size, value_size = _sequences(query, value, *rest[:2])
    return 2 * pairs * (size + value_size)


def _varlen_backward(
    _: torch.Tensor, query: torch.Tensor, __: torch.Tensor, value: torch.Tensor, *rest: Any, **___: object
) -> int:
    pairs, size, value_size = _sequences(query, value, *rest[2:4])
    return 2 * pairs * (3 * size + 2 * value_size)


def _grouped(a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> int:
    flops = 2 * a.numel() * b.shape[-1]
    return flops // a.shape[0] if a.dim() == 3 and b.dim() == 2 else flops  # each group has its own part of b


def _product(a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> int:
    if _is_sparse(a):
        return 2 * count_stored(a) * (b.shape[1] if b.dim() == 2 else 1)
    if _is_sparse(b):
        return 2 * count_stored(b) * a.shape[0]
    return 2 * a.numel() * (b.shape[1] if b.dim() == 2 else 1)


def _sum_and_product(_: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *__: object, **___: object) -> int:
    return _product(a, b)


def _batched(a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * a.numel() * b.shape[-1]


def _sum_and_batched(_: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *__: object, **___: object) -> int:
    return _batched(a, b)


def _quantized(a: torch.Tensor, _: torch.Tensor, shape: Sequence[int], *__: object, **___: object) -> int:
    return 2 * a.numel() * shape[0]  # without the restoring of the weight


def _convolution_backward(
    grad: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, *rest: Any, **_: object
) -> int:
    """Return the FLOPs of a convolution's backward: each gradient needs as many as the forward.
    torch.utils.flop_counter ignores groups for the weight's gradient."""
    transposed, output_mask = rest[4], rest[7]
    each = 2 * (given if transposed else grad).numel() * weight[0].numel()
    return each * (bool(output_mask[0]) + bool(output_mask[1]))


def _recurrent(given_TBD: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * given_TBD[..., 0].numel() * (weight.numel() + hidden.numel())


def _recurrent_backward(
    given_TBD: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, *_: object, **__: object
) -> int:
    return 2 * _recurrent(given_TBD, weight, hidden)  # the kernel always computes gradients of both input and weights


def _is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


# Operators that are not composed of others. Checking this at each call would take as long as many of them run.
_WHOLE: set[object] = set()
# By name, since these operators exist only after an import of their library.
_FOREIGN: dict[str, Callable[..., int]] = {"bitsandbytes.gemm_4bit": _quantized}
_ATEN = torch.ops.aten
_FORMULAS: dict[object, Callable[..., int]] = {
    _ATEN.mm: _product,
    _ATEN.mv: _product,
    _ATEN.dot: _product,
    _ATEN.vdot: _product,
    _ATEN.addmm: _sum_and_product,
    _ATEN.addmv: _sum_and_product,
    _ATEN.addmm_: _sum_and_product,
    _ATEN.addmv_: _sum_and_product,
    _ATEN.baddbmm_: _sum_and_batched,
    _ATEN.addbmm: _sum_and_batched,
    _ATEN.addbmm_: _sum_and_batched,
    _ATEN._int_mm: _product,  # noqa: SLF001
    _ATEN.convolution_backward: _convolution_backward,
    _ATEN.mkldnn_rnn_layer: _recurrent,
    _ATEN.mkldnn_rnn_layer_backward: _recurrent_backward,
    _ATEN._sparse_addmm: _sum_and_product,  # noqa: SLF001 - the operators' names
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,  # noqa: SLF001
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,  # noqa: SLF001
    _ATEN._flash_attention_forward: _varlen,  # noqa: SLF001
    _ATEN._flash_attention_backward: _varlen_backward,  # noqa: SLF001
    _ATEN._grouped_mm: _grouped,  # noqa: SLF001
}
for _kind in ("flash", "efficient", "cudnn"):
    _FORMULAS[getattr(_ATEN, f"_scaled_dot_product_{_kind}_attention")] = _attention
    _FORMULAS[getattr(_ATEN, f"_scaled_dot_product_{_kind}_attention_backward")] = _attention_backward
