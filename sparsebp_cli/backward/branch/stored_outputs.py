"""Outputs of a branch's linears, stored in the forward so that the backward need not multiply again.

Every linear's output is stored except the last one's, which no gradient depends on. To save memory, only keys and
values are stored, because all positions need them, and only if they are no wider than the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward.branch.branch import Branch, Call
from sparsebp_cli.backward.linear.function import SelectionSource, WeightLayout, weight_of
from sparsebp_cli.backward.linear.site import run_linear
from sparsebp_cli.backward.observe.internals import version_of
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards
from sparsebp_cli.policy import Saved, Selection


@contextmanager
def record_outputs(branch: Branch, call: Call) -> Iterator[None]:
    """Store outputs of linears in ``call.kept`` while the forward of a branch runs in the block."""
    versions: dict[str, int] = {}
    unusable: set[str] = set()

    def keep(name: str, module: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = call_module(module, x)
        if name in call.kept:
            unusable.add(name)  # called twice
        call.kept[name], versions[name] = output, version_of(output)
        return output

    names = () if call.whole_reason else names_to_keep(branch, stores=call.stores)
    wanted = [(name, module) for name, module, _ in branch.linears if name in names]
    with replace_forwards((module, partial(keep, name, module)) for name, module in wanted):
        yield
    # An output that was changed in place later (olmo clamps it) is not the linear's output any more.
    unusable |= {n for n, output in call.kept.items() if version_of(output) != versions[n]}
    for name in unusable:
        del call.kept[name]


def names_to_keep(branch: Branch, *, stores: bool) -> tuple[str, ...]:
    """Return the names of the linears whose outputs are stored."""
    return tuple(name for name, _, _ in branch.linears if _is_kept(branch, name, stores=stores))


def replay_outputs(
    branch: Branch, call: Call, index_K: Tensor | None
) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Return replacements of the forwards of those linears that need not multiply when a branch runs again.

    ``index_K`` has the rows that the branch runs on; None means all. The result is for
    :func:`~sparsebp_cli.backward.patch.forward.replace_forwards`.
    """
    modules: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
    for name, module, form in branch.linears:
        if name in call.kept:
            modules.append((module, partial(_replay, module, form, call.kept[name], index_K)))
        elif name == branch.last and branch.after is None:
            modules.append((module, partial(_replay, module, form, None, index_K)))
    return modules


def is_recomputed(branch: Branch, name: str, *, stores: bool, whole: bool) -> bool:
    """Whether a linear multiplies again when the branch is recomputed; ``whole``: for all rows, with nothing stored."""
    if name == branch.last and branch.after is None:
        return False
    return whole or not _is_kept(branch, name, stores=stores)


def _is_kept(branch: Branch, name: str, *, stores: bool) -> bool:
    if branch.attention is not None and name.partition(".")[0] in branch.attention.expands:
        return False  # it is run on keys, and everything else on the chosen queries
    # peft puts the adapted linear into a child `base_layer`. Its output is stored; the adapter itself is recomputed.
    if branch.attention is not None and name.removesuffix(".base_layer") in branch.attention.key_value:
        return stores or branch.keeps_keys
    return stores and not (name == branch.last and branch.after is None)


def _replay(module: nn.Module, form: WeightLayout, kept: Tensor | None, index_K: Tensor | None, x: Tensor) -> Tensor:
    known_form = _StoredOutputLayout(form, kept, index_K)
    if not (x.requires_grad or any(p.requires_grad for p in module.parameters(recurse=False))):
        return known_form.forward(x, weight_of(module), None)
    return run_linear(module, x, _Dense(known_form))


@final
class _StoredOutputLayout(WeightLayout):
    """The layout of a linear whose output is stored, or not needed."""

    def __init__(self, form: WeightLayout, kept: Tensor | None, index_K: Tensor | None) -> None:
        self.form, self.kept, self.index_K, self.output_dim = form, kept, index_K, form.output_dim

    @override
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.kept is None:
            # One number for all: no gradient depends on the last linear's output.
            return x.new_zeros(()).expand(*x.shape[:-1], self.form.sizes(weight)[0])
        if self.index_K is None:
            return self.kept
        rows = self.kept.reshape(-1, self.kept.shape[-1]).index_select(0, self.index_K)
        return rows.view(*x.shape[:-1], rows.shape[-1])  # there may be no rows

    @override
    def apply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, decider: SelectionSource, saved: Saved | None = None
    ) -> Tensor:
        return self.form.apply(x, weight, bias, decider, saved)

    def by_output(self, weight: Tensor) -> Tensor:
        return self.form.by_output(weight)

    @override
    def sizes(self, weight: Tensor) -> tuple[int, int]:
        return self.form.sizes(weight)

    @override
    def restore(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return self.form.restore(weight, dtype)

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        return self.form.wgrad(grad_NO, x_ND)


@dataclass(frozen=True)
class _Dense:
    """A :class:`sparsebp_cli.backward.linear.function.SelectionSource` that keeps everything."""

    form: WeightLayout
    reference: bool = True
    reads_input: bool = False

    def decide(self, grad_NO: Tensor, *_: object) -> tuple[Tensor, Selection | None]:
        return grad_NO, None
