"""The backward of a linear layer that multiplies only the selected part of the gradient.

``dgrad`` is the gradient of the input, ``wgrad`` the gradient of the weight. The dense path makes the same calls as
PyTorch's own backward in the same order, so its results are bit-identical. Each type of selection has one fast kernel,
which equals the dense path on ``selection.apply(grad_NO)``. That masked path is the reference. It supports any
selection, and :func:`run_kernel` falls back to it where a kernel does not apply.

Shape letters: N rows (= B*T), D input width, O output width, K kept.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn.functional import pad

from sparsebp_cli.backward.core.extension import SplitCost
from sparsebp_cli.backward.core.report import FlopEstimate
from sparsebp_cli.backward.linear import cuda
from sparsebp_cli.policy import Blocks, Columns, Elements, Rows, Saved, Selection, Split, TwoToFour
from sparsebp_cli.policy.saved import WeightProduct

# Below this kept fraction of entries, a CSR product including conversion is faster than masking and a dense product.
# The measured break-even was 0.077: `sparsebp bench topk`, two CPU cores, torch 2.13, MKL, docs/log.md, 2026-11-21.
CSR_BELOW = 0.05

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Share = tuple[type[Selection] | None, float]  # a type of selection, None for dense, and the fraction that it keeps


class Needs(NamedTuple):
    """The gradients that autograd requires."""

    dgrad: bool
    wgrad: bool
    bias: bool


class SelectionSource(ABC):
    """The part of a site that the backward of a linear uses."""

    form: WeightLayout  # the layout of the layer's weight
    reference: bool  # whether to mask the gradient, then multiply densely

    @property
    def reads_input(self) -> bool:
        """Whether the decision needs the input, so that it is saved even if the weight is frozen."""
        return False

    @abstractmethod
    def decide(
        self, grad_NO: Tensor, batch_shape: torch.Size, num_inputs: int, needs: Needs, x_ND: Tensor | None = None
    ) -> Selection | Split | None:
        """Return the selection of a gradient; None keeps everything. ``x_ND`` is the saved input."""


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear, which ``nn.Module`` may declare as any tensor or module."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


class WeightLayout(WeightProduct):
    """How a linear layer stores its weight and multiplies."""

    replaces: ClassVar[bool] = False  # whether this form also runs without an active policy, with the same results
    is_quantized: ClassVar[bool] = False  # whether the weight is frozen, and must be restored before multiplication

    def apply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, decider: SelectionSource, saved: Saved | None = None
    ) -> Tensor:
        """Run the layer with a backward that calls the policy. Autograd saves ``saved`` instead of the input."""
        if torch.is_autocast_enabled(x.device.type):
            # Cast outside of the Function, so that autograd records the casts and returns gradients in full precision.
            x, weight, bias = autocast(x), autocast(weight), None if bias is None else autocast(bias)
        output: Tensor = SelectedLinear.apply(x, weight, bias, decider, saved)  # type: ignore[no-untyped-call]
        return output

    def share(self, selection: type[Selection] | None, budget: float) -> float:
        """Return the fraction of the dense multiplications that remains; see :func:`kernel_share`."""
        return kernel_share(selection, budget)

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output from the same call that the module itself makes."""

    @abstractmethod
    def by_output(self, weight: Tensor) -> Tensor:
        """Return the weight as (O, D), without a copy; restore a quantised weight first."""

    def sizes(self, weight: Tensor) -> tuple[int, int]:
        """Return the output and input width for any storage of the weight."""
        num_outputs, num_inputs = self.by_output(weight).shape
        return num_outputs, num_inputs

    def restore(self, weight: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002 - of quantised weights
        """Return the weight for a product. Restore a quantised weight in the given dtype."""
        return weight


@dataclass(frozen=True)
class LinearCost(SplitCost):
    """The FLOPs of dgrad and wgrad of one linear, if autograd requires them."""

    product_flops: float  # FLOPs of one dense product
    needs: Needs
    form: WeightLayout
    saved_share: float = 1.0  # fraction of wgrad's multiplications with the saved form of the input
    masked: frozenset[type[Selection]] = frozenset()  # types of selection that this device multiplies densely
    known: dict[Share, FlopEstimate] = field(default_factory=dict, compare=False, repr=False)  # earlier estimates

    def claim(self, selection: type[Selection] | None, budget: float) -> FlopEstimate:
        """Return the dense FLOPs, and the FLOPs that the kernel for this type of selection executes."""
        found = self.known.get((selection, budget))
        if found is not None:
            return found
        flops = self.product_flops * (self.needs.dgrad + self.needs.wgrad)
        left = self.product_flops * (self.needs.dgrad + self.needs.wgrad * self.saved_share)
        self.known[selection, budget] = found = FlopEstimate(flops, left * self._share(selection, budget))
        return found

    def claim_split(self, dgrad: Share, wgrad: Share) -> FlopEstimate:
        """Return the same for separate selections of dgrad and wgrad."""
        parts = [part for part, needed in ((dgrad, self.needs.dgrad), (wgrad, self.needs.wgrad)) if needed]
        left = sum(self._share(*part) for part in parts)
        return FlopEstimate(self.product_flops * len(parts), self.product_flops * left)

    def _share(self, selection: type[Selection] | None, budget: float) -> float:
        if selection is None or selection in self.masked:
            return 1.0
        return self.form.share(selection, budget)


class LinearLayout(WeightLayout):
    """``torch.nn.Linear``: the weight is (O, D)."""

    output_dim = 0

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    def by_output(self, weight: Tensor) -> Tensor:
        return weight

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        return grad_NO.t().mm(x_ND)


@final
class Conv1DLayout(WeightLayout):
    """``transformers`` ``Conv1D``: the weight is (D, O)."""

    output_dim = 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None, "Conv1D always has a bias"
        return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.shape[1])

    def by_output(self, weight: Tensor) -> Tensor:
        return weight.t()

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        return x_ND.t().mm(grad_NO)


