"""Columns of the data that mark parts of a text: spans of characters, which no tokenizer has to be known for.

A span is ``[start, end]``, in characters of the text from 0, the end not included; for completions the text is prompt
and completion together. A token is marked when one of its characters is. What begins a sequence goes with a span that
starts at 0, what ends it with one that reaches the text's end: ``[[n, n]]``, with n the text's length, marks that end
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy.phrase import shorten


def mark_tokens(
    tokenizer: PreTrainedTokenizerBase,
    parts: Sequence[Sequence[Any]],
    column: Sequence[Any],
    name: str,
    *,
    start: int = 0,
    end: int = 0,
) -> list[np.ndarray]:
    """Mark the tokens of texts.

    Args:
        tokenizer: A fast one, which knows the characters of a token.
        parts: The texts; or the prompts, and the completions, each tokenised apart.
        column: The spans of each text.
        name: Of the column, for errors.
        start: Tokens that stand before each text.
        end: Tokens that stand after it.

    Returns:
        For each text int64, 1 where a token is marked, else 0.

    Raises:
        DataError: The column holds something else, or the tokenizer does not know characters.
    """
    if not tokenizer.is_fast:
        raise DataError(f"column {name!r} marks characters: needs a fast tokenizer, got {type(tokenizer).__name__}")
    texts = [["" if text is None else str(text) for text in part] for part in parts]
    offsets = [
        tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        if part
        else []
        for part in texts
    ]
    marked = []
    for row, spans in enumerate(column):
        _check(spans, name, row)
        borders, begin = [np.zeros((0, 2), dtype=np.int64)], 0
        for part, of_part in zip(texts, offsets, strict=True):
            borders.append(np.array(of_part[row], dtype=np.int64).reshape(-1, 2) + begin)
            begin += len(part[row])
        marked.append(_mark(np.concatenate(borders), spans or [], begin, start, end))
    return marked


def _mark(borders: np.ndarray, spans: Sequence[Sequence[int]], length: int, start: int, end: int) -> np.ndarray:
    inside = np.zeros(len(borders), dtype=np.int64)
    for left, right in spans:
        inside |= (borders[:, 0] < right) & (borders[:, 1] > left)
    first = [int(any(span[0] == 0 < span[1] for span in spans))] * start
    last = [int(any(span[1] >= length for span in spans))] * end
    return np.concatenate([np.array(first, dtype=np.int64), inside, np.array(last, dtype=np.int64)])


def _check(spans: Any, name: str, row: int) -> None:
    good = spans is None or (
        isinstance(spans, Sequence)
        and not isinstance(spans, str)
        and all(
            isinstance(span, Sequence)
            and len(span) == 2
            and all(type(border) is int for border in span)
            and 0 <= span[0] <= span[1]
            for span in spans
        )
    )
    if not good:
        raise DataError(
            f"column {name!r}, row {row}: must be a list of [start, end] in characters, got {shorten(repr(spans))}"
        )
