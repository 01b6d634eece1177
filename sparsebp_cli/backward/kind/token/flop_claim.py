"""The estimated FLOPs of a forward and backward for a choice of positions, by module, from counts alone.

Attention counts the whole square of queries and keys, like :mod:`sparsebp_cli.backward.observe.flops`.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import Decoder, Layer
from sparsebp_cli.backward.kind.token.row_plan import RowPlan
from sparsebp_cli.backward.observe.flops import PassEstimate


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows in a forward by example; tensors are (B,), float64, on the CPU."""

    num_rows: int  # B * T
    length: int  # T
    carried: Tensor  # rows with a graph
    dropped: Tensor  # rows without a graph
    trained: Tensor  # rows that the head reads
    is_prompt: bool  # dropped rows attend only to dropped ones
    is_joined: bool  # examples are concatenated into one

    @classmethod
    def chosen(cls, plan: RowPlan, length: int) -> Sizes:
        """Return the sizes of a plan; ``length`` is T."""
        return cls(len(plan.counts[0]) * length, length, *plan.counts, plan.is_prompt, plan.is_joined)

    @property
    def computed(self) -> Sizes:
        """The executed sizes: every example padded to the longest, or all examples concatenated."""
        counts = (self.carried, self.dropped, self.trained)
        carried, dropped, trained = (
            count.sum()[None] if self.is_joined else torch.full_like(count, float(count.max())) for count in counts
        )
        return replace(self, carried=carried, dropped=dropped, trained=trained)


class WorkShare(NamedTuple):
    """Fractions of a module's dense FLOPs, or numbers of its rows or pairs."""

    forward: float
    backward: float
    again: float  # for the forward that activation checkpointing repeats

    def __truediv__(self, whole: float) -> WorkShare:
        return WorkShare(*(part / whole for part in self))


def claim(decoder: Decoder, prefix: str, sizes: Sizes, *, narrows: bool, remembers: bool) -> PassEstimate:
    """Return the remaining fractions of a dense pass. Padding to computable shapes is allowed, but not in the estimate.

    ``narrows``: the last layer computes queries only for trained rows. ``remembers``: a checkpointed layer recomputes
    only carried rows.
    """
    ideal = _shares(decoder, sizes, narrows=narrows)
    most = _shares(decoder, sizes.computed, narrows=narrows)
    again = 2 if remembers else 0
    return PassEstimate(
        forward=_named(prefix, {name: share.forward for name, share in ideal.items()}),
        backward=_named(prefix, {name: share.backward for name, share in ideal.items()}),
        recomputed=_named(prefix, {name: share[again] for name, share in ideal.items()}),
        allowed_backward=_named(prefix, {name: share.backward for name, share in most.items()}),
        allowed_recomputed=_named(prefix, {name: share[again] for name, share in most.items()}),
    )


def _named(prefix: str, shares: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": share for name, share in shares.items()}


def _shares(decoder: Decoder, sizes: Sizes, *, narrows: bool) -> dict[str, WorkShare]:
    names = {module: name for name, module in decoder.model.named_modules()}
    num_rows = sizes.num_rows
    shares = {names[decoder.head]: WorkShare(*[float(sizes.trained.sum()) / num_rows] * 3)}
    for number, layer in enumerate(decoder.layers):
        is_last = number == len(decoder.layers) - 1
        linears, attention = _of_last(sizes, layer, narrows=narrows) if is_last else _of_middle(sizes)
        pairs = num_rows * sizes.length
        for name, module in layer.module.named_modules():
            if module is layer.core:
                shares[f"{layer.name}.{name}"] = attention / pairs
            else:
                shares[f"{layer.name}.{name}"] = linears[_kind(layer, name, module)] / num_rows
    return shares


def _kind(layer: Layer, name: str, module: nn.Module) -> Literal["keys", "expanded", "others"]:
    """Return on which rows a module of a layer runs; ``expanded``: all rows in the cache."""
    core = next(found for found, part in layer.module.named_modules() if part is layer.core)
    inside = name.removeprefix(f"{core}.") if name.startswith(f"{core}.") else ""
    child = "" if module is layer.core else inside.split(".")[0]
    if child in layer.attention.expands:
        return "expanded"
    return "keys" if child in layer.attention.key_value else "others"


def _of_middle(sizes: Sizes) -> tuple[dict[str, WorkShare], WorkShare]:
    """Return the numbers of rows in linears by kind of module, and of query-key pairs, in layers before the last."""
    k, m = sizes.carried, sizes.dropped
    rows = WorkShare(float((k + m).sum()), *[float(k.sum())] * 2)
    looked_at = m if sizes.is_prompt else k + m
    pairs = WorkShare(float((k * (k + m) + m * looked_at).sum()), *[float((k * (k + m)).sum())] * 2)
    again = looked_at * bool(m.any())  # dropped rows attend to them again after the carried rows
    expanded = WorkShare(float((k + m + again).sum()), float(k.sum()), float((k + m).sum()))
    return {"keys": rows, "expanded": expanded, "others": rows}, pairs


def _of_last(sizes: Sizes, layer: Layer, *, narrows: bool) -> tuple[dict[str, WorkShare], WorkShare]:
    k, m = sizes.carried, sizes.dropped
    r = sizes.trained if narrows else k
    again = r if narrows and layer.attention.fused else torch.zeros_like(r)
    keys = WorkShare(float((k + m + again).sum()), *[float((k + again).sum())] * 2)
    others, pairs = float(r.sum()), float((r * (k + m)).sum())
    expanded = WorkShare(float((k + m).sum()), float(k.sum()), float((k + m).sum()))
    return {"keys": keys, "expanded": expanded, "others": WorkShare(*[others] * 3)}, WorkShare(*[pairs] * 3)
