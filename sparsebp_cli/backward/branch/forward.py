"""How one residual branch is run while an engine is attached.

Two forms carry a decision out. *Masked*, the reference: the branch runs as it always does, and the gradient of its
output is masked. *Sparse recompute*, for rows: see :mod:`sparsebp_cli.backward.branch.recompute`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward.branch.branch import Branch, Call
from sparsebp_cli.backward.branch.cost import BranchCost
from sparsebp_cli.backward.branch.recompute import SparseRecompute
from sparsebp_cli.backward.patch.forward import ForwardOverride, call_module
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import GradientSelector, Rows, Selection, Site

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import SiteEngine


class BranchSite:
    """Where the policy is asked about one branch; see :class:`sparsebp_cli.backward.branch.recompute.RowSelector`.

    Args:
        branch: What is run.
        engine: Who knows the step and the policy.
    """

    def __init__(self, branch: Branch, engine: SiteEngine) -> None:
        self.branch, self.engine = branch, engine
        self.waiting: tuple[Tensor, Call] | None = None  # for the norm after the core
        self.input_needs_grad = True  # the core's, in the forward that was last

    @property
    def form(self) -> Literal["plain", "masked", "rows"]:
        """How a forward that begins now is run: as ever; as ever, with its gradient masked; or by sparse recompute."""
        if not (self.engine.enabled and torch.is_grad_enabled()):
            return "plain"
        policy = self._policy
        return "rows" if not self.engine.reference and policy is not None and policy.selection is Rows else "masked"

    @property
    def _policy(self) -> GradientSelector | None:
        return self.engine.policy_at(Site(self.branch.name, 0, (), self.branch.layer))

    def dense_flops(self, batch_shape: tuple[int, ...], call: Call) -> float:
        """Return what the dense backward of a forward in sparse recompute multiplies."""
        return self._work(batch_shape, call).claim(None, 1.0).dense_flops

    def decide(self, grad_NO: Tensor, batch_shape: torch.Size, call: Call | None) -> tuple[Tensor, Selection | None]:
        """Ask the policy what is kept.

        Args:
            grad_NO: The gradient of the branch's output.
            batch_shape: The output's shape without features.
            call: The forward in sparse recompute; None when the gradient is masked.

        Returns:
            The gradient to go on with, and what is kept; None for everything.
        """
        site = Site(self.branch.name, grad_NO.shape[1], tuple(batch_shape), self.branch.layer)
        return self.engine.decide(site, grad_NO, self._work(tuple(batch_shape), call))

    def _work(self, batch_shape: tuple[int, ...], call: Call | None) -> BranchCost:
        form: Literal["masked", "stored", "again", "whole"] = "masked"
        if call is not None:
            form = "whole" if call.whole else "stored" if call.stores else "again"
        return BranchCost(self.branch, form, batch_shape, self.input_needs_grad)


class BeforeOverride(ForwardOverride):
    """The ``forward`` of the norm before a core: passes the residual stream on, for the core to begin with."""

    def __init__(self, module: nn.Module, site: BranchSite) -> None:
        self.module, self.site = module, site
        self.shown: weakref.ref[Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.site.form != "rows":
            return cast("Tensor", call_module(self.module, x))
        self.shown = weakref.ref(x)
        return x


class CoreOverride(ForwardOverride):
    """The ``forward`` of an attention or MLP."""

    def __init__(self, site: BranchSite) -> None:
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site, branch, form = self.site, self.site.branch, self.site.form
        if form == "plain":
            return call_module(branch.core, *args, **kwargs)
        x, rest = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
        site.input_needs_grad = x.requires_grad
        if form == "masked":
            return _run_masked(site, args, kwargs)
        if branch.before is not None:
            site.input_needs_grad |= any(p.requires_grad for p in branch.before.parameters())
            _check_same(x, branch.before.__dict__["forward"].shown, f"the norm before {branch.name!r} and it")
        call = branch.enter(x, rest, kwargs)
        call.stores = site.engine.stores
        if call.whole:
            site.engine.notes[branch.name] = f"{branch.name} is computed again whole: {call.whole}"
        if branch.after is not None:
            site.waiting = (x, call)
            output = x
        else:
            output = SparseRecompute.apply(x, site, call, *branch.parameters())  # type: ignore[no-untyped-call]
        return output if branch.attention is None else (output, None)


class AfterOverride(ForwardOverride):
    """The ``forward`` of the norm after a core: runs the whole branch, where the core left it that."""

    def __init__(self, module: nn.Module, site: BranchSite) -> None:
        self.module, self.site = module, site

    def __call__(self, x: Tensor) -> Tensor:
        site, waiting = self.site, self.site.waiting
        site.waiting = None
        if waiting is None:
            output = cast("Tensor", call_module(self.module, x))
            return _gate(output, site) if site.form == "masked" else output
        stream, call = waiting
        _check_same(x, lambda: stream, f"{site.branch.name!r} and the norm after it")
        return cast("Tensor", SparseRecompute.apply(stream, site, call, *site.branch.parameters()))  # type: ignore[no-untyped-call]


def _check_same(x: Tensor, shown: Callable[[], Tensor | None] | None, between: str) -> None:
    if shown is None or shown() is not x:
        raise UnsupportedError(f"between {between} something is computed that the layout does not name")


def _run_masked(site: BranchSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    output = call_module(site.branch.core, *args, **kwargs)
    if site.branch.after is not None:
        return output
    if isinstance(output, tuple):
        return _gate(output[0], site), *output[1:]
    return _gate(output, site)


def _gate(output: Tensor, site: BranchSite) -> Tensor:
    return cast("Tensor", _Gate.apply(output, site))  # type: ignore[no-untyped-call]


@final
class _Gate(Function):
    """Does nothing, until the gradient arrives."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, site: BranchSite) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.site = site
        return output.view_as(output)

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
