"""Inspection of the first rows of a data file: readability, columns, and types of values."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.errors import DataError, did_you_mean
from sparsebp_cli.policy.error_text import shorten, show_with_type

if TYPE_CHECKING:
    from pyarrow import Field

LOADERS = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".csv": "csv"}
LOADERS |= {".tsv": "csv", ".parquet": "parquet"}
NUM_ROWS = 100
MOST_BYTES = 1024 * 1024  # read of a file
DEEPEST = 500  # nesting of lists and mappings; at 200,000 the reader of datasets 5.2 crashes the process
BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
TEXT_FEATURES = {"Value", "ClassLabel", "Json"}  # of datasets; reading another feature may open files that a row names
Rows = Sequence[Mapping[str, object]]


def read_rows(file: Path) -> list[dict[str, object]]:
    """Return at most :data:`NUM_ROWS` first rows of a data file; none if a file of its format is too large to be
    inspected. Raise DataError if it cannot be read, is empty, or does not match its suffix."""
    if file.suffix not in LOADERS:
        raise DataError(f"{file}: cannot read {file.suffix or 'no suffix'}; allowed: {', '.join(LOADERS)}")
    if not file.is_file():
        raise DataError(f"{file}: is not a regular file")
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES)
            is_whole = not stream.read(1)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    if not content.strip():
        raise DataError(f"{file}: is empty")
    kind = LOADERS[file.suffix]
    if kind == "parquet":
        return _read_parquet(file)
    text = _decode(file, content, is_whole=is_whole)
    if kind == "json":
        return _read_json(file, text, is_whole=is_whole)
    if kind == "csv":
        return _read_csv(file, text)
    return [{"text": text}]


def check_rows(rows: Rows, needed: Iterable[str], label: str | None, spans: Collection[str] = ()) -> None:
    """Raise DataError unless rows (at least one) have the text columns, the label column, and the columns of character
    spans that a recipe reads."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in (*needed, *([label] if label else []), *spans):
        if name not in columns:
            raise missing_column(name, columns)
    for number, row in enumerate(rows):
        for name in needed:
            check_text(row.get(name), name, number)
        value = row.get(label) if label else 0
        if isinstance(value, Mapping | list) or (isinstance(value, int) and value < 0):
            raise DataError(
                f"column {label!r}, row {number}: must be 0 or more, or a name, got {show_with_type(value)}"
            )


def check_text(value: object, column: str, row: int) -> None:
    """Raise DataError for a list, a mapping or bytes; None is an empty text, and numbers are written as text."""
    if isinstance(value, Mapping | list | tuple | bytes):
        got = "bytes" if isinstance(value, bytes) else show_with_type(value)
        raise DataError(f"column {column!r}, row {row}: must be text, got {got}")


def refuse_deep(file: Path) -> None:
    """Raise DataError for JSON, or lines of it, that is nested more deeply than data is."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.count(b"[") + line.count(b"{") <= DEEPEST:
                continue
            depth = 0
            for found in BRACKETS.finditer(line):
                depth += (found[0] in b"[{") - (found[0] in b"]}")
                if depth > DEEPEST:
                    raise DataError(f"{file}, line {number}: not JSON: nested too deeply; allowed: {DEEPEST} levels")


def missing_column(name: str, columns: Collection[str]) -> DataError:
    """Return the error for a missing column."""
    return DataError(f"the dataset has no column {name!r}; it has {_list(columns)}{did_you_mean(name, columns)}")


def missing_split(name: str, splits: Collection[str]) -> DataError:
    """Return the error for a missing split."""
    return DataError(f"the dataset has no split {name!r}; it has {_list(splits)}{did_you_mean(name, splits)}")


def _list(names: Collection[str]) -> str:
    return ", ".join(shorten(str(name)) for name in list(names)[:20])


def _decode(file: Path, content: bytes, *, is_whole: bool) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not is_whole and error.start > len(content) - 4:  # the limit cut a character
            return content[: error.start].decode("utf-8-sig")
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{file}, line {line}: not UTF-8 text: got byte 0x{content[error.start]:02x}") from None


def _read_json(file: Path, text: str, *, is_whole: bool) -> list[dict[str, object]]:
    if text.lstrip().startswith("[") or (file.suffix == ".json" and is_whole):
        whole = _parse_whole(text) if is_whole else None
        if whole is not None:
            return whole
    rows: list[dict[str, object]] = []
    lines = text.splitlines() if is_whole else text.splitlines()[:-1]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if file.suffix == ".json":  # one object over many lines, which is too large to be inspected
                return []
            deep = "nested too deeply" if isinstance(error, RecursionError) else "a number is too long"
            reason = getattr(error, "msg", deep)
            raise DataError(f"{file}, line {number}: not JSON: {reason}; got {shorten(line)!r}") from None
        if not isinstance(row, dict):
            if file.suffix == ".json":
                return []
            raise DataError(f"{file}, line {number}: must be a JSON object, got {show_with_type(row)}")
        rows.append(row)
        if len(rows) == NUM_ROWS:
            break
    return rows


def _parse_whole(text: str) -> list[dict[str, object]] | None:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return None
    rows = whole if isinstance(whole, list) else []
    return [row for row in rows[:NUM_ROWS] if isinstance(row, dict)]


def _read_csv(file: Path, text: str) -> list[dict[str, object]]:
    reader = csv.reader(io.StringIO(text), delimiter="\t" if file.suffix == ".tsv" else ",")
    try:
        header = next(reader, [])
        rows = [dict(zip(header, row, strict=False)) for row, _ in zip(reader, range(NUM_ROWS), strict=False)]
    except csv.Error as error:
        raise DataError(f"{file}: not a table: {error}") from None
    if not rows:
        raise DataError(f"{file}: has a header and no rows")
    return [dict.fromkeys(header) | row for row in rows]


def _read_parquet(file: Path) -> list[dict[str, object]]:
    import pyarrow.parquet

    try:
        schema = pyarrow.parquet.read_schema(file)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: not a Parquet file: {str(error).splitlines()[0]}") from None
    return [{field.name: _sample_value(field, schema.metadata or {}) for field in schema}]


def _sample_value(field: Field, metadata: Mapping[bytes, bytes]) -> object:
    """Return a value of the type that a column has: None for texts and numbers."""
    import pyarrow

    try:
        feature = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"][field.name]
        is_text = feature["_type"] in TEXT_FEATURES
    except (ValueError, RecursionError, LookupError, TypeError):
        is_text = True
    if not is_text or pyarrow.types.is_nested(field.type):
        return {}
    is_binary = pyarrow.types.is_binary(field.type) or pyarrow.types.is_large_binary(field.type)
    return b"" if is_binary else None
