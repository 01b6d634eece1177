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

from sparsebp_cli.backward.branch.branch import STREAM, Branch, Call
from sparsebp_cli.backward.branch.compiled import GraphForward
from sparsebp_cli.backward.branch.cost import BranchCost
from sparsebp_cli.backward.branch.recompute import SparseRecompute
from sparsebp_cli.backward.decoder.decoder import bind_arguments
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, call_module, uncompiled
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Rows, Selection, Site

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import SiteEngine


Form = Literal["plain", "masked", "rows"]


class BranchSite:
    """One branch as a site of the engine; a :class:`~sparsebp_cli.backward.branch.recompute.RowSelector`."""

    branch: Branch
    engine: SiteEngine
    graph: GraphForward
    input_needs_grad: bool

    def __init__(self, branch: Branch, engine: SiteEngine, patches: ForwardPatches) -> None:
        self.branch, self.engine = branch, engine
        self.graph = GraphForward(self, patches, stores=engine.stores)
        self._rows = engine.decisions.selection_at(self._site) is Rows and not engine.reference
        self.norm: BeforeOverride | None = None  # the override of the norm before the core
        self.pending: tuple[Tensor, Call] | None = None  # a core's input, until the norm after it runs the branch
        self.traced: tuple[Tensor, dict[str, object]] | None = None  # the same in a graph, and the core's arguments
        self.input_needs_grad = True  # of the core, in its latest forward

    @property
    def form(self) -> Form:
        """How to run a forward that starts now: unchanged, with the gradient of its output masked, or by sparse
        recompute.
        """
        if not (self.engine.enabled and torch.is_grad_enabled()):
            return "plain"
        if torch.compiler.is_compiling():  # a graph has one form, also where the policy is dense at some steps
            return "rows" if self._rows else "masked"
        policy = self.engine.policy_at(self._site)
        return "rows" if not self.engine.reference and policy is not None and policy.selection is Rows else "masked"

    @property
    def not_in_graphs(self) -> tuple[str, ...]:
        """Names of the core's arguments that a branch gets in another way, or not at all."""
        attention = self.branch.attention
        return STREAM, *(() if attention is None else (attention.cache,))

    @property
    def _site(self) -> Site:
        return Site(self.branch.name, 0, (), self.branch.layer)

    def mask(self, grad: Tensor) -> Tensor:
        """Return what the policy keeps of the gradient of the branch's output."""
        shown_NO = grad.reshape(-1, grad.shape[-1])
        grad_NO, selection = self.decide(shown_NO, grad.shape[:-1], None)
        if selection is None:
            return grad if grad_NO is shown_NO else grad_NO.view(grad.shape)
        return selection.apply(grad_NO).view(grad.shape)

    def begin(self, x: Tensor, kwargs: dict[str, object], *, input_needs_grad: bool) -> Call:
        """Return a record of a forward in a graph, whose backward begins now."""
        before = self.branch.before
        trains_before = before is not None and any(p.requires_grad for p in before.parameters())
        # A trained norm needs the gradient of the core's input, also where the stream itself needs none.
        self.input_needs_grad = input_needs_grad or trains_before
        return self.enter(x, (), kwargs)

    def enter(self, x: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> Call:
        """Return a record of a forward in sparse recompute."""
        call = self.branch.enter(x, args, kwargs)
        call.stores = self.engine.stores
        if call.whole_reason:
            self.engine.notes[self.branch.name] = f"{self.branch.name} is recomputed for all rows: {call.whole_reason}"
        return call

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
    num_readers: int

    def __init__(self, module: nn.Module, site: BranchSite) -> None:
        self.module, self.site, self.num_readers = module, site, 0
        self.shown: weakref.ref[Tensor] | None = None
        self._traced: Tensor | None = None
        self._left = 0

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_removed or self.site.form != "rows":
            output: Tensor = call_module(self.module, x)
            return output
        if torch.compiler.is_compiling():
            self._traced, self._left = x, self.num_readers
        else:
            # Weakly: the override outlives the step, and would hold the stream's memory until the next one.
            self.shown = weakref.ref(x)
        return x

    def take_traced(self) -> Tensor | None:
        """Return what the norm got in a graph; after the last core that reads it no graph has to return it."""
        traced, self._left = self._traced, self._left - 1
        if self._left <= 0:
            self._traced = None
        return traced


class CoreOverride(ForwardOverride):
    """The ``forward`` of an attention or MLP."""

    def __init__(self, site: BranchSite) -> None:
        self.site = site
        self._run_outside = uncompiled(self._recompute)

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
        is_compiling, between = torch.compiler.is_compiling(), f"the norm before {branch.name!r} and it"
        if not is_compiling:
            site.input_needs_grad = x.requires_grad
        if form == "masked":
            return _run_masked(site, args, kwargs)
        if is_compiling:
            # If only the core is compiled, the norm before it ran outside, and what it got is compared there.
            traced = None if site.norm is None else site.norm.take_traced()
            if traced is not None and traced is not x:
                raise UnsupportedError(_BETWEEN.format(between))
            branch.check_cache(kwargs)
            own = {name: value for name, value in kwargs.items() if name not in site.not_in_graphs}
            is_whole = traced is not None or (site.norm is None and branch.after is None)
            is_whole &= branch.adds is None
            if is_whole and site.graph.fits(rest, own):
                output = self._run_in_graph(x, own)
            else:
                output = self._run_outside(x, rest, kwargs, checks=traced is None)
        else:
            output = self._recompute(x, rest, kwargs)
        return (output, *[None] * (branch.num_outputs - 1)) if branch.num_outputs else output

    def _recompute(
        self, x: Tensor, rest: tuple[object, ...], kwargs: dict[str, object], *, checks: bool = True
    ) -> Tensor:
        site, branch = self.site, self.site.branch
        site.input_needs_grad = x.requires_grad
        if branch.before is not None:
            site.input_needs_grad |= any(p.requires_grad for p in branch.before.parameters())
            if checks:
                shown = branch.before.__dict__["forward"].shown
                _check_same(x, shown, f"the norm before {branch.name!r} and it")
        call = site.enter(x, rest, kwargs)
        if branch.after is not None:
            site.pending = (x, call)
            return x
        output: Tensor = SparseRecompute.apply(x, site, call, *branch.parameters())  # type: ignore[no-untyped-call]
        return output

    def _run_in_graph(self, x: Tensor, kwargs: dict[str, object]) -> Tensor:
        site = self.site
        if site.branch.after is not None:
            site.traced = (x, kwargs)
            return x
        return site.graph.run(x, kwargs)


class AfterOverride(ForwardOverride):
    """The ``forward`` of the norm after a core: in sparse recompute it runs the whole branch."""

    module: nn.Module
    site: BranchSite

    def __init__(self, module: nn.Module, site: BranchSite) -> None:
        self.module, self.site = module, site

    def __call__(self, x: Tensor) -> Tensor:
        site, pending, traced = self.site, self.site.pending, self.site.traced
        site.pending = site.traced = None
        if traced is not None:
            if traced[0] is not x:
                raise UnsupportedError(_BETWEEN.format(f"{site.branch.name!r} and the norm after it"))
            return site.graph.run(x, traced[1])
        if pending is None:
            output: Tensor = call_module(self.module, x)
            return _mask_gradient(output, site) if site.form == "masked" and not self.is_removed else output
        stream, call = pending
        _check_same(x, lambda: stream, f"{site.branch.name!r} and the norm after it")
        recomputed: Tensor = SparseRecompute.apply(stream, site, call, *site.branch.parameters())  # type: ignore[no-untyped-call]
        return recomputed


_BETWEEN = "the layer computes something between {} that its layout does not name"


def _check_same(x: Tensor, shown: Callable[[], Tensor | None] | None, between: str) -> None:
    if shown is None or shown() is not x:
        raise UnsupportedError(_BETWEEN.format(between))


def _run_masked(site: BranchSite, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    output = call_module(site.branch.core, *args, **kwargs)
    if site.branch.after is not None:
        return output
    if isinstance(output, tuple):
        return _mask_gradient(output[0], site), *output[1:]
    return _mask_gradient(output, site)


def _mask_gradient(output: Tensor, site: BranchSite) -> Tensor:
    if torch.compiler.is_compiling():
        return site.graph.mask(output)
    masked: Tensor = _MaskGradient.apply(output, site)  # type: ignore[no-untyped-call]
    return masked.clone() if site.branch.is_written else masked  # a view of a function's must not be written to


@final
class _MaskGradient(Function):
    """Identity in the forward; masks the gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, site: BranchSite) -> Tensor:
        # None stays None: as zeros a missing gradient would be shown to the policy.
        ctx.set_materialize_grads(False)
        ctx.site = site
        return output.view_as(output)  # autograd gives a node to a new tensor only, and this one costs no memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        return ctx.site.mask(grad), None
