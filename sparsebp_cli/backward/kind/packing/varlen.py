"""Variable-length attention over packed rows on a GPU: two kernel calls a layer, without masks or copies of keys.

One call covers all segments: each row attends to the earlier rows of its own segment, or to all of them. A second call
covers segments that follow other rows: each row attends to all rows before its segment, which are listed once for all
segments that share them. The two results are merged by their log-sum-exp. Each backward call gets the merged output and
log-sum-exp, from which the kernel computes the exact probabilities of its part.

Shape letters: N rows, H heads of queries, J heads of keys, M queries, K keys, S sequences, D size of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes

from sparsebp_cli.policy.kernel import is_disabled

Ints = npt.NDArray[np.int64]
Rows = slice | Tensor  # of the first rows, or by index
NO_ROWS: Ints = np.zeros(0, np.int64)
log = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)  # of the flash kernel
LARGEST_HEAD = 256  # of the flash kernel, which also requires a multiple of 8
# The public function of torch.nn.attention.varlen has no backward that accepts the output of merged calls.
FORWARD = torch.ops.aten._flash_attention_forward.default  # noqa: SLF001
BACKWARD = torch.ops.aten._flash_attention_backward.default  # noqa: SLF001


def has_kernel(device: torch.device) -> bool:
    """Return whether a device may have the kernel."""
    return device.type == "cuda" and not is_disabled()


@dataclass(frozen=True)
class Sequences:
    """Sequences of queries and of keys for one call. Tensors are on the model's device."""

    query_end: Tensor  # (S + 1) int32: 0, then the end of each sequence among the queries
    key_end: Tensor  # (S + 1) int32
    max_query: int  # queries of the longest sequence
    max_key: int
    query_M: Rows  # which of all queries, in the order of the sequences
    key_K: Rows  # which of all keys
    num_pairs: int  # of a query and a key in one sequence


@dataclass(frozen=True)
class VarlenPlan:
    """The two calls of a layer."""

    own: Sequences
    before: Sequences | None  # None: no segment follows other rows


def plan_calls(
    queries: Sequence[Ints], rows: Sequence[Ints], before: Sequence[Ints], device: torch.device
) -> VarlenPlan | None:
    """Return the calls for segments, in the order of the queries.

    ``queries`` are the rows of each segment that attend, ``rows`` all of its rows, ``before`` the rows before it, each
    as row numbers. None where the queries are not the last rows of their segment, which a causal call needs.
    """
    if not all(np.array_equal(q, own[len(own) - len(q) :]) for q, own in zip(queries, rows, strict=True)):
        return None
    starts = np.cumsum([0, *map(len, queries)])
    by_chain: dict[bytes, list[int]] = {}
    for number, chain in enumerate(before):
        if len(chain):
            by_chain.setdefault(chain.tobytes(), []).append(number)
    groups = [np.concatenate([np.arange(starts[n], starts[n + 1]) for n in ns]) for ns in by_chain.values()]
    chains = [before[numbers[0]] for numbers in by_chain.values()]
    own = _sequences([np.arange(a, b) for a, b in pairwise(starts)], rows, device)
    return VarlenPlan(own, _sequences(groups, chains, device) if groups else None)


def _sequences(queries: Sequence[Ints], keys: Sequence[Ints], device: torch.device) -> Sequences:
    ends = [np.cumsum([0, *map(len, parts)]) for parts in (queries, keys)]
    rows = [np.concatenate(parts) for parts in (queries, keys)]
    numbers = [*ends, *rows]
    with torch.inference_mode(False):  # a training may use the plan of an evaluation
        copied = torch.from_numpy(np.concatenate(numbers)).to(device).split([*map(len, numbers)])  # one copy
        query_end, key_end = copied[0].int(), copied[1].int()
    query_M, key_K = (
        slice(len(part)) if np.array_equal(part, np.arange(len(part))) else copy
        for part, copy in zip(rows, copied[2:], strict=True)
    )
    sizes = max(map(len, queries)), max(map(len, keys))
    num_pairs = sum(len(query) * len(key) for query, key in zip(queries, keys, strict=True))
    return Sequences(query_end, key_end, *sizes, query_M, key_K, num_pairs)


def attend(
    query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan, options: Mapping[str, Any], *, is_causal: bool
) -> Tensor | None:
    """Return attention (1, M, H, D) over queries (1, H, M, D) and keys (1, J, N, D).

    ``options`` are those of transformers' SDPA attention, and ``is_causal`` is about rows of the same segment. None
    where the kernel cannot run, or was wrong in a small case.
    """
    size, dtype, scale = query.shape[3], _dtype_of(query), options.get("scaling")
    if not is_right(query.device, dtype, size, query.shape[1], key.shape[1]):
        return None
    rows = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    rows = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in rows)  # the kernel requires it
    scale = size**-0.5 if scale is None else float(scale)
    output: Tensor = _Merged.apply(*rows, plan, scale, is_causal)  # type: ignore[no-untyped-call]
    return output[None]


