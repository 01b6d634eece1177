"""Causal attention whose backward skips queries whose output has no gradient.

If a policy keeps rows at the linear after an attention, most rows of the attention's gradient are zero. PyTorch's
backward multiplies these zeros; this one runs only on the other queries. It is exact up to the order of sums.

Shape letters: B examples, T positions, H heads, D width, R rows with a gradient, K queries of each example.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from sparsebp_cli.backward.decoder.decoder import attention_name
from sparsebp_cli.backward.decoder.kept_queries import KeptQueries, add_prefixes, cut
from sparsebp_cli.backward.decoder.layout import find_child, find_layouts
from sparsebp_cli.backward.observe.internals import (
    FLASH_ON_CPU,
    FLASH_ON_CPU_BACKWARD,
    are_transforms_active,
    picks_flash,
)
from sparsebp_cli.backward.patch.forward import ForwardOverride
from sparsebp_cli.policy import Rows, Site

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import SiteEngine

# With fewer positions, or a larger fraction of queries with a gradient, gathering takes as long as the saved work.
_FEWEST_POSITIONS, _LARGEST_SHARE, _QUERIES_AT_ONCE = 128, 0.6, 64


@final
class AttentionOverride(ForwardOverride):
    """The ``forward`` of an attention before a linear at which a policy keeps rows."""

    module: nn.Module
    after: Site
    engine: SiteEngine

    def __init__(self, module: nn.Module, after: Site, engine: SiteEngine) -> None:
        self.module, self.after, self.engine = module, after, engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_removed or torch.compiler.is_compiling() or not (torch.is_grad_enabled() and self._keeps_rows()):
            return self.run_covered(self.module, *args, **kwargs)
        with _Attending():
            return self.run_covered(self.module, *args, **kwargs)

    def _keeps_rows(self) -> bool:
        policy = self.engine.policy_at(self.after)
        return policy is not None and policy.selection is Rows and not self.engine.reference


def find_attentions(model: nn.Module, linears: Collection[str]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the attentions of a model that may run through PyTorch's function, with the linear after each."""
    layouts = find_layouts({type(module).__name__ for module in model.modules()})
    for name, layer in model.named_modules():
        for layout in layouts.get(type(layer).__name__, ()):
            core: Any = find_child(layer, layout.core)
            last = f"{name}.{layout.core}.{layout.last}".removeprefix(".")
            is_attention = isinstance(core, nn.Module) and layout.attention is not None
            if is_attention and last in linears and attention_name(core) == "sdpa":
                yield core, last


