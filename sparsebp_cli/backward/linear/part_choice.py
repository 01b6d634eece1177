"""Choosing the rows and columns of a model's linears that are trained, once, before training.

Parts with the same channels on both sides: Xinyu Yang et al., "S2FT: Efficient, Scalable and Generalizable LLM
Fine-tuning by Structured Sparsity" (NeurIPS 2024), https://arxiv.org/abs/2412.06289. We differ: channels are chosen
singly, not whole heads of an attention; the chosen ones are copied and not moved next to each other. Choices by
activations, and by gradients of first steps (SMT, SIFT), blocks and entries are not built.

Shape letters: D input width, O output width, C channels (O for rows, D for columns), K kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.linear.function import WeightLayout, weight_of
from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean
from sparsebp_cli.policy import Step, WeightColumns, WeightPart, WeightRows
from sparsebp_cli.policy.choice import count_kept


@dataclass(frozen=True)
class _Group:
    """Parts with the same channels; the name, under which they are drawn, is that of their first linear."""

    name: str
    parts: dict[str, type[WeightPart]] = field(default_factory=dict)


@torch.no_grad()
def choose_parts(
    model: nn.Module,
    keep: float,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    coupled: bool = False,
    by: Literal["random", "weight"] = "random",
    seed: int = 0,
) -> dict[str, WeightPart]:
    """Return parts for :class:`~sparsebp_cli.backward.PartTraining`; the model is not changed.

    ``by: random`` is the control of ``by: weight``; both train equally many.

    Args:
        model: Weights are read by ``weight`` only. Choose before a checkpoint is loaded, or a resumed run chooses anew.
        keep: Share of the channels of each weight, in (0, 1]; at least one channel.
        rows: Globs over names of linears, of which rows are trained, such as ``*.up_proj``.
        columns: The same for columns, such as ``*.down_proj``. A linear is in one of the two.
        coupled: Whether all chosen linears of one parent module have the same channel numbers, rows and columns alike.
        by: random: an even draw. weight: the largest 2-norms of the rows or columns, in 32 bits; coupled: of all that
            have this channel together; equal ones in their order.
        seed: Of the draw, which depends on it and on the linears' names only, not on the device or on other linears.

    Returns:
        The part of each linear by its name, in the model's order, with ascending numbers.

    Raises:
        UsageError: An argument is out of range, a pattern matches no linear, a linear has two parts, or the widths of
            coupled ones differ.
        UnsupportedError: A pattern matches a quantised, sharded or parametrized linear, or one in float8.
    """
    if not 0 < keep <= 1:
        raise UsageError(f"keep must be in (0, 1], got {keep}")
    if by not in ("random", "weight"):
        raise UsageError(f"by must be random or weight, got {by!r}")
    if coupled and not (rows and columns):
        raise UsageError("coupled needs rows and columns")
    linears, kinds = _match(model, {"rows": (rows, WeightRows), "columns": (columns, WeightColumns)})
    chosen: dict[str, WeightPart] = {}
    for group in _groups(kinds, coupled=coupled):
        norms = {name: _squared_norms(*linears[name], kind) for name, kind in group.parts.items()}
        number = _number(norms)
        count = count_kept(keep, number)
        if by == "weight":
            total_C = torch.stack([each.cpu() for each in norms.values()]).sum(0)
            index_K = total_C.argsort(descending=True, stable=True)[:count]
        else:
            index_K = torch.randperm(number, generator=Step(0, seed=seed).generator(group))[:count]
        index_K = index_K.sort().values
        chosen |= {name: kind(index_K.to(norms[name].device)) for name, kind in group.parts.items()}
    return {name: chosen[name] for name in kinds}


def _match(
    model: nn.Module, wanted: Mapping[str, tuple[Sequence[str], type[WeightPart]]]
) -> tuple[dict[str, tuple[nn.Module, WeightLayout]], dict[str, type[WeightPart]]]:
    """Return the covered linears, and the kind of part of those that are wanted, in the model's order."""
    found = find_linears(model)
    linears = {name: (module, form) for name, module, form in found.covered}
    names, kinds = (*linears, *found.not_covered), dict[str, type[WeightPart]]()
    if not any(patterns for patterns, _ in wanted.values()):
        raise UsageError("give rows or columns: patterns of the linears to train")
    for option, (patterns, kind) in wanted.items():
        for pattern in patterns:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                raise UsageError(f"{option}: {pattern!r} matches no linear of the model{did_you_mean(pattern, names)}")
            for name in matched:
                if name not in linears or linears[name][1].replaces:
                    raise UnsupportedError(
                        f"{name!r}: parts of a quantised, sharded, parametrized or float8 weight are not built"
                    )
                if kinds.setdefault(name, kind) is not kind:
                    raise UsageError(f"{name!r} is in rows and in columns: a linear has one part")
    return linears, {name: kinds[name] for name in linears if name in kinds}


def _groups(kinds: Mapping[str, type[WeightPart]], *, coupled: bool) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for name, kind in kinds.items():
        key = name.rpartition(".")[0] if coupled else name
        groups.setdefault(key, _Group(name)).parts[name] = kind
    for group in groups.values():
        if coupled and len(set(group.parts.values())) == 1:
            (name, kind), *_ = group.parts.items()
            other = "columns" if kind is WeightRows else "rows"
            raise UsageError(f"coupled: {name!r} has no linear with {other} beside it in its module")
    return list(groups.values())


def _squared_norms(module: nn.Module, form: WeightLayout, kind: type[WeightPart]) -> Tensor:
    """Return the squared norm of each row or column, (C,)."""
    return form.by_output(weight_of(module).detach()).float().square().sum(1 - kind.dim)


def _number(norms: Mapping[str, Tensor]) -> int:
    """Return the number of channels, which is the same for all parts of a group."""
    numbers = {name: len(each) for name, each in norms.items()}
    if len(set(numbers.values())) > 1:
        widths = ", ".join(f"{number} of {name!r}" for name, number in numbers.items())
        raise UsageError(f"coupled parts need the same number of channels, got {widths}")
    return next(iter(numbers.values()))
