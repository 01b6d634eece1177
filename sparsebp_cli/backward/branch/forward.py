"""The forward of one residual branch while an engine is attached.

A decision is carried out in one of two ways. *Masked*, the reference: the branch runs unchanged and the gradient of
its output is masked. *Sparse recompute*, for selections of rows: see :mod:`sparsebp_cli.backward.branch.recompute`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward.branch.branch import Branch, Call
from sparsebp_cli.backward.branch.cost import BranchCost
from sparsebp_cli.backward.branch.recompute import SparseRecompute
from sparsebp_cli.backward.decoder.decoder import bind_arguments
from sparsebp_cli.backward.patch.forward import ForwardOverride, call_module
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import GradientSelector, Rows, Selection, Site

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import SiteEngine


Form = Literal["plain", "masked", "rows"]


class BranchSite:
    """One branch as a site of the engine; a :class:`~sparsebp_cli.backward.branch.recompute.RowSelector`."""

    branch: Branch
    engine: SiteEngine

    def __init__(self, branch: Branch, engine: SiteEngine) -> None:
        self.branch, self.engine = branch, engine
        self.pending: tuple[Tensor, Call] | None = None  # a core's input, until the norm after it runs the branch
        self.input_needs_grad = True  # of the core, in its latest forward

    @property
    def form(self) -> Form:
        """How to run a forward that starts now: unchanged, with the gradient of its output masked, or by sparse
        recompute.
        """
        if not (self.engine.enabled and torch.is_grad_enabled()):
            return "plain"
        policy = self._policy
        return "rows" if not self.engine.reference and policy is not None and policy.selection is Rows else "masked"

    @property
    def _policy(self) -> GradientSelector | None:
        return self.engine.policy_at(Site(self.branch.name, 0, (), self.branch.layer))

    def dense_flops(self, batch_shape: tuple[int, ...], call: Call) -> float:
        """Return the FLOPs of the dense backward of a forward in sparse recompute."""
        return self._cost(batch_shape, call).claim(None, 1.0).dense_flops

    def decide(self, grad_NO: Tensor, batch_shape: torch.Size, call: Call | None) -> tuple[Tensor, Selection | None]:
        """Return the gradient to use and the policy's selection of it, None for all of it.

        ``call`` is the forward in sparse recompute, or None when the gradient is masked.
        """
        site = Site(self.branch.name, grad_NO.shape[1], tuple(batch_shape), self.branch.layer)
        return self.engine.decisions.decide(site, grad_NO, self._cost(tuple(batch_shape), call))

    def _cost(self, batch_shape: tuple[int, ...], call: Call | None) -> BranchCost:
        form: Literal["masked", "stored", "again", "whole"] = "masked"
        if call is not None:
            form = "whole" if call.whole_reason else "stored" if call.stores else "again"
        return BranchCost(self.branch, form, batch_shape, self.input_needs_grad)


class BeforeOverride(ForwardOverride):
    """The ``forward`` of the norm before a core: in sparse recompute it returns the residual stream for the core."""

    module: nn.Module
    site: BranchSite

    def __init__(self, module: nn.Module, site: BranchSite) -> None:
        self.module, self.site = module, site
        self.shown: weakref.ref[Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_removed or self.site.form != "rows":
            output: Tensor = call_module(self.module, x)
            return output
        self.shown = weakref.ref(x)
        return x


class CoreOverride(ForwardOverride):
    """The ``forward`` of an attention or MLP."""

    def __init__(self, site: BranchSite) -> None:
        self.site = site

    def __call__(self, *args: object, **kwargs: object) -> object:
        branch, form = self.site.branch, self.site.form
        if self.is_removed or form == "plain":
            return call_module(branch.core, *args, **kwargs)
        if branch.adds is None:
            return self._run(form, args, kwargs)
        # The stream that the core adds is no part of the branch.
        kwargs = bind_arguments(branch.core, args, kwargs)
        stream = kwargs[branch.adds]
        assert isinstance(stream, Tensor)
        output = self._run(form, (), kwargs | {branch.adds: stream.new_zeros(())})
        if isinstance(output, tuple):
            return stream + output[0], *output[1:]
        assert isinstance(output, Tensor)
        return stream + output

    def _run(self, form: Form, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        site, branch = self.site, self.site.branch
        x, rest = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
        assert isinstance(x, Tensor)
        site.input_needs_grad = x.requires_grad
        if form == "masked":
            return _run_masked(site, args, kwargs)
        if branch.before is not None:
            site.input_needs_grad |= any(p.requires_grad for p in branch.before.parameters())
            _check_same(x, branch.before.__dict__["forward"].shown, f"the norm before {branch.name!r} and it")
        call = branch.enter(x, rest, kwargs)
        call.stores = site.engine.stores
        if call.whole_reason:
            site.engine.notes[branch.name] = f"{branch.name} is recomputed for all rows: {call.whole_reason}"
        if branch.after is not None:
            site.pending = (x, call)
            output = x
        else:
            output = SparseRecompute.apply(x, site, call, *branch.parameters())  # type: ignore[no-untyped-call]
        return (output, *[None] * (branch.num_outputs - 1)) if branch.num_outputs else output


class AfterOverride(ForwardOverride):
    """The ``forward`` of the norm after a core: in sparse recompute it runs the whole branch."""

    module: nn.Module
    site: BranchSite

    def __init__(self, module: nn.Module, site: BranchSite) -> None:
        self.module, self.site = module, site

    def __call__(self, x: Tensor) -> Tensor:
        site, pending = self.site, self.site.pending
        site.pending = None
        if pending is None:
            output: Tensor = call_module(self.module, x)
            return _mask_gradient(output, site) if site.form == "masked" and not self.is_removed else output
        stream, call = pending
        _check_same(x, lambda: stream, f"{site.branch.name!r} and the norm after it")
        recomputed: Tensor = SparseRecompute.apply(stream, site, call, *site.branch.parameters())  # type: ignore[no-untyped-call]
        return recomputed


def _check_same(x: Tensor, shown: Callable[[], Tensor | None] | None, between: str) -> None:
    if shown is None or shown() is not x:
        raise UnsupportedError(f"the layer computes something between {between} that its layout does not name")


def _run_masked(site: BranchSite, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    output = call_module(site.branch.core, *args, **kwargs)
    if site.branch.after is not None:
        return output
    if isinstance(output, tuple):
        return _mask_gradient(output[0], site), *output[1:]
    return _mask_gradient(output, site)


def _mask_gradient(output: Tensor, site: BranchSite) -> Tensor:
    masked: Tensor = _MaskGradient.apply(output, site)  # type: ignore[no-untyped-call]
    return masked.clone() if site.branch.is_written else masked  # a view of a function's must not be written to


@final
class _MaskGradient(Function):
    """Identity in the forward; masks the gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, site: BranchSite) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.site = site
        return output.view_as(output)  # autograd gives a node to a new tensor only, and this one costs no memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        shown_NO = grad.reshape(-1, grad.shape[-1])
        grad_NO, selection = ctx.site.decide(shown_NO, grad.shape[:-1], None)
        if selection is None:
            return grad if grad_NO is shown_NO else grad_NO.view(grad.shape), None
        return selection.apply(grad_NO).view(grad.shape), None