@final
class _Attending(TorchFunctionMode):
    """Replaces PyTorch's attention if it is causal and would run by the CPU's flash kernel."""

    @override
    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        attend = _attend if function is scaled_dot_product_attention else function
        return attend(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    def run(key: Tensor, value: Tensor, **options: Any) -> Tensor:
        given: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return scaled_dot_product_attention(query, key, value, attn_mask, **given, **options)

    plain = attn_mask is None and is_causal and dropout_p == 0.0 and query.device.type == "cpu" and query.dim() == 4
    if not (plain and torch.is_grad_enabled()) or torch.is_autocast_enabled("cpu") or are_transforms_active():
        return run(key, value, enable_gqa=enable_gqa)
    heads, of_keys = query.shape[1], key.shape[1]
    if enable_gqa and of_keys != heads:  # as PyTorch does
        key, value = (x.repeat_interleave(heads // of_keys, 1) for x in (key, value))
    fits = query.shape == key.shape == value.shape and query.shape[2] >= _FEWEST_POSITIONS
    needed = all(x.requires_grad for x in (query, key, value))
    if not (fits and needed and picks_flash(query, key, value, scale)):
        return run(key, value)
    output: Tensor = _CausalAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return output


@final
class _CausalAttention(Function):
    """Attention by the same kernels that PyTorch calls."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        ctx.set_materialize_grads(False)
        # 8 for the four products of the gradient, and 2 because the kernel multiplies queries and keys again.
        ctx.scale, ctx.products = scale, 10.0 * query.numel() * key.shape[2]  # FLOPs of the dense backward
        output: Tensor
        output, log_sum = FLASH_ON_CPU(query, key, value, 0.0, True, scale=scale)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 4
        query, key, value, output, log_sum = ctx.saved_tensors
        saved = _Saved(query, key, value, output, log_sum, ctx.scale)
        rows_R = _find_rows(grad)
        num_examples, _, num_positions, _ = grad.shape
        if len(rows_R) > _LARGEST_SHARE * num_examples * num_positions:
            return *saved.differentiate(grad), None
        return *_differentiate(saved, grad, rows_R), None


@dataclass(frozen=True)
class _Saved:
    """Tensors saved by the forward, (B, H, T, D), and log_sum (B, H, T)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    log_sum: Tensor
    scale: float | None

    def differentiate(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        given = self.query, self.key, self.value, self.output, self.log_sum
        gradients: tuple[Tensor, Tensor, Tensor] = FLASH_ON_CPU_BACKWARD(grad, *given, 0.0, True, scale=self.scale)
        return gradients


def _find_rows(grad: Tensor) -> Tensor:
    """Return the ascending indices in B*T of rows that are not zero in every head."""
    # Sums of magnitudes do not underflow.
    size_BT: Tensor = torch.linalg.vector_norm(grad.transpose(1, 2).flatten(2), ord=1, dim=-1)
    return (size_BT != 0.0).flatten().nonzero().flatten()  # NaN counts as not zero


def _differentiate(saved: _Saved, grad: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_examples, num_heads, num_positions, width = grad.shape
    if not len(rows_R):
        return torch.zeros_like(saved.query), torch.zeros_like(saved.key), torch.zeros_like(saved.value)
    kept = KeptQueries.of(rows_R, num_examples, num_positions)
    position_BK = kept.positions(num_positions)

    def take(x: Tensor) -> Tensor:
        x_ND = x.transpose(1, 2).flatten(0, 1).flatten(1)
        return x_ND.index_select(0, kept.index_BK.flatten()).view(*kept.index_BK.shape, *x.shape[1::2]).transpose(1, 2)

    query, output, log_sum = take(saved.query), take(saved.output), take(saved.log_sum)
    grad_RD = grad.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, rows_R)
    grad = kept.spread(grad_RD).view(*position_BK.shape, num_heads, width).transpose(1, 2)
    of_queries, of_keys, of_values = [], [], []
    for chunk in cut(position_BK, _QUERIES_AT_ONCE):
        part, end = chunk.queries, chunk.num_keys
        sees = position_BK[:, part, None] >= torch.arange(end)
        mask = torch.zeros(sees.shape, dtype=query.dtype).masked_fill_(~sees, -torch.inf)[:, None]
        given = query[:, :, part], saved.key[:, :, :end], saved.value[:, :, :end], output[:, :, part]
        found = FLASH_ON_CPU_BACKWARD(
            grad[:, :, part], *given, log_sum[:, :, part], 0.0, False, attn_mask=mask, scale=saved.scale
        )
        of_queries.append(found[0].transpose(1, 2))
        of_keys.append((end, found[1]))
        of_values.append((end, found[2]))
    dquery_KD = torch.cat(of_queries, 1).flatten(0, 1).flatten(1)
    if kept.place_R is not None:
        dquery_KD = dquery_KD.index_select(0, kept.place_R)
    dquery = dquery_KD.new_zeros(num_examples, num_positions, num_heads, width)
    dquery.view(-1, num_heads * width).index_copy_(0, rows_R, dquery_KD)
    dkey, dvalue = (add_prefixes(parts, num_positions) for parts in (of_keys, of_values))
    return dquery.transpose(1, 2), dkey, dvalue
