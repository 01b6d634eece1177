"""The layers of a decoder, run on the rows of a plan instead of all positions.

The model's own forward runs; only its layers are replaced for as long. The first one takes the embeddings of all
positions and goes on with the rows that carry gradient; beside them the dropped rows go through the same layer without
a graph, inside of its attention: when that hands its keys and values to a cache, the dropped rows have theirs computed,
look at the carried ones, and give theirs in return. So rotary or learned positions, masks and norms are the model's.

Shape letters: B examples, T positions, K carried rows, M dropped rows, R trained rows, D width, N trained rows of all
examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.branch import call_module, is_filled, replaced
from sparsebp_cli.backward.cache import Captured, Capturing, Giving, silence
from sparsebp_cli.backward.token.cut import Cutter, View
from sparsebp_cli.backward.token.decoder import Decoder, Layer, argument_names, unchecked
from sparsebp_cli.backward.token.plan import Plan
from sparsebp_cli.errors import UnsupportedError

# A linear that makes queries, keys and values at once is multiplied again for trained rows; above this share of the
# carried ones that costs more than the output projection and the MLP save (3 products against at least 9).
MOST_FUSED = 0.75


class Stack:
    """One forward's layers.

    Args:
        decoder: The model.
        plan: Its rows.
        length: T.
    """

    def __init__(self, decoder: Decoder, plan: Plan, length: int) -> None:
        self.plan, self.dropped = plan, cast("Tensor | None", None)
        self._decoder, self._length = decoder, length
        self.cutter = Cutter(decoder.implementation)
        before = () if plan.dropped is None else (plan.dropped,)
        self.carried = View.of(plan.carried, *before)
        num_before = sum(len(rows) for rows in before)
        self.asked = View(plan.asked, self.carried.keys, num_before + plan.trained.position_BK)
        self.beside: View | None = None
        if plan.dropped is not None:
            own = View.of(plan.dropped)
            self.beside = own if plan.is_prompt else View(plan.dropped, self.carried.keys, own.slot_BQ)
        last = decoder.layers[-1].attention
        most = MOST_FUSED if last.fused else 1.0 - 0.5 / len(plan.carried)
        self.narrows = len(plan.trained) <= most * len(plan.carried)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Be the model's layers.

        Yields:
            None: As long as the model's own forward runs.
        """
        modules = [layer.module for layer in self._decoder.layers]
        with replaced((module, partial(self._run, number)) for number, module in enumerate(modules)):
            yield

    def _run(self, number: int, *args: Any, **kwargs: Any) -> Tensor:
        layer = self._decoder.layers[number]
        names = argument_names(layer.module)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        hidden: Tensor = arguments.pop(names[0])
        # An empty one stays unused; whether there is one decides about the masks that the model makes.
        if is_filled(arguments.pop(layer.attention.cache, None), layer.core):
            raise UnsupportedError("token selection computes without keys and values of earlier positions")
        self.cutter.check(arguments)
        if number == 0:
            if self.plan.dropped is not None:
                self.dropped = self.plan.dropped.take(hidden.detach())
            hidden = self.plan.carried.take(hidden)
        run = LayerRun(self, layer, arguments, self.dropped)
        is_last = number == len(self._decoder.layers) - 1
        hidden = run.checkpointed(run.last if is_last else run.middle, hidden)
        self.dropped = run.after
        return self._spread(hidden) if is_last else hidden

    def _spread(self, hidden_BRD: Tensor) -> Tensor:
        """Return the trained rows alone, and so many zeros that a model can view them as (B, T, D), as gpt2 does."""
        rows_ND = hidden_BRD.flatten(0, 1)
        if not self.plan.trained.is_full:
            rows_ND = rows_ND.index_select(0, self.plan.trained.valid_BK.flatten().nonzero().flatten())
        missing = -len(rows_ND) % self._length
        return nn.functional.pad(rows_ND, (0, 0, 0, missing)).view(-1, self._length, rows_ND.shape[-1])


