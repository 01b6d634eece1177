"""The layers of a decoder, run on the rows of a plan instead of all positions.

The model's own forward runs; only its layers are replaced for as long. The first one takes the embeddings of all
positions and goes on with the rows that carry gradient; beside them the dropped rows go through the same layer without
a graph, inside of its attention: when that hands its keys and values to a cache, the dropped rows have theirs computed,
look at the carried ones, and give theirs in return. So rotary or learned positions, masks and norms are the model's.

Shape letters: B examples, T positions, K carried rows, M dropped rows, R trained rows, D width, N trained rows of all
examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import Decoder, argument_names, by_name, unchecked
from sparsebp_cli.backward.decoder.kv_cache import is_filled
from sparsebp_cli.backward.patch.forward import replace_forwards
from sparsebp_cli.backward.selection.token.layer_run import LayerRun, Views
from sparsebp_cli.backward.selection.token.row_plan import RowPlan
from sparsebp_cli.errors import UnsupportedError


class Stack:
    """One forward's layers.

    Args:
        decoder: The model.
        plan: Its rows.
        shape: B and T.
    """

    def __init__(self, decoder: Decoder, plan: RowPlan, shape: tuple[int, int]) -> None:
        self._decoder, self._plan, self._length = decoder, plan, shape[1]
        self._views, self._dropped = Views.of(decoder, plan, shape), cast("Tensor | None", None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Be the model's layers.

        Yields:
            None: As long as the model's own forward runs.
        """
        modules = [layer.module for layer in self._decoder.layers]
        # Older transformers checkpoint the call of a layer instead of its forward: that would run again without this.
        self._again = [getattr(module, "gradient_checkpointing", False) and module.training for module in modules]
        with (
            ExitStack() as stack,
            replace_forwards((module, partial(self._run, number)) for number, module in enumerate(modules)),
        ):
            for module in modules:
                stack.enter_context(unchecked(module))
            yield

    def _run(self, number: int, *args: Any, **kwargs: Any) -> Tensor:
        layer = self._decoder.layers[number]
        arguments = by_name(layer.module, args, kwargs)
        hidden: Tensor = arguments.pop(argument_names(layer.module)[0])
        # An empty one stays unused; whether there is one decides about the masks that the model makes.
        if is_filled(arguments.pop(layer.attention.cache, None), layer.core):
            raise UnsupportedError("token selection computes without keys and values of earlier positions")
        self._views.cutter.check(arguments)
        if number == 0:
            self._views.cutter.mask_dtype = _mask_dtype(layer.core, hidden)
            if self._plan.is_joined:
                hidden = hidden.flatten(0, 1)[None]
            if self._plan.dropped is not None:
                self._dropped = self._plan.dropped.take(hidden.detach())
            hidden = self._plan.carried.take(hidden)
        run = LayerRun(self._views, layer, arguments, self._dropped)
        is_last = number == len(self._decoder.layers) - 1
        once = run.last if is_last else run.middle
        hidden = run.checkpointed(once, hidden) if self._again[number] else once(hidden)
        self._dropped = run.after
        return self._spread(hidden) if is_last else hidden

    def _spread(self, hidden_BRD: Tensor) -> Tensor:
        """Return the trained rows alone, and so many zeros that a model can view them as (B, T, D), as gpt2 does."""
        rows_ND = hidden_BRD.flatten(0, 1)
        if not self._plan.trained.is_full:
            rows_ND = rows_ND.index_select(0, self._plan.trained.valid_BK.flatten().nonzero().flatten())
        missing = -len(rows_ND) % self._length
        return nn.functional.pad(rows_ND, (0, 0, 0, missing)).view(-1, self._length, rows_ND.shape[-1])


def _mask_dtype(core: nn.Module, hidden: Tensor) -> torch.dtype | None:
    """Return the dtype of an attention's queries, None where that is not sure: a mask must have it, or be boolean."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    dtypes = {parameter.dtype for parameter in core.parameters()} | {hidden.dtype}
    return hidden.dtype if len(dtypes) == 1 else None
