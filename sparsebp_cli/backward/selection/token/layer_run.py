"""Runs one decoder layer for the rows that carry gradient, together with those that do not.

Shape letters: B examples, K carried rows, R trained rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import Decoder, Layer, argument_names, without_checkpointing
from sparsebp_cli.backward.decoder.kv_cache import ConcatKV, FixedKV, RecordedKV, RecordKV, SharedKV, skip_outputs
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards
from sparsebp_cli.backward.selection.token.attention_args import AttentionArgs, AttentionView
from sparsebp_cli.backward.selection.token.row_plan import RowPlan
from sparsebp_cli.backward.selection.token.rows import RowNumbers
from sparsebp_cli.errors import UnsupportedError

# A fused linear for queries, keys and values must be multiplied again for trained rows. Above this share of the carried
# rows that costs more than the output projection and the MLP save (3 products against at least 9).
MOST_FUSED = 0.75


@dataclass(frozen=True, eq=False)
class Views:
    """The attention views of one forward, and the layer arguments for them."""

    attention_args: AttentionArgs
    carried: AttentionView  # rows that carry gradient
    dropped: AttentionView | None  # dropped rows; None: there are none
    trained: RowNumbers  # rows that the head reads, as indices into the carried rows
    trained_positions: AttentionView  # the same rows, as positions
    is_prompt: bool  # dropped rows attend only to dropped ones
    narrows: bool  # the last layer computes queries for trained rows only

    @classmethod
    def of(cls, decoder: Decoder, plan: RowPlan, shape: tuple[int, int]) -> Views:
        """Return the views of a plan; ``shape`` is B and T."""
        before = () if plan.dropped is None else (plan.dropped,)
        carried, dropped = AttentionView.of(plan.carried, *before), cast("AttentionView | None", None)
        trained_positions = AttentionView(
            plan.trained_positions, carried.keys, sum(len(rows) for rows in before) + plan.trained.position_BK
        )
        if plan.dropped is not None:
            own = AttentionView.of(plan.dropped)
            dropped = own if plan.is_prompt else AttentionView(plan.dropped, carried.keys, own.slot_BQ)
        attention_args = AttentionArgs(decoder.implementation, joined=shape if plan.is_joined else None)
        return cls(
            attention_args, carried, dropped, plan.trained, trained_positions, plan.is_prompt, narrows(decoder, plan)
        )


@dataclass
class LayerRun:
    """One layer of one forward; a checkpointed layer runs again in the backward."""

    views: Views
    layer: Layer
    arguments: dict[str, Any]  # of the layer, for all positions
    dropped: Tensor | None  # the dropped rows before the layer
    after: Tensor | None = None  # the dropped rows after it
    remembered: tuple[Tensor, Tensor] | None = None  # keys and values of dropped rows, if the layer may run again
    _remembers: bool = False

    def checkpointed(self, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Run :meth:`middle` or :meth:`last` under the layer's own activation checkpointing."""
        module = cast("Any", self.layer.module)
        self._remembers = not has_dropout(module)  # skipping the dropped rows would shift later random has_dropout
        return cast("Tensor", module._gradient_checkpointing_func(run, hidden))  # noqa: SLF001 - as the layer does

    def middle(self, hidden_BKD: Tensor) -> Tensor:
        """Run the layer for all carried rows, together with the dropped ones; return the carried rows."""
        cache = None if self.dropped is None else ConcatKV(self._run_dropped)
        return self._call(hidden_BKD, self._restrict(self.views.carried), cache)

    def last(self, hidden_BKD: Tensor) -> Tensor:
        """Run the layer for the rows that the head reads, and return them, (B, R, D); of other rows compute keys
        and values only.
        """
        trained = self.views.trained
        if not self.views.narrows:
            cache = None if self.dropped is None else ConcatKV(self._capture_dropped)
            output = self._call(hidden_BKD, self._restrict(self.views.carried), cache)
            return output if len(trained) == len(self.views.carried.queries) else trained.take(output)
        keys, values = self._capture(hidden_BKD, self.views.carried)
        if self.dropped is not None:
            keys, values = ConcatKV(self._capture_dropped).update(keys, values)
        skipped = () if self.layer.attention.fused else self.layer.attention.key_value
        with replace_forwards(skip_outputs(self.layer.core, skipped, one_head=False)):
            return self._call(
                trained.take(hidden_BKD), self._restrict(self.views.trained_positions), FixedKV(keys, values)
            )

    def _restrict(self, view: AttentionView, *, mask: bool = True) -> dict[str, Any]:
        return self.views.attention_args.restrict(self.arguments, view, mask=mask)

    def _call(self, hidden: Tensor, arguments: dict[str, Any], cache: Any) -> Tensor:
        module = self.layer.module
        arguments = arguments | {argument_names(module)[0]: hidden, self.layer.attention.cache: cache}
        with without_checkpointing(module):
            return cast("Tensor", call_module(module, **arguments))

    def _capture(self, hidden: Tensor, view: AttentionView) -> tuple[Tensor, Tensor]:
        """Return keys and values of some rows, without running the rest of the layer."""
        with replace_forwards(skip_outputs(self.layer.core, self.layer.attention.query, one_head=False)):
            try:
                self._call(hidden, self._restrict(view, mask=False), RecordKV())
            except RecordedKV as captured:
                return captured.keys, captured.values
        raise UnsupportedError(f"{self.layer.name} computes without calling its cache")

    def _run_dropped(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Run the layer for the dropped rows, which attend to the carried ones' keys and values; return their own."""
        if self.remembered is not None:
            return self.remembered
        assert self.dropped is not None
        assert self.views.dropped is not None
        carried = None if self.views.is_prompt else (keys.detach(), values.detach())
        cache = SharedKV(carried)
        with no_graph(self.dropped.device):
            self.after = self._call(self.dropped, self._restrict(self.views.dropped), cache)
        return self._remember(cache.own)

    def _capture_dropped(self, *_: Tensor) -> tuple[Tensor, Tensor]:
        if self.remembered is not None:
            return self.remembered
        assert self.dropped is not None
        assert self.views.dropped is not None
        with no_graph(self.dropped.device):
            return self._remember(self._capture(self.dropped, self.views.dropped))

    def _remember(self, own: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        if own is None:
            raise UnsupportedError(f"{self.layer.name} computes without calling its cache")
        if self._remembers:
            self.remembered = own
        return own


@contextmanager
def no_graph(device: torch.device) -> Iterator[None]:
    """Run the block without a graph inside of a forward with one.

    Autocast's cache is disabled, because it would return weights cast without a graph to code that needs one.
    """
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def has_dropout(module: nn.Module) -> bool:
    """Return whether a layer has dropout in training."""
    rates = [m.p for m in module.modules() if isinstance(m, nn.Dropout)]
    rates += [getattr(m, "attention_dropout", 0.0) for m in module.modules()]
    return any(isinstance(rate, float) and rate > 0.0 for rate in rates)


def narrows(decoder: Decoder, plan: RowPlan) -> bool:
    """Return whether computing queries for trained rows only saves work in the last layer."""
    fused = decoder.layers[-1].attention.fused
    share = len(plan.trained) / len(plan.carried)
    return share <= MOST_FUSED if fused else share < 1.0
