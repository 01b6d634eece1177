"""Build token masks from data columns that mark spans of characters, so that users need not know the tokenizer.

A span is ``[start, end]``, in characters of the text from 0, the end excluded. For completions the text is the prompt
followed by the completion. A token is marked if at least one of its characters is. A span that starts at 0 also marks
tokens before the text, and a span that reaches the text's end those after it. With n the length of the text, ``[[n,
n]]`` marks only the tokens at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.source.column import Rows


@dataclass(frozen=True)
class TextTokens:
    """The positions of a text's tokens in it."""

    num_characters: int
    offsets: Sequence[tuple[int, int]]  # first character and end (exclusive) of each token of the text itself
    num_before: int  # special tokens before the text
    num_tokens: int  # of all tokens, including those before and after the text


def mask_tokens(texts: Sequence[TextTokens], rows: Rows, column: Sequence[object], name: str) -> list[np.ndarray]:
    """Return for each text an int64 mask over its tokens, 1 where a span of the column covers the token."""
    found = zip(texts, rows, column, strict=True)
    return [mark_spans(text, _check(spans, name, row.place)) for text, row, spans in found]


def mark_spans(text: TextTokens, spans: Sequence[Sequence[int]]) -> np.ndarray:
    """Return an int64 mask over the tokens of a text, 1 where a span covers the token."""
    borders = np.array(text.offsets, dtype=np.int64).reshape(-1, 2)
    inside = np.zeros(len(borders), dtype=np.int64)
    for left, right in spans:
        inside |= (borders[:, 0] < right) & (borders[:, 1] > left)
    num_behind = text.num_tokens - text.num_before - len(borders)
    first = [int(any(span[0] == 0 < span[1] for span in spans))] * text.num_before
    last = [int(any(span[1] >= text.num_characters for span in spans))] * num_behind
    return np.concatenate([np.array(first, dtype=np.int64), inside, np.array(last, dtype=np.int64)])


def _check(spans: Any, name: str, place: str) -> Sequence[Sequence[int]]:
    """Return the spans of a row; empty if it has none."""
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
            f"{place}: column {name!r} must be a list of [start, end] in characters, got {shorten(repr(spans))}"
        )
    return spans or []