@final
class MatmulLayout(LinearLayout):
    """A subclass of ``torch.nn.Linear`` that adds its bias after the product, such as Falcon's."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = x @ weight.T
        return output if bias is None else output + bias


Backward = Callable[[Any, Tensor | None], tuple[Tensor | None, ...]]


def differentiable_once(backward: Backward) -> Backward:
    """Return a backward like :func:`torch.autograd.function.once_differentiable`, without its cost if gradients are off
    already, as they are without ``create_graph``.
    """
    guarded: Backward = once_differentiable(backward)

    def run(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return guarded(ctx, grad) if torch.is_grad_enabled() else backward(ctx, grad)

    return run


@final
class SelectedLinear(Function):
    """A linear layer whose backward calls the policy. Saves the input only for wgrad and the weight only for dgrad.

    If there is ``saved``, it replaces the saved input and computes wgrad; then the policy selects nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        decider: SelectionSource,
        saved: Saved | None,
    ) -> Tensor:
        # Keep a missing gradient None. Zeros would be multiplied, and the policy would decide about them.
        ctx.set_materialize_grads(False)
        ctx.decider, ctx.input_shape = decider, x.shape
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        ctx.order = find_order(decider.form, x, frozen=not needs_wgrad)
        # Save tensors by autograd, not as attributes: it checks them for in-place changes, and hooks may offload them.
        if saved is not None and needs_wgrad:
            tensors, ctx.unpack = saved.pack()
            ctx.save_for_backward(None, weight if needs_dgrad else None, *tensors)
        else:
            keeps_input, ctx.unpack = needs_wgrad or decider.reads_input, None
            ctx.save_for_backward(x if keeps_input else None, weight if needs_dgrad else None)
        # Some layouts return a view. Autograd forbids in-place changes of a view created inside a Function, so the view
        # is detached.
        return decider.form.forward(x, weight, bias).detach()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        x, weight, *tensors = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad[:3])
        unpack = None if ctx.unpack is None else partial(ctx.unpack, tuple(tensors))
        weight = None if weight is None else ctx.decider.form.restore(weight, grad.dtype)
        dgrad_ND, wgrad, bias_grad = differentiate(
            ctx.decider, grad, x, weight, needs, ctx.input_shape[-1], ctx.order, unpack
        )
        return None if dgrad_ND is None else dgrad_ND.view(ctx.input_shape), wgrad, bias_grad, None, None