@dataclass
class LayerRun:
    """One layer of one forward; a checkpointed one runs again in the backward.

    Args:
        stack: That it belongs to.
        layer: The layer.
        arguments: Its own, for all positions.
        dropped: The dropped rows before it.
        after: The dropped rows after it.
        remembered: Keys and values of the dropped rows, where the layer may run again.
    """

    stack: Stack
    layer: Layer
    arguments: dict[str, Any]
    dropped: Tensor | None
    after: Tensor | None = None
    remembered: tuple[Tensor, Tensor] | None = None
    _remembers: bool = False

    def checkpointed(self, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Run as the model is told to: with what the layer computes stored, or computed again in the backward.

        Args:
            run: :meth:`middle` or :meth:`last`.
            hidden: The carried rows.

        Returns:
            The layer's output.
        """
        module = cast("Any", self.layer.module)
        if not (getattr(module, "gradient_checkpointing", False) and module.training):
            return run(hidden)
        self._remembers = not _draws(module)  # else what is drawn after them would not be the same again
        return cast("Tensor", module._gradient_checkpointing_func(run, hidden))  # noqa: SLF001 - as the layer does

    def middle(self, hidden_BKD: Tensor) -> Tensor:
        """Run the layer for all carried rows, and the dropped ones beside them.

        Args:
            hidden_BKD: The carried rows.

        Returns:
            The same after the layer.
        """
        cache = None if self.dropped is None else _Joining(self._run_beside)
        return self._call(hidden_BKD, self._cut(self.stack.carried), cache)

    def last(self, hidden_BKD: Tensor) -> Tensor:
        """Run the layer for what the head reads: of other rows keys and values alone.

        Args:
            hidden_BKD: The carried rows.

        Returns:
            The trained rows after the layer, (B, R, D).
        """
        plan = self.stack.plan
        if not self.stack.narrows:
            cache = None if self.dropped is None else _Joining(self._capture_beside)
            output = self._call(hidden_BKD, self._cut(self.stack.carried), cache)
            return output if len(plan.trained) == len(plan.carried) else plan.trained.take(output)
        keys, values = self._capture(hidden_BKD, self.stack.carried)
        if self.dropped is not None:
            keys, values = _Joining(self._capture_beside).update(keys, values)
        silent = () if self.layer.attention.fused else self.layer.attention.key_value
        with replaced(silence(self.layer.core, silent)):
            return self._call(plan.trained.take(hidden_BKD), self._cut(self.stack.asked), Giving(keys, values))

    def _cut(self, view: View, *, mask: bool = True) -> dict[str, Any]:
        return self.stack.cutter.cut(self.arguments, view, mask=mask)

    def _call(self, hidden: Tensor, arguments: dict[str, Any], cache: Any) -> Tensor:
        module = self.layer.module
        arguments = arguments | {argument_names(module)[0]: hidden, self.layer.attention.cache: cache}
        with unchecked(module):
            return cast("Tensor", call_module(module, **arguments))

    def _capture(self, hidden: Tensor, view: View) -> tuple[Tensor, Tensor]:
        """Return keys and values of some rows; nothing behind them is computed."""
        with replaced(silence(self.layer.core, self.layer.attention.query)):
            try:
                self._call(hidden, self._cut(view, mask=False), Capturing())
            except Captured as captured:
                return captured.keys, captured.values
        raise UnsupportedError(f"{self.layer.name} computes without asking its cache")

    def _run_beside(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Run the layer for the dropped rows, given the carried ones' keys and values; return their own."""
        if self.remembered is not None:
            return self.remembered
        assert self.dropped is not None
        assert self.stack.beside is not None
        carried = None if self.stack.plan.is_prompt else (keys.detach(), values.detach())
        cache = _Meeting(carried)
        with no_graph(self.dropped.device):
            self.after = self._call(self.dropped, self._cut(self.stack.beside), cache)
        return self._remember(cache.own)

    def _capture_beside(self, *_: Tensor) -> tuple[Tensor, Tensor]:
        if self.remembered is not None:
            return self.remembered
        assert self.dropped is not None
        assert self.stack.beside is not None
        with no_graph(self.dropped.device):
            return self._remember(self._capture(self.dropped, self.stack.beside))

    def _remember(self, own: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        if own is None:
            raise UnsupportedError(f"{self.layer.name} computes without asking its cache")
        if self._remembers:
            self.remembered = own
        return own


class _Joining:
    """The carried rows' cache: puts the dropped rows' keys and values before theirs."""

    def __init__(self, before: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._before = before

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        dropped_keys, dropped_values = self._before(keys, values)
        return torch.cat([dropped_keys, keys], 2), torch.cat([dropped_values, values], 2)


class _Meeting:
    """The dropped rows' cache: keeps their keys and values, and puts the carried ones' behind them."""

    def __init__(self, carried: tuple[Tensor, Tensor] | None) -> None:
        self._carried, self.own = carried, cast("tuple[Tensor, Tensor] | None", None)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.own = keys, values
        if self._carried is None:
            return keys, values
        return torch.cat([keys, self._carried[0]], 2), torch.cat([values, self._carried[1]], 2)


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


def _draws(module: nn.Module) -> bool:
    rates = [m.p for m in module.modules() if isinstance(m, nn.Dropout)]
    rates += [getattr(m, "attention_dropout", 0.0) for m in module.modules()]
    return any(isinstance(rate, float) and rate > 0.0 for rate in rates)
