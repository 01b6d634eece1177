"""Decoders that classify an example by one position: find that position, and compute logits only there.

The loss reads one position of each example, and the policy chooses which positions carry gradient. The model's own
forward computes the loss. It receives logits of all positions, which are 0 where it does not read them.

Shape letters: B examples, T positions, N read positions of all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import Decoder
from sparsebp_cli.backward.kind.token.loss import spread_logits
from sparsebp_cli.backward.kind.token.row_plan import PositionMask
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import TokenSelector


def check_selector(policy: TokenSelector, decoder: Decoder) -> None:
    """Raise :class:`UnsupportedError` for a selector that may not train every target."""
    if policy.needs or policy.budget != 1.0:
        raise UnsupportedError(
            f"{type(policy).__name__} chooses among labels of tokens, but {type(decoder.model).__name__} has one "
            "label per example: set score: mask without keep, and choose positions with carry"
        )


def read_positions(model: nn.Module, arguments: Mapping[str, object]) -> Tensor:
    """Return the position of each example that the loss reads, as a boolean (B, T): the last token that is not the
    padding token, as in transformers.
    """
    ids, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
    given = ids if isinstance(ids, Tensor) else embeddings
    assert isinstance(given, Tensor)
    num_examples, length = given.shape[:2]
    position_T = torch.arange(length, device=given.device)
    padding = cast("Any", model).config.get_text_config().pad_token_id
    if isinstance(ids, Tensor) and padding is not None:
        last_B1 = (position_T * (ids != padding)).argmax(1, keepdim=True)
    else:
        last_B1 = torch.full((num_examples, 1), length - 1, device=given.device)
    read_BT: Tensor = position_T == last_B1
    return read_BT


def check_choice(policy: TokenSelector, marks: PositionMask) -> None:
    """Raise :class:`UsageError` unless every position that the loss reads is trained."""
    if not bool((marks.trained == marks.target).all()):
        raise UsageError(f"{type(policy).__name__} leaves out positions that the classification loss reads")


def run_head(
    head: nn.Module, covered: Callable[[Tensor], Tensor] | None, marks: PositionMask, hidden: Tensor
) -> Tensor:
    """Run the head for the read rows, which come first, and return logits of all positions, (B, T, labels)."""
    rows_ND = hidden.flatten(0, -2)[: int(marks.trained.sum())]
    logits_NV: Tensor = type(head).forward(head, rows_ND) if covered is None else covered(rows_ND)
    return spread_logits(logits_NV, marks)
