"""The head of a causal language model on the rows that are read, and its logits in the shape of the plain forward.

Shape letters: B examples, T positions, N computed rows, R rows that are read, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.kind.packing.batch import PackedBatch
from sparsebp_cli.backward.kind.packing.layout import PackedLayout
from sparsebp_cli.backward.patch.boundary import fill
from sparsebp_cli.backward.patch.forward import call_module
from sparsebp_cli.errors import UnsupportedError


def run_head(
    head: nn.Module, covered: Callable[..., Any] | None, take: Callable[[Tensor], Tensor], hidden: Tensor
) -> Tensor:
    """Run the head on the rows that ``take`` returns; ``covered`` is its forward if another library replaced it."""
    rows_1RD = take(hidden)
    logits: Tensor = call_module(head, rows_1RD) if covered is None else covered(rows_1RD)
    return logits


def read_rows(batch: PackedBatch) -> Tensor:
    """Return the row of each position that is read, position by position."""
    return batch.layout.row_BT.flatten().index_select(0, batch.place_R)


def count_rows(batch: PackedBatch) -> int:
    """Return how many rows the head runs. A shared row counts once."""
    return len(batch.head_rows[0]) if batch.layout.num_shared else len(batch.place_R)


def spread_logits(logits_RV: Tensor, inverse: Tensor, batch: PackedBatch, kept: int | Tensor | None) -> Tensor:
    """Return logits (B, T or the number kept, V) for the caller's own loss, zero where the caller reads none."""
    number_BT = torch.zeros(batch.read_BT.numel(), dtype=torch.long, device=logits_RV.device)
    number_BT = number_BT.index_copy_(0, batch.place_R, inverse).view(batch.read_BT.shape)
    columns = kept_columns(kept)
    number_BT, read_BT = number_BT[:, columns], batch.read_BT[:, columns]
    logits = logits_RV.index_select(0, number_BT.flatten()).view(*number_BT.shape, -1)
    return fill(logits, read_BT, "logits")


def states_of(output: Any) -> dict[str, Tensor]:
    """Return the hidden states of each layer in an output, by their name in errors."""
    states: Sequence[Tensor | None] = getattr(output, "hidden_states", None) or ()
    return {f"hidden states {n} of the model": state for n, state in enumerate(states) if state is not None}


def spread_states(output: Any, layout: PackedLayout) -> dict[str, tuple[Tensor | None, ...]]:
    """Return the hidden states of each layer in the shape of the plain forward, (B, T, D), if the output has any."""
    named = {id(state): name for name, state in states_of(output).items()}
    if any(state.shape[:2] != (1, layout.num_rows) for state in states_of(output).values()):
        raise UnsupportedError(
            "lossless cannot return this model's hidden states, since they do not have one row per token position: "
            "leave out output_hidden_states"
        )
    states: Sequence[Tensor | None] = getattr(output, "hidden_states", None) or ()
    spread = tuple(None if h is None else layout.spread(h[0], named[id(h)]) for h in states)
    return {"hidden_states": spread} if spread else {}


def kept_columns(kept: int | Tensor | None) -> Any:
    """Return the index of the positions whose logits are computed, by transformers' ``logits_to_keep``."""
    return kept if isinstance(kept, Tensor) else slice(-kept if kept else None, None)
