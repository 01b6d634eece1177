"""Token masks from data columns that mark spans of characters, so that users need not know the tokenizer.

A span is ``[start, end]``, in characters of the text from 0, the end excluded; for completions the text is the prompt
followed by the completion. A token is marked if at least one of its characters is. Tokens before the text are marked
by a span that starts at 0, tokens after it by a span that reaches its end: ``[[n, n]]``, with n the length of the
text, marks only those at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy.error_text import shorten


def mask_tokens(
    tokenizer: PreTrainedTokenizerBase,
    parts: Sequence[Sequence[object]],
    column: Sequence[object],
    name: str,
    *,
    start: int = 0,
    end: int = 0,
) -> list[np.ndarray]:
    """Return for each text an int64 mask over its tokens, 1 where a span of the column covers the token. ``parts``
    holds the texts, or the prompts and the completions, tokenised separately; ``start`` and ``end`` are numbers of
    special tokens around each text."""
    if not tokenizer.is_fast:
        raise DataError(f"column {name!r} marks characters and needs a fast tokenizer, got {type(tokenizer).__name__}")
    texts = [["" if text is None else str(text) for text in part] for part in parts]
    offsets = [
        tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        if part
        else []
        for part in texts
    ]
    marked = []
    for row, spans in enumerate(column):
        checked = _check(spans, name, row)
        borders, begin = [np.zeros((0, 2), dtype=np.int64)], 0
        for part, of_part in zip(texts, offsets, strict=True):
            borders.append(np.array(of_part[row], dtype=np.int64).reshape(-1, 2) + begin)
            begin += len(part[row])
        marked.append(_mark(np.concatenate(borders), checked, begin, start, end))
    return marked


def _mark(borders: np.ndarray, spans: Sequence[Sequence[int]], length: int, start: int, end: int) -> np.ndarray:
    inside = np.zeros(len(borders), dtype=np.int64)
    for left, right in spans:
        inside |= (borders[:, 0] < right) & (borders[:, 1] > left)
    first = [int(any(span[0] == 0 < span[1] for span in spans))] * start
    last = [int(any(span[1] >= length for span in spans))] * end
    return np.concatenate([np.array(first, dtype=np.int64), inside, np.array(last, dtype=np.int64)])


def _check(spans: Any, name: str, row: int) -> Sequence[Sequence[int]]:
    """Return the spans of a row, none where it has none."""
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
    return spans or []