def differentiate(
    decider: SelectionSource,
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: Needs,
    num_inputs: int,
    order: Order,
    unpack: Callable[[], Saved] | None = None,
) -> Gradients:
    """Call the policy and multiply the kept part; return the gradients of input (N, D), weight and bias.

    ``x`` and ``weight`` are None if they were not saved. ``unpack`` returns the form that was saved instead of the
    input.
    """
    form, grad_NO = decider.form, grad.reshape(-1, grad.shape[-1])
    read_ND = None if x is None else x.reshape(-1, x.shape[-1])
    x_ND = read_ND if needs.wgrad else None
    selection = decider.decide(grad_NO, grad.shape[:-1], num_inputs, needs, read_ND)
    if isinstance(selection, Split):
        return _split(decider, grad_NO.view(grad.shape), x_ND, weight, selection, needs, order)
    dgrad, wgrad, bias_grad = _multiply(decider, grad, x_ND, weight, selection, needs, order)
    if unpack is not None:  # then the policy selects nothing
        saved = unpack()
        wgrad = Saved.multiply(saved, form, grad_NO) if decider.reference else saved.multiply(form, grad_NO)
    return dgrad, wgrad, bias_grad


def _multiply(
    decider: SelectionSource,
    grad: Tensor,
    x_ND: Tensor | None,
    weight: Tensor | None,
    selection: Selection | None,
    needs: Needs,
    order: Order,
) -> Gradients:
    """Multiply the selected part of a gradient; multiply densely without a selection or a fast kernel."""
    form, grad_NO = decider.form, grad.reshape(-1, grad.shape[-1])
    if selection is not None:
        gradients = None
        if not decider.reference:
            gradients = run_kernel(form, grad_NO, x_ND, weight, selection, needs)
        if gradients is not None:
            return gradients
        grad_NO = selection.apply(grad_NO)
        grad = grad_NO.view(grad.shape)  # else keep the strides of `grad`, which determine the order of sums
    dgrad = None if weight is None else _dense_dgrad(grad, form.by_output(weight), order)
    wgrad = None if x_ND is None else form.wgrad(grad_NO, x_ND)
    return dgrad, wgrad, _dense_bias_grad(grad, order) if needs.bias else None


def _split(
    decider: SelectionSource,
    grad: Tensor,
    x_ND: Tensor | None,
    weight: Tensor | None,
    split: Split,
    needs: Needs,
    order: Order,
) -> Gradients:
    """Multiply the selection of each product."""

    def multiply(selection: Selection | None, part: Needs) -> Gradients:
        x_part, weight_part = x_ND if part.wgrad else None, weight if part.dgrad else None
        return _multiply(decider, grad, x_part, weight_part, selection, part, order)

    dgrad, _, _ = multiply(split.dgrad, Needs(needs.dgrad, False, False))
    _, wgrad, bias_grad = multiply(split.wgrad, Needs(False, needs.wgrad, needs.bias and not split.full_bias))
    if split.full_bias:
        _, _, bias_grad = multiply(None, Needs(False, False, needs.bias))
    return dgrad, wgrad, bias_grad


class Order(NamedTuple):
    """The order in which PyTorch multiplies and adds, which depends on the strides of the input."""

    dgrad: Literal["rows", "columns", "batched"] = "rows"
    flat_bias: bool = True


def find_order(form: WeightLayout, x: Tensor, *, frozen: bool) -> Order:
    if x.is_contiguous() or form.is_quantized:
        return Order(flat_bias=not isinstance(form, MatmulLayout))
    flat_bias = x.dim() == 2 or isinstance(form, Conv1DLayout)  # other layouts add the bias after the product
    folds = all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))
    if not folds:
        return Order("batched" if frozen else "rows", flat_bias)
    x_ND = x.view(-1, x.shape[-1])
    # A product with a transposed operand sums in another order, so its last bits differ.
    by_columns = x_ND.stride(0) == 1 and x_ND.stride(1) == x_ND.shape[0]
    return Order("columns" if by_columns else "rows", flat_bias)


