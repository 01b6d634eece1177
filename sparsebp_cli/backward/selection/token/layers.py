"""Runs the layers of a decoder on the rows of a plan instead of all positions.

The model's own forward runs with its layers replaced. The first layer takes the embeddings of all positions and
continues with the rows that carry gradient. The dropped rows run through the same layer without a graph, from inside
its attention: when it passes its keys and values to a cache, those of the dropped rows are computed, attend to the
carried ones, and are returned. So rotary or learned positions, masks and norms are the model's own.

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

from sparsebp_cli.backward.decoder.decoder import Decoder, argument_names, bind_arguments, without_checkpointing
from sparsebp_cli.backward.decoder.kv_cache import is_filled
from sparsebp_cli.backward.patch.forward import replace_forwards
from sparsebp_cli.backward.selection.token.layer_run import LayerRun, Views
from sparsebp_cli.backward.selection.token.row_plan import RowPlan
from sparsebp_cli.errors import UnsupportedError


class LayerStack:
    """The layers of one forward; ``shape`` is B and T."""

    def __init__(self, decoder: Decoder, plan: RowPlan, shape: tuple[int, int]) -> None:
        self._decoder, self._plan, self._length = decoder, plan, shape[1]
        self._views, self._dropped = Views.of(decoder, plan, shape), cast("Tensor | None", None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the model's layers while its own forward runs."""
        modules = [layer.module for layer in self._decoder.layers]
        # Older transformers checkpoint the layer's call instead of its forward; the second run would miss the override.
        self._again = [getattr(module, "gradient_checkpointing", False) and module.training for module in modules]
        with (
            ExitStack() as stack,
            replace_forwards((module, partial(self._run, number)) for number, module in enumerate(modules)),
        ):
            for module in modules:
                stack.enter_context(without_checkpointing(module))
            yield

    def _run(self, number: int, *args: Any, **kwargs: Any) -> Tensor:
        layer = self._decoder.layers[number]
        arguments = bind_arguments(layer.module, args, kwargs)
        hidden: Tensor = arguments.pop(argument_names(layer.module)[0])
        # An empty cache stays unused. It is only removed here, because the masks that the model builds depend on it.
        if is_filled(arguments.pop(layer.attention.cache, None), layer.core):
            raise UnsupportedError("token selection computes without keys and values of earlier positions")
        self._views.attention_args.check(arguments)
        if number == 0:
            self._views.attention_args.mask_dtype = _mask_dtype(layer.core, hidden)
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
        """Return the trained rows, zero-padded so that a model can view them as (B, T, D), as gpt2 does."""
        rows_ND = hidden_BRD.flatten(0, 1)
        if not self._plan.trained.is_full:
            rows_ND = rows_ND.index_select(0, self._plan.trained.valid_BK.flatten().nonzero().flatten())
        missing = -len(rows_ND) % self._length
        return nn.functional.pad(rows_ND, (0, 0, 0, missing)).view(-1, self._length, rows_ND.shape[-1])


def _mask_dtype(core: nn.Module, hidden: Tensor) -> torch.dtype | None:
    """Return the dtype of an attention's queries, which a non-boolean mask must have; None if unknown."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    dtypes = {parameter.dtype for parameter in core.parameters()} | {hidden.dtype}
    return hidden.dtype if len(dtypes) == 1 else None
