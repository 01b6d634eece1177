"""Read texts and labels from the columns of rows. Refuse missing values and other types, and name their place."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import yaml

from sparsebp_cli.errors import DataError, did_you_mean, show_name
from sparsebp_cli.policy.error_text import describe_kind, shorten
from sparsebp_cli.source.reader import Row

KINDS: dict[type, str] = {str: "text", bool: "a boolean", int: "a number", float: "a number"}  # bool is an int
Rows = Sequence[Row]
SHAREGPT = {"messages": "conversations", "role": "from", "content": "value", "user": "human", "assistant": "gpt"}
# Usual column names.
ASKED = ("prompt", "instruction", "question", "query")
ANSWERED = ("completion", "response", "output", "answer", "reply")


def read_column(rows: Rows, column: str) -> list[object]:
    """Return the values of a column, with None for rows without one. Raise DataError if no row has the column."""
    if rows and not any(column in row for row in rows):
        raise missing_column(column, dict.fromkeys(name for row in rows for name in row))
    return [row.get(column) for row in rows]


def read_texts(rows: Rows, column: str, *, may_be_empty: bool = False) -> list[str]:
    """Return a column of texts. Numbers are converted to text. Raise DataError with the row's place for a missing text,
    another type than text, or another type than earlier rows have."""
    texts, kinds = [], set[str]()
    for row, value in zip(rows, read_column(rows, column), strict=True):
        kind = _find_kind(value)
        if value is None or _is_nan(value) or (value == "" and not may_be_empty):
            raise DataError(f"{row.place}: column {column!r} must contain text, got none")
        if kind is None:
            got = "bytes" if isinstance(value, bytes) else describe_kind(value)
            raise DataError(f"{row.place}: column {column!r} must contain text, got {got}")
        _refuse_change(row, column, kind, kinds)
        texts.append(str(value).lower() if kind == "a boolean" else str(value))  # as JSON writes it
    return texts


def read_labels(rows: Rows, column: str) -> list[str]:
    """Return the labels of a column as names. Numbers and booleans get the name that JSON gives them. Raise DataError
    with the row's place for a missing label, another type than name, whole number or boolean, or another type than
    earlier rows have."""
    labels, kinds = [], set[str]()
    for row, value in zip(rows, read_column(rows, column), strict=True):
        kind = _find_kind(value)
        if value is None or _is_nan(value) or value == "":
            raise DataError(f"{row.place}: column {column!r} must contain a label, got none")
        if kind is None or (isinstance(value, float) and not value.is_integer()):
            raise DataError(
                f"{row.place}: column {column!r} must contain a text, a whole number or a boolean, got "
                f"{describe_kind(value)}"
            )
        _refuse_change(row, column, kind, kinds)
        named = str(value).lower() if kind == "a boolean" else str(int(value) if isinstance(value, float) else value)
        labels.append(named)
    return labels


def name_classes(labels: Iterable[str], head: Sequence[str] = ()) -> list[str]:
    """Return the distinct classes in the order of ``head``, a pretrained head's, if it names the same ones, in any
    case of letters. Otherwise sort by value if all are whole numbers, else by name."""
    names = set(labels)
    for fold in (str, str.lower):
        order = {fold(name): number for number, name in enumerate(head)}
        if len(order) == len(head) == len(names) and order.keys() == set(map(fold, names)):
            return sorted(names, key=lambda name: order[fold(name)])
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)


def number_labels(rows: Rows, column: str, names: Sequence[str]) -> list[int]:
    """Return the number of each row's class. Raise DataError for a label that is not among ``names``, the classes of
    the training data."""
    numbers = {name: number for number, name in enumerate(names)}
    labels = read_labels(rows, column)
    for row, label in zip(rows, labels, strict=True):
        if label not in numbers:
            known = ", ".join(names[:10])
            raise DataError(f"{row.place}: label {label!r} is not among the labels of the training split: {known}")
    return [numbers[label] for label in labels]


def missing_column(name: str, columns: Collection[str]) -> DataError:
    """Return the error for a missing column."""
    near = did_you_mean(name, columns)
    for keys in () if near else find_readings(columns):
        near = near or f"; to read these columns, give dataset.{write_keys(keys)}"
    return DataError(f"the dataset has no column {name!r}; it has {_list(columns)}{near}")


def find_readings(columns: Collection[str]) -> Iterator[dict[str, object]]:
    """Yield the dataset keys of recipes that would read these columns, guessed by name; the usual format first."""
    if "messages" in columns:
        yield {"format": "chat"}
    if "conversations" in columns:
        yield {"format": "chat", "columns": SHAREGPT}
    asked, answered = (next((name for name in names if name in columns), None) for names in (ASKED, ANSWERED))
    if asked and answered:
        user = [asked, "input"] if "input" in columns else asked
        chat: dict[str, object] = {"format": "chat", "columns": {"user": user, "assistant": answered}}
        renamed = {part: name for part, name in (("prompt", asked), ("completion", answered)) if part != name}
        pair: dict[str, object] = {"format": "completion"} | ({"columns": renamed} if renamed else {})
        yield from [chat] if "input" in columns else [pair, chat] if asked == "prompt" else [chat, pair]
    if {"text", "label"} <= set(columns):
        yield {"format": "classification"}
    if "text" in columns:
        yield {"format": "text"}


def write_keys(keys: Mapping[str, object]) -> str:
    """Return keys in one line, as a recipe writes them."""
    return yaml.safe_dump(dict(keys), default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)[1:-2]


def missing_split(name: str, splits: Collection[str]) -> DataError:
    """Return the error for a missing split."""
    return DataError(f"the dataset has no split {name!r}; it has {_list(splits)}{did_you_mean(name, splits)}")


def _list(names: Collection[str]) -> str:
    return ", ".join(show_name(shorten(str(name))) for name in list(names)[:20])


def _find_kind(value: object) -> str | None:
    return next((name for kind, name in KINDS.items() if isinstance(value, kind)), None)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _refuse_change(row: Row, column: str, kind: str, kinds: set[str]) -> None:
    if kinds and kind not in kinds:
        before = next(iter(kinds))
        raise DataError(f"{row.place}: the value in column {column!r} is {kind}, but {before} in earlier rows")
    kinds.add(kind)


def as_rows(rows: Iterable[Mapping[str, object]], source: str) -> list[Row]:
    """Convert rows that do not come from a file. Their places are counted from 1."""
    return [
        row if isinstance(row, Row) else Row(dict(row), f"{source}, row", number)
        for number, row in enumerate(rows, start=1)
    ]