def _dense_dgrad(grad: Tensor, weight_OD: Tensor, order: Order) -> Tensor:
    grad_NO = grad.reshape(-1, grad.shape[-1])
    if order.dgrad == "columns":
        return weight_OD.t().mm(grad_NO.t()).t()
    if order.dgrad == "batched":
        grad_BTO = grad.reshape(-1, *grad.shape[-2:])
        return grad_BTO.bmm(weight_OD.expand(len(grad_BTO), -1, -1))
    return grad_NO.mm(weight_OD)


def _dense_bias_grad(grad: Tensor, order: Order) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).sum(0) if order.flat_bias else grad.sum_to_size(grad.shape[-1:])


def autocast(tensor: Tensor) -> Tensor:
    """Return a tensor as autocast would pass it to a product."""
    # Autocast casts floating-point arguments except float64. It also caches the cast of a weight, so that it sums the
    # gradients of a layer used twice in low precision. This function sums them in full precision.
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def kernel_share(selection: type[Selection] | None, budget: float) -> float:
    """Return the fraction of the dense multiplications that a kernel executes by design, in [0, 1].

    ``budget`` is the kept fraction of entries, in (0, 1]. 2:4 counts as dense: hardware that multiplies at twice the
    rate does not execute fewer operations.
    """
    if selection in (Rows, Columns, Blocks) or (selection is Elements and budget < CSR_BELOW):
        return budget
    return 1.0


def run_kernel(
    form: WeightLayout, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, selection: Selection, needs: Needs
) -> Gradients | None:
    """Multiply only the selected part; return the gradients of input (N, D), weight and bias.

    ``x_ND`` is None without wgrad, and ``weight`` is None without dgrad. Returns None if only the masked reference
    applies.
    """
    kernel = cuda.find_form(type(selection), grad_NO) or _KERNELS.get(type(selection))
    return None if kernel is None else kernel(form, grad_NO, x_ND, weight, selection, needs)


def _rows(
    form: WeightLayout, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, rows: Rows, needs: Needs
) -> Gradients:
    grad_KO = rows.gather(grad_NO)
    dgrad_ND = None
    if weight is not None:
        dgrad_KD = grad_KO.mm(form.by_output(weight))
        dgrad_ND = dgrad_KD.new_zeros(grad_NO.shape[0], dgrad_KD.shape[1]).index_copy_(0, rows.index_K, dgrad_KD)
    wgrad = None if x_ND is None else form.wgrad(grad_KO, x_ND.index_select(0, rows.index_K))
    return dgrad_ND, wgrad, grad_KO.sum(0) if needs.bias else None


def _columns(
    form: WeightLayout, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, columns: Columns, needs: Needs
) -> Gradients:
    grad_NK = columns.gather(grad_NO)
    num_outputs = grad_NO.shape[1]
    dgrad_ND = None
    if weight is not None:
        dgrad_ND = grad_NK.mm(form.by_output(weight.index_select(form.output_dim, columns.index_K)))
    wgrad = None
    if x_ND is not None:
        wgrad_K = form.wgrad(grad_NK, x_ND)  # (K, D) or (D, K), in the weight's layout
        shape = list(wgrad_K.shape)
        shape[form.output_dim] = num_outputs
        wgrad = wgrad_K.new_zeros(shape).index_copy_(form.output_dim, columns.index_K, wgrad_K)
    bias_grad = None
    if needs.bias:
        bias_grad = grad_NK.new_zeros(num_outputs).index_copy_(0, columns.index_K, grad_NK.sum(0))
    return dgrad_ND, wgrad, bias_grad


def _blocks(
    form: WeightLayout, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, blocks: Blocks, needs: Needs
) -> Gradients:
    """Multiply each kept block separately, and sum the products of a row or column of blocks in index order."""
    (rows, columns), (high, wide) = blocks.block_shape, blocks.grid(grad_NO)
    down, across = blocks.index_K // wide, blocks.index_K % wide
    num_rows, num_outputs = grad_NO.shape
    padded = pad(grad_NO, (0, wide * columns - num_outputs, 0, high * rows - num_rows))
    grad = padded.view(high, rows, wide, columns)[down, :, across]  # (K, rows, columns)
    if blocks.weight_K is not None:
        grad = grad * blocks.weight_K.to(grad.dtype)[:, None, None]
    dgrad_ND = wgrad = bias_grad = None
    if weight is not None:
        weight_OD = pad(form.by_output(weight), (0, 0, 0, wide * columns - num_outputs)).view(wide, columns, -1)
        products = grad.bmm(weight_OD[across])
        dgrad = products.new_zeros(high, *products.shape[1:]).index_add_(0, down, products)
        dgrad_ND = dgrad.view(high * rows, -1)[:num_rows]
    if x_ND is not None:
        x = pad(x_ND, (0, 0, 0, high * rows - num_rows)).view(high, rows, -1)
        products = grad.mT.bmm(x[down])
        wgrad_OD = products.new_zeros(wide, *products.shape[1:]).index_add_(0, across, products)
        wgrad = form.by_output(wgrad_OD.view(wide * columns, -1)[:num_outputs])
    if needs.bias:
        sums = grad.sum(1)
        bias_grad = sums.new_zeros(wide, columns).index_add_(0, across, sums).flatten()[:num_outputs]
    return dgrad_ND, wgrad, bias_grad


