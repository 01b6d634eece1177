"""What a branch keeps of its linears' outputs, so that they are not multiplied again in its backward.

Every linear's output is kept, but for the last one's, which is never needed: nothing is computed of it but a sum.
Where memory matters more, keys and values alone are kept, since all positions need them, and only where they are no
wider than the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

from torch import Tensor, nn

from sparsebp_cli.backward.branch.branch import Branch, Call
from sparsebp_cli.backward.linear.function import WeightLayout
from sparsebp_cli.backward.linear.site import run_linear
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards
from sparsebp_cli.policy import Selection


@contextmanager
def record_outputs(branch: Branch, call: Call) -> Iterator[None]:
    """Keep linears' outputs in a call.

    Args:
        branch: What runs.
        call: Where they are kept.

    Yields:
        None: As long as the forward runs.
    """
    versions: dict[str, int] = {}
    spoilt: set[str] = set()

    def keep(name: str, module: nn.Module, x: Tensor) -> Tensor:
        output = cast("Tensor", call_module(module, x))
        if name in call.kept:
            spoilt.add(name)  # called twice
        call.kept[name], versions[name] = output, output._version  # noqa: SLF001 - see below
        return output

    wanted = [(n, m) for n, m, _ in branch.linears if _is_kept(branch, n, stores=call.stores) and not call.whole]
    with replace_forwards((module, partial(keep, name, module)) for name, module in wanted):
        yield
    # What was changed in place afterwards, such as clamped, is not what the linear gave.
    spoilt |= {n for n, output in call.kept.items() if output._version != versions[n]}  # noqa: SLF001
    for name in spoilt:
        del call.kept[name]


def replay_outputs(
    branch: Branch, call: Call, index_K: Tensor | None
) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Return the linears that need not multiply when a branch runs again, with what gives their outputs.

    Args:
        branch: What runs again.
        call: Its forward.
        index_K: The rows that it runs on; None: all.

    Returns:
        What :func:`~sparsebp_cli.backward.patch.forward.replace_forwards` takes.
    """
    modules: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
    for name, module, form in branch.linears:
        if name in call.kept:
            modules.append((module, partial(_give, module, form, call.kept[name], index_K)))
        elif name == branch.last and branch.after is None:
            modules.append((module, partial(_give, module, form, None, index_K)))
    return modules


def is_again(branch: Branch, name: str, *, stores: bool, whole: bool) -> bool:
    """Whether a linear multiplies again when the branch does.

    Args:
        branch: The branch.
        name: The linear's, in its core.
        stores: Whether all outputs are kept that a backward reads.
        whole: Whether all rows are computed again, and nothing is kept.

    Returns:
        The answer.
    """
    if name == branch.last and branch.after is None:
        return False
    return whole or not _is_kept(branch, name, stores=stores)


def _is_kept(branch: Branch, name: str, *, stores: bool) -> bool:
    # An adapter's linear is a child of what it adapts; the base layer's output is kept, the adapter is computed again.
    if branch.attention is not None and name.removesuffix(".base_layer") in branch.attention.key_value:
        return stores or branch.keeps_keys
    return stores and not (name == branch.last and branch.after is None)


def _give(module: nn.Module, form: WeightLayout, kept: Tensor | None, index_K: Tensor | None, x: Tensor) -> Tensor:
    known_form = _KeptForm(form, kept, index_K)
    if not (x.requires_grad or any(p.requires_grad for p in module.parameters(recurse=False))):
        return known_form.forward(x, cast("Tensor", module.weight), None)
    return run_linear(module, x, _Dense(known_form))


@final
class _KeptForm(WeightLayout):
    """A linear whose output is known, or not needed."""

    def __init__(self, form: WeightLayout, kept: Tensor | None, index_K: Tensor | None) -> None:
        self.form, self.kept, self.index_K, self.output_dim = form, kept, index_K, form.output_dim

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG002 - nothing to multiply
        if self.kept is None:
            return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[self.output_dim])
        if self.index_K is None:
            return self.kept
        rows = self.kept.reshape(-1, self.kept.shape[-1]).index_select(0, self.index_K)
        return rows.view(*x.shape[:-1], rows.shape[-1])  # there may be no rows

    def by_output(self, weight: Tensor) -> Tensor:
        return self.form.by_output(weight)

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        return self.form.wgrad(grad_NO, x_ND)


@dataclass(frozen=True)
class _Dense:
    """See :class:`sparsebp_cli.backward.linear.function.SelectionSource`: keeps everything."""

    form: WeightLayout
    reference: bool = True

    def decide(self, grad_NO: Tensor, *_: Any) -> tuple[Tensor, Selection | None]:
        return grad_NO, None
