"""Compute loss weights of single tokens from a data column that weighs rows, or spans of characters.

A value is a number for all tokens of the row, or a list of ``[start, end, weight]`` in characters of the text, as in
:mod:`sparsebp_cli.worker.token_mask`. Tokens outside all spans weigh 1; of several spans the first one counts. A token
of weight 0 has no label.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import numpy as np

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy.error_text import shorten, show_with_type
from sparsebp_cli.source.column import Rows
from sparsebp_cli.worker.token_mask import TextTokens, mark_spans


def weigh_tokens(texts: Sequence[TextTokens], rows: Rows, column: Sequence[object], name: str) -> list[np.ndarray]:
    """Return for each text the weight of each token, float32."""
    return [
        _weigh(text, value, f"{row.place}: column {name!r}")
        for text, row, value in zip(texts, rows, column, strict=True)
    ]


def _weigh(text: TextTokens, value: object, place: str) -> np.ndarray:
    if value is None:
        return np.ones(text.num_tokens, dtype=np.float32)
    if not isinstance(value, list):
        return np.full(text.num_tokens, check_number(value, place), dtype=np.float32)
    weight_T = np.ones(text.num_tokens, dtype=np.float32)
    # Iterate backwards, because the first of several spans counts.
    for span in reversed(value):
        if not (
            isinstance(span, list)
            and len(span) == 3
            and all(type(border) is int for border in span[:2])
            and 0 <= span[0] <= span[1]
        ):
            raise DataError(
                f"{place} must be a number or a list of [start, end, weight] in characters, got {shorten(repr(span))}"
            )
        weight_T[mark_spans(text, [span[:2]]) != 0] = check_number(span[2], place)
    return weight_T


def check_number(value: object, place: str) -> float:
    """Return a weight. Raise DataError unless it is a finite number."""
    if isinstance(value, str):  # from a table, which has only texts
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{place} must be a weight, a finite number, got {show_with_type(value)}")
    return float(value)