def _elements(
    form: WeightLayout, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, elements: Elements, needs: Needs
) -> Gradients | None:
    if not _csr_pays(grad_NO, elements):
        return None
    num_rows, num_outputs = grad_NO.shape
    # CSR stores entries row by row.
    index_K, order = elements.index_K.sort()
    value_K = elements.gather(grad_NO)[order]
    dgrad_ND = wgrad = bias_grad = None
    if weight is not None:
        dgrad_ND = _csr(index_K, value_K, num_rows, num_outputs) @ form.by_output(weight)
    if x_ND is not None:
        turned_K, turn = (index_K % num_outputs * num_rows + index_K // num_outputs).sort()
        wgrad = form.by_output(_csr(turned_K, value_K[turn], num_outputs, num_rows) @ x_ND)
    if needs.bias:
        bias_grad = value_K.new_zeros(num_outputs).index_add_(0, index_K % num_outputs, value_K)
    return dgrad_ND, wgrad, bias_grad


def _csr_pays(grad_NO: Tensor, elements: Elements) -> bool:
    mkl: bool = torch.backends.mkl.is_available()
    # On a CPU PyTorch multiplies CSR by MKL, and real numbers only in these two dtypes.
    backed = grad_NO.is_cuda or (mkl and grad_NO.dtype in (torch.float32, torch.float64))
    return backed and elements.index_K.numel() < CSR_BELOW * grad_NO.numel()


def _csr(index_K: Tensor, value_K: Tensor, num_rows: int, num_columns: int) -> Tensor:
    row_K = index_K.div(num_columns, rounding_mode="floor")
    starts = torch.searchsorted(row_K, torch.arange(num_rows + 1, device=index_K.device))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")  # PyTorch 2.11
        return torch.sparse_csr_tensor(
            starts, index_K % num_columns, value_K, (num_rows, num_columns), check_invariants=False
        )


def _two_to_four(
    form: WeightLayout, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, selection: TwoToFour, needs: Needs
) -> Gradients | None:
    """Compute dgrad on sparse tensor cores. wgrad stays dense, since it sums over rows, where the 2:4 pattern does not
    apply.
    """
    if weight is None or not _has_sparse_cores(grad_NO, weight):
        return None
    masked_NO = selection.apply(grad_NO).contiguous()  # required by to_sparse_semi_structured
    dgrad_ND = torch.mm(torch.sparse.to_sparse_semi_structured(masked_NO), form.by_output(weight))
    wgrad = None if x_ND is None else form.wgrad(masked_NO, x_ND)
    return dgrad_ND, wgrad, masked_NO.sum(0) if needs.bias else None


def _has_sparse_cores(grad_NO: Tensor, weight: Tensor) -> bool:
    if not grad_NO.is_cuda or grad_NO.dtype not in (torch.float16, torch.bfloat16):
        return False
    fits = all(size % 64 == 0 for size in (*grad_NO.shape, *weight.shape))
    # Ampere introduced sparse tensor cores.
    able = torch.cuda.get_device_capability(grad_NO.device) >= (8, 0) and torch.backends.cusparselt.is_available()
    return fits and able


_KERNELS: dict[type[Selection], Callable[..., Gradients | None]] = {
    Rows: _rows,
    Columns: _columns,
    Blocks: _blocks,
    Elements: _elements,
    TwoToFour: _two_to_four,
}
