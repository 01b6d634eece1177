"""One decoder layer, run for the rows that carry gradient, and beside them for those that do not.

Shape letters: B examples, K carried rows, R trained rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import Decoder, Layer, argument_names, unchecked
from sparsebp_cli.backward.decoder.kv_cache import ConcatKV, FixedKV, RecordedKV, RecordKV, SharedKV, silence
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards
from sparsebp_cli.backward.selection.token.attention_args import AttentionArgs, AttentionView
from sparsebp_cli.backward.selection.token.row_plan import RowPlan
from sparsebp_cli.backward.selection.token.rows import RowNumbers
from sparsebp_cli.errors import UnsupportedError

# A linear that makes queries, keys and values at once is multiplied again for trained rows; above this share of the
# carried ones that costs more than the output projection and the MLP save (3 products against at least 9).
MOST_FUSED = 0.75


@dataclass(frozen=True, eq=False)
class Views:
    """Who looks at whom in one forward, and the arguments for that.

    Args:
        cutter: Cuts a layer's arguments.
        carried: Rows that carry gradient.
        beside: Dropped rows; None: there are none.
        trained: Whose outputs the head reads, as numbers of the carried rows.
        asked: The same rows, as positions.
        is_prompt: Whether dropped rows look at dropped ones alone.
        narrows: Whether the last layer computes queries for trained rows alone.
    """

    cutter: AttentionArgs
    carried: AttentionView
    beside: AttentionView | None
    trained: RowNumbers
    asked: AttentionView
    is_prompt: bool
    narrows: bool

    @classmethod
    def of(cls, decoder: Decoder, plan: RowPlan, shape: tuple[int, int]) -> Views:
        """Return the views of a plan.

        Args:
            decoder: The model.
            plan: Its rows.
            shape: B and T.

        Returns:
            The views.
        """
        before = () if plan.dropped is None else (plan.dropped,)
        carried, beside = AttentionView.of(plan.carried, *before), cast("AttentionView | None", None)
        asked = AttentionView(plan.asked, carried.keys, sum(len(rows) for rows in before) + plan.trained.position_BK)
        if plan.dropped is not None:
            own = AttentionView.of(plan.dropped)
            beside = own if plan.is_prompt else AttentionView(plan.dropped, carried.keys, own.slot_BQ)
        cutter = AttentionArgs(decoder.implementation, joined=shape if plan.is_joined else None)
        return cls(cutter, carried, beside, plan.trained, asked, plan.is_prompt, narrows(decoder, plan))


@dataclass
class LayerRun:
    """One layer of one forward; a checkpointed one runs again in the backward.

    Args:
        views: Of the forward that it belongs to.
        layer: The layer.
        arguments: Its own, for all positions.
        dropped: The dropped rows before it.
        after: The dropped rows after it.
        remembered: Keys and values of the dropped rows, where the layer may run again.
    """

    views: Views
    layer: Layer
    arguments: dict[str, Any]
    dropped: Tensor | None
    after: Tensor | None = None
    remembered: tuple[Tensor, Tensor] | None = None
    _remembers: bool = False

    def checkpointed(self, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Run, with what the layer computes not stored but computed again in the backward.

        Args:
            run: :meth:`middle` or :meth:`last`.
            hidden: The carried rows.

        Returns:
            The layer's output.
        """
        module = cast("Any", self.layer.module)
        self._remembers = not draws(module)  # else what is drawn after them would not be the same again
        return cast("Tensor", module._gradient_checkpointing_func(run, hidden))  # noqa: SLF001 - as the layer does

    def middle(self, hidden_BKD: Tensor) -> Tensor:
        """Run the layer for all carried rows, and the dropped ones beside them.

        Args:
            hidden_BKD: The carried rows.

        Returns:
            The same after the layer.
        """
        cache = None if self.dropped is None else ConcatKV(self._run_beside)
        return self._call(hidden_BKD, self._cut(self.views.carried), cache)

    def last(self, hidden_BKD: Tensor) -> Tensor:
        """Run the layer for what the head reads: of other rows keys and values alone.

        Args:
            hidden_BKD: The carried rows.

        Returns:
            The trained rows after the layer, (B, R, D).
        """
        trained = self.views.trained
        if not self.views.narrows:
            cache = None if self.dropped is None else ConcatKV(self._capture_beside)
            output = self._call(hidden_BKD, self._cut(self.views.carried), cache)
            return output if len(trained) == len(self.views.carried.queries) else trained.take(output)
        keys, values = self._capture(hidden_BKD, self.views.carried)
        if self.dropped is not None:
            keys, values = ConcatKV(self._capture_beside).update(keys, values)
        silent = () if self.layer.attention.fused else self.layer.attention.key_value
        with replace_forwards(silence(self.layer.core, silent, one_head=False)):
            return self._call(trained.take(hidden_BKD), self._cut(self.views.asked), FixedKV(keys, values))

    def _cut(self, view: AttentionView, *, mask: bool = True) -> dict[str, Any]:
        return self.views.cutter.cut(self.arguments, view, mask=mask)

    def _call(self, hidden: Tensor, arguments: dict[str, Any], cache: Any) -> Tensor:
        module = self.layer.module
        arguments = arguments | {argument_names(module)[0]: hidden, self.layer.attention.cache: cache}
        with unchecked(module):
            return cast("Tensor", call_module(module, **arguments))

    def _capture(self, hidden: Tensor, view: AttentionView) -> tuple[Tensor, Tensor]:
        """Return keys and values of some rows; nothing behind them is computed."""
        with replace_forwards(silence(self.layer.core, self.layer.attention.query, one_head=False)):
            try:
                self._call(hidden, self._cut(view, mask=False), RecordKV())
            except RecordedKV as captured:
                return captured.keys, captured.values
        raise UnsupportedError(f"{self.layer.name} computes without asking its cache")

    def _run_beside(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Run the layer for the dropped rows, given the carried ones' keys and values; return their own."""
        if self.remembered is not None:
            return self.remembered
        assert self.dropped is not None
        assert self.views.beside is not None
        carried = None if self.views.is_prompt else (keys.detach(), values.detach())
        cache = SharedKV(carried)
        with no_graph(self.dropped.device):
            self.after = self._call(self.dropped, self._cut(self.views.beside), cache)
        return self._remember(cache.own)

    def _capture_beside(self, *_: Tensor) -> tuple[Tensor, Tensor]:
        if self.remembered is not None:
            return self.remembered
        assert self.dropped is not None
        assert self.views.beside is not None
        with no_graph(self.dropped.device):
            return self._remember(self._capture(self.dropped, self.views.beside))

    def _remember(self, own: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        if own is None:
            raise UnsupportedError(f"{self.layer.name} computes without asking its cache")
        if self._remembers:
            self.remembered = own
        return own


@contextmanager
def no_graph(device: torch.device) -> Iterator[None]:
    """Compute without a graph inside of what has one.

    Autocast remembers the weights that it has cast, and would hand out those without a graph to what needs one.

    Args:
        device: That computes.

    Yields:
        None: As long as there is no graph.
    """
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def draws(module: nn.Module) -> bool:
    """Return whether a layer drops anything out in training."""
    rates = [m.p for m in module.modules() if isinstance(m, nn.Dropout)]
    rates += [getattr(m, "attention_dropout", 0.0) for m in module.modules()]
    return any(isinstance(rate, float) and rate > 0.0 for rate in rates)


def narrows(decoder: Decoder, plan: RowPlan) -> bool:
    """Return whether the last layer computes queries for trained rows alone.

    Args:
        decoder: The model.
        plan: Of the forward.

    Returns:
        Whether that saves anything.
    """
    fused = decoder.layers[-1].attention.fused
    share = len(plan.trained) / len(plan.carried)
    return share <= MOST_FUSED if fused else share < 1.0