def fits(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> bool:
    """Return whether the kernel supports these tensors and options of transformers' SDPA attention."""
    if any(options.get(name) for name in ("dropout", "softcap")) or options.get("s_aux") is not None:
        return False
    size = query.shape[3]
    is_whole = size % 8 == 0 and size <= LARGEST_HEAD and {key.shape[3], value.shape[3]} == {size}
    return is_whole and _dtype_of(query) in DTYPES and not torch.compiler.is_compiling()


def _dtype_of(query: Tensor) -> torch.dtype:
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


class _Merged(torch.autograd.Function):
    """Attention of queries (M, H, D) to keys (N, J, D) by the calls of a plan."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan, scale: float, is_causal: bool
    ) -> Tensor:
        output, total = _call(query, key, value, plan.own, scale, is_causal=is_causal)
        if plan.before is not None:
            part, sums = _call(query, key, value, plan.before, scale, is_causal=False)
            index = plan.before.query_M
            own_sums = total[:, index]
            sums_HM = torch.logaddexp(own_sums, sums)
            merged = output[index] * _weight(own_sums, sums_HM) + part * _weight(sums, sums_HM)
            output[index], total[:, index] = merged.to(output.dtype), sums_HM
        ctx.save_for_backward(query, key, value, output, total)
        ctx.plan, ctx.scale, ctx.is_causal = plan, scale, is_causal
        num_pairs = sum(sequences.num_pairs for sequences in (plan.own, plan.before) if sequences is not None)
        ctx.products = 10.0 * num_pairs * query.shape[1] * query.shape[2]  # FLOPs of the backward's five products
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, plan = ctx.saved_tensors, ctx.plan
        totals = [torch.zeros_like(tensor) for tensor in saved[:3]]
        for sequences, is_causal in ((plan.own, ctx.is_causal), (plan.before, False)):
            if sequences is None:
                continue
            query_M, key_K = sequences.query_M, sequences.key_K
            query, key, value, output, total = saved
            rows = query[query_M], key[key_K], value[key_K], output[query_M], total[:, query_M]
            parts = _call_backward(grad[query_M], *rows, sequences, ctx.scale, is_causal=is_causal)
            for whole, part, index in zip(totals, parts, (query_M, key_K, key_K), strict=True):
                if isinstance(index, slice):
                    whole[index] += part
                else:
                    whole.index_add_(0, index, part)
        return (*totals, None, None, None)


def _weight(part_HM: Tensor, whole_HM: Tensor) -> Tensor:
    """Return a part's share (M, H, 1) of the sum of exponentials."""
    return (part_HM - whole_HM).exp().transpose(0, 1)[..., None]


def _call(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output (M, H, D) and log-sum-exp (H, M) of one call."""
    query, key, value = query[sequences.query_M], key[sequences.key_K], value[sequences.key_K]
    ends, sizes = (sequences.query_end, sequences.key_end), (sequences.max_query, sequences.max_key)
    found = FORWARD(query, key, value, *ends, *sizes, 0.0, is_causal, False, scale=scale)
    return found[0], found[1]


def _call_backward(  # noqa: PLR0913 - what one call of the kernel reads
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    sequences: Sequences,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
    ends, sizes = (sequences.query_end, sequences.key_end), (sequences.max_query, sequences.max_key)
    rest = (*ends, *sizes, 0.0, is_causal, random, query.new_empty(0))
    found: tuple[Tensor, Tensor, Tensor] = BACKWARD(
        grad.contiguous(), query, key, value, output, total.contiguous(), *rest, scale=scale
    )
    return found


_FOUND: dict[tuple[object, ...], bool] = {}  # the results of small cases


def is_right(device: torch.device, dtype: torch.dtype, size: int, heads: int, key_heads: int) -> bool:
    """Return whether the calls give the output and gradients of PyTorch's attention in a small case.

    The first call for each dtype and shape of heads waits for the device.
    """
    which = device, dtype, size, heads, key_heads
    if which in _FOUND:
        return _FOUND[which]
    try:
        # Neither a counter of FLOPs nor a mode without gradients belongs to the small case.
        with _disable_current_modes(), torch.inference_mode(False):
            wrong = max(_compare(*which))
        reason = "" if wrong <= 4 * torch.finfo(dtype).eps else f"relative error {wrong:.1g}"
    except torch.OutOfMemoryError:
        return False  # this time
    except (RuntimeError, NotImplementedError) as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    if reason:
        log.warning("lossless cannot use a flash kernel on %s (%s): it calls SDPA per group of rows", device, reason)
    _FOUND[which] = not reason
    return not reason


def _compare(device: torch.device, dtype: torch.dtype, size: int, heads: int, key_heads: int) -> Iterator[float]:
    """Yield the relative error of the output and of each gradient."""
    # Two segments after the first, one alone, and one after two others, of which only the last rows attend.
    rows = np.split(np.arange(28), [9, 14, 21, 25])
    chains = [NO_ROWS, rows[0], rows[0], NO_ROWS, np.concatenate((rows[0], rows[2]))]
    queries = [*rows[:-1], rows[-1][1:]]
    allowed = torch.zeros(28, 28, dtype=torch.bool)
    for own, chain in zip(rows, chains, strict=True):
        allowed[np.ix_(own, np.concatenate((chain, own)))] = True
    attending = np.concatenate(queries)
    allowed = allowed.tril()[attending].to(device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(attending), heads, size), *[(28, key_heads, size)] * 2, (len(attending), heads, size)]
    query, key, value, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    plan = plan_calls(queries, rows, chains, device)

    def merged(*leaves: Tensor) -> Tensor:
        output: Tensor = _Merged.apply(*leaves, plan, size**-0.5, True)  # type: ignore[no-untyped-call]
        return output

    def plain(*leaves: Tensor) -> Tensor:
        query, key, value = (leaf.transpose(0, 1)[None] for leaf in leaves)
        output = scaled_dot_product_attention(query, key, value, allowed, enable_gqa=True)
        return output[0].transpose(0, 1)

    reached = _differentiate(merged, (query, key, value), grad)
    with torch.autocast(device.type, enabled=False):
        wanted = _differentiate(plain, (query.float(), key.float(), value.float()), grad.float())
    for found, exact in zip(reached, wanted, strict=True):
        yield float((found.float() - exact).norm() / exact.norm())


def _differentiate(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    # Checkpointing counts saved tensors of the layer that runs; those of the small case are none of them.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        output = function(*leaves)
        return output.detach(), *torch.autograd.grad(output, leaves, grad)
