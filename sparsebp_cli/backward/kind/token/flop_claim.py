"""The FLOPs of a forward and backward that a choice of positions claims to execute, by module, from counts alone.

Attention counts the whole square of queries and keys, as :mod:`sparsebp_cli.backward.observe.flops` does.

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
    dropped: Tensor  # rows without one
    trained: Tensor  # rows that the head reads
    is_prompt: bool  # dropped rows attend only to dropped ones
    is_joined: bool  # examples are concatenated to one
    learns: bool  # dropped rows train the weights that make their keys and values

    @classmethod
    def chosen(cls, plan: RowPlan, length: int) -> Sizes:
        """Return the sizes of a plan; ``length`` is T."""
        return cls(len(plan.counts[0]) * length, length, *plan.counts, plan.is_prompt, plan.is_joined, plan.learns)

    @property
    def computed(self) -> Sizes:
        """The sizes that are executed: every example padded to the longest, or all of them concatenated."""
        counts = (self.carried, self.dropped, self.trained)
        carried, dropped, trained = (
            count.sum()[None] if self.is_joined else torch.full_like(count, float(count.max())) for count in counts
        )
        return replace(self, carried=carried, dropped=dropped, trained=trained)


class Share(NamedTuple):
    """Shares of a module's dense FLOPs, or numbers of its rows or pairs."""

    forward: float
    backward: float
    again: float  # of a forward that activation checkpointing repeats

    def __truediv__(self, whole: float) -> Share:
        return Share(*(part / whole for part in self))


def claim(decoder: Decoder, prefix: str, sizes: Sizes, *, narrows: bool, remembers: bool) -> PassEstimate:
    """Return the shares of a dense pass that remain; rounding up to computable shapes is allowed but not claimed.

    ``narrows``: the last layer computes queries for trained rows only; ``remembers``: a checkpointed layer recomputes
    carried rows only.
    """
    ideal = _shares(decoder, sizes, narrows=narrows)
    most = _shares(decoder, sizes.computed, narrows=narrows, is_most=True)
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


def _shares(decoder: Decoder, sizes: Sizes, *, narrows: bool, is_most: bool = False) -> dict[str, Share]:
    names = {module: name for name, module in decoder.model.named_modules()}
    num_rows = sizes.num_rows
    shares = {names[decoder.head]: Share(*[float(sizes.trained.sum()) / num_rows] * 3)}
    for number, layer in enumerate(decoder.layers):
        is_last = number == len(decoder.layers) - 1
        linears, attention = _of_last(sizes, layer, narrows=narrows) if is_last else _of_middle(sizes)
        pairs = num_rows * sizes.length
        for name, module in layer.module.named_modules():
            if module is layer.core:
                shares[f"{layer.name}.{name}"] = attention / pairs
            else:
                kind = _kind(layer, name, module)
                share = linears[kind]
                if sizes.learns and kind != "others":
                    part = 1.0 if is_most else _learning(layer, module)
                    dropped = float(sizes.dropped.sum())
                    repeats = layer.attention.fused and not is_last  # for the queries of dropped rows
                    again = share.again + dropped * (kind == "keys")
                    share = Share(share.forward + repeats * dropped, share.backward + part * dropped, again)
                shares[f"{layer.name}.{name}"] = share / num_rows
    return shares


def _learning(layer: Layer, module: nn.Module) -> float:
    """Return the share of its backward that a linear that makes keys and values has for a row whose gradient ends at
    the layer's input: the product for its weight, and that for its input where a norm before it is trained.

    Adapters, and a first layer whose input has no gradient either way, may have more: it is allowed but not claimed.
    """
    weight, norm = (
        part is not None and any(parameter.requires_grad for parameter in part.parameters(recurse=False))
        for part in (module, layer.norm)
    )
    return (weight + norm) / 2 if weight else float(norm)


def _kind(layer: Layer, name: str, module: nn.Module) -> Literal["keys", "expanded", "others"]:
    """Return which rows a module of a layer runs on: ``expanded``: all that a cache holds."""
    core = next(found for found, part in layer.module.named_modules() if part is layer.core)
    inside = name.removeprefix(f"{core}.") if name.startswith(f"{core}.") else ""
    child = "" if module is layer.core else inside.split(".")[0]
    if child in layer.attention.expands:
        return "expanded"
    return "keys" if child in layer.attention.key_value else "others"


def _of_middle(sizes: Sizes) -> tuple[dict[str, Share], Share]:
    """Return the shares of rows in linears, and of query-key pairs."""
    k, m = sizes.carried, sizes.dropped
    rows = Share(float((k + m).sum()), *[float(k.sum())] * 2)
    looked_at = m if sizes.is_prompt else k + m
    pairs = Share(float((k * (k + m) + m * looked_at).sum()), *[float((k * (k + m)).sum())] * 2)
    again = looked_at * bool(m.any())  # by dropped rows, and before that by the carried ones
    expanded = Share(float((k + m + again).sum()), float(k.sum()), float((k + m).sum()))
    return {"keys": rows, "expanded": expanded, "others": rows}, pairs


def _of_last(sizes: Sizes, layer: Layer, *, narrows: bool) -> tuple[dict[str, Share], Share]:
    k, m = sizes.carried, sizes.dropped
    r = sizes.trained if narrows else k
    again = r if narrows and layer.attention.fused else torch.zeros_like(r)
    keys = Share(float((k + m + again).sum()), *[float((k + again).sum())] * 2)
    others, pairs = float(r.sum()), float((r * (k + m)).sum())
    expanded = Share(float((k + m).sum()), float(k.sum()), float((k + m).sum()))
    return {"keys": keys, "expanded": expanded, "others": Share(*[others] * 3)}, Share(*[pairs] * 3)
