"""Read data files, with the same code for the inspection before a run and for the run itself.

Values are read literally: ``NA`` in a table is the text NA, and ``01`` is not 1. Tables have only texts; JSON and
Parquet have their own types. Each row knows its file and line; in a Parquet file or a JSON array, its row (from 1).
Files may be compressed, with a further suffix ``.gz`` or ``.zst``. The unpacked size has a limit, because ten kilobytes
of Parquet can be 400 GB of text.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy.error_text import describe_kind, shorten

if TYPE_CHECKING:
    from pyarrow import Array
    from pyarrow.parquet import FileMetaData

FORMATS = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".csv": "csv"}
FORMATS |= {".tsv": "csv", ".parquet": "parquet"}
COMPRESSED = (".gz", ".zst")
BATCH_ROWS = 1000  # rows read at once from a Parquet file
LONGEST_LINE = 256 * 1024 * 1024  # bytes; a compressed file of one endless line would fill the memory

UNPACKED_BYTES = 64 * 1024 * 1024  # any dataset may unpack to this
MOST_TIMES = 100  # larger ones to this multiple of their size: repetitive texts compress to a twentieth
ROW_BYTES = 200  # memory that a row takes beside its values


class UnpackBudget:
    """Limit the total unpacked size of a split's files."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Set the limit from the files' sizes. Missing files count as empty."""
        sizes = (file.stat().st_size for file in files if file.is_file())
        self.largest = max(UNPACKED_BYTES, MOST_TIMES * sum(sizes))
        self._taken = 0

    def take(self, file: Path, size: int) -> None:
        """Count bytes that were unpacked, or will be next. Raise DataError if the total exceeds the limit."""
        self._taken += size
        self.check(file, self._taken)

    def check(self, file: Path, size: int) -> None:
        """Raise DataError if ``size`` bytes exceed the limit."""
        if size > self.largest:
            raise DataError(
                f"{file}: unpacks to more than {self.largest >> 20} MiB, over {MOST_TIMES} times its own size: store "
                "it uncompressed if you trust it, or read fewer rows with dataset.max_examples"
            )


class Row(dict[str, object]):
    """A row as a mapping from columns to values, with its place."""

    __slots__ = ("number", "source")

    def __init__(self, values: dict[str, object], source: str, number: int | None = None) -> None:
        """Store the values. ``source`` is the file, followed by ``, line`` or ``, row`` if there is a number."""
        super().__init__(values)
        self.source = source
        self.number = number

    @property
    def is_of_json(self) -> bool:
        """Whether the row is of a JSON file, whose rows need not all have the same keys."""
        file = Path(self.source.rpartition(", ")[0] or self.source)
        return self.number is not None and FORMATS.get(find_suffix(file)) == "json"

    @property
    def place(self) -> str:
        """File and line, or file and row, for error messages."""
        return self.source if self.number is None else f"{self.source} {self.number}"


def find_suffix(file: Path) -> str:
    """Return the suffix that determines a file's format: ``.jsonl`` for ``a.jsonl.gz``."""
    return Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix


def iter_rows(file: Path, budget: UnpackBudget | None = None) -> Iterator[Row]:
    """Yield the rows of a data file one by one. ``budget`` is shared by all files read together. Raise DataError with
    the line or row if one cannot be read. Raise it also if the file is empty, of unknown format, or unpacks to too
    much."""
    kind = FORMATS.get(find_suffix(file))
    if kind is None or (kind == "parquet" and file.suffix in COMPRESSED):
        allowed = f"{', '.join(FORMATS)}; after all but .parquet also .gz or .zst"
        raise DataError(f"{file}: cannot read {''.join(file.suffixes[-2:]) or 'no suffix'}; allowed: {allowed}")
    if not file.is_file():
        raise DataError(f"{file}: is not a regular file")
    budget = budget or UnpackBudget([file])
    try:
        if not file.stat().st_size:
            raise DataError(f"{file}: is empty")
        read = {"json": _iter_json, "csv": _iter_table, "text": _iter_document, "parquet": _iter_parquet}[kind]
        yield from read(file, budget)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None


@contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed."""
    try:
        if file.suffix == ".gz":
            with gzip.open(file) as stream:
                yield cast("IO[bytes]", stream)
        elif file.suffix == ".zst":
            import pyarrow

            with pyarrow.input_stream(str(file), compression="zstd") as raw:
                yield io.BufferedReader(raw)
        else:
            with file.open("rb") as plain:
                yield plain
    except (EOFError, zlib.error) as error:
        raise DataError(f"{file}: is damaged or truncated: {error}") from None


def _iter_lines(file: Path, budget: UnpackBudget) -> Iterator[str]:
    """Yield decoded lines with their ends, without the byte order mark that some UTF-8 files start with."""
    number, longest = 0, min(LONGEST_LINE, budget.largest)
    with _open(file) as stream:
        while line := stream.readline(longest + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise DataError(f"{file}, line {number}: must have at most {LONGEST_LINE} bytes")
            budget.take(file, len(line) + ROW_BYTES)
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                raise DataError(f"{file}, line {number}: not UTF-8 text: got byte 0x{byte:02x}") from None


def _iter_document(file: Path, budget: UnpackBudget) -> Iterator[Row]:
    text = "".join(_iter_lines(file, budget))
    if not text.strip():
        raise DataError(f"{file}: is empty")
    yield Row({"text": text.replace("\r\n", "\n")}, str(file))


def _iter_json(file: Path, budget: UnpackBudget) -> Iterator[Row]:
    # Use a budget of this file alone: these lines are only a look at the start, or turn out not to be one JSON text.
    lines = _iter_lines(file, UnpackBudget([file]))
    first = next((line for line in lines if line.strip()), "")
    if find_suffix(file) == ".json" or first.lstrip().startswith("["):
        text = "".join([first, *lines])
        whole = _parse_whole(file, text)
        if whole is not None:
            budget.take(file, len(text) + ROW_BYTES * len(whole))
            yield from (Row(row, f"{file}, row", number) for number, row in enumerate(whole, start=1))
            return
    num_rows = 0
    for number, line in enumerate(_iter_lines(file, budget), start=1):
        if line.strip():
            num_rows += 1
            row = _as_object(_parse(line, f"{file}, line {number}"), f"{file}, line {number}")
            yield Row(row, f"{file}, line", number)
    if not num_rows:
        raise DataError(f"{file}: is empty")


def _parse_whole(file: Path, text: str) -> list[dict[str, object]] | None:
    """Return the rows of a file that is one JSON text (an object, or an array of objects); None for lines of JSON."""
    try:
        whole = _parse(text, str(file), is_whole=True)
    except DataError:
        if _is_json(text.lstrip().partition("\n")[0]):
            return None
        raise
    rows = whole if isinstance(whole, list) else [whole]
    if not rows:
        raise DataError(f"{file}: is empty")
    return [_as_object(row, f"{file}, row {number}") for number, row in enumerate(rows, start=1)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _as_object(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: must be a JSON object, got {describe_kind(value)}")
    return value


def _parse(text: str, place: str, *, is_whole: bool = False) -> object:
    try:
        found: object = json.loads(text, object_pairs_hook=_refuse_twice, parse_float=WrittenNumber)
        if "\\u" in text:  # JSON allows an escaped half of a character, which is not valid text
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(f"{place}: not valid Unicode: got half of a surrogate pair, {half!r}") from None
    except json.JSONDecodeError as error:
        where = f"{place}, line {error.lineno}" if is_whole else place
        # json's own words, some of which end in "at"
        raise DataError(f"{where}: not JSON: {error.msg.removesuffix(' at')}, column {error.colno}") from None
    except RecursionError:
        raise DataError(f"{place}: not JSON: nested too deeply") from None
    except _TwiceError as error:
        raise DataError(f"{place}: the key {shorten(str(error))!r} occurs twice") from None
    except ValueError:  # Python's limit on digits
        raise DataError(f"{place}: not JSON: a number is too long") from None


class WrittenNumber(float):
    """A number that remembers how its file writes it, such as 1e-7 or 0.30, for use as text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


class _TwiceError(Exception):
    """An object has the same key twice."""


def _refuse_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


def _iter_table(file: Path, budget: UnpackBudget) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_LINE)  # applies to the whole process; the default is shorter than many texts
    delimiter = "\t" if find_suffix(file) == ".tsv" else ","
    # strict: else an open quote would take the rest of the file as one value
    reader = csv.reader(_iter_lines(file, budget), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        for name in header:
            if header.count(name) > 1:
                raise DataError(f"{file}, line 1: the column {shorten(name)!r} occurs twice")
        num_rows, last = 0, reader.line_num
        for values in reader:
            number, last = last + 1, reader.line_num
            if not values:  # a blank line
                continue
            if len(values) > len(header):
                raise DataError(
                    f"{file}, line {number}: must have at most {len(header)} values, like the header, got {len(values)}"
                )
            num_rows += 1
            yield Row(dict.fromkeys(header) | dict(zip(header, values, strict=False)), f"{file}, line", number)
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: not a table: {error}") from None
    if not num_rows:
        raise DataError(f"{file}: has a header and no rows" if header else f"{file}: is empty")


def _iter_parquet(file: Path, budget: UnpackBudget) -> Iterator[Row]:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as plain:
            texts = _check_footer(file, plain.metadata, budget)
        # Read texts as indices into a dictionary, as the file may store them, so that their size is known before they
        # are unpacked.
        with pyarrow.parquet.ParquetFile(file, read_dictionary=texts) as table:
            for batch in table.iter_batches(BATCH_ROWS):
                budget.take(file, sum(map(_find_size, batch.columns)) + ROW_BYTES * batch.num_rows)
                for values in batch.to_pylist():
                    number += 1
                    yield Row(drop_nulls(values), f"{file}, row", number)
    except (OSError, ValueError, NotImplementedError, pyarrow.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file}: not a Parquet file: {reason}") from None
    if not number:
        raise DataError(f"{file}: has no rows")


def drop_nulls(row: Mapping[str, object]) -> dict[str, object]:
    """Return a table row without nulls in its values: Arrow gives each object of a column the keys of all objects."""
    return {name: _drop(value) for name, value in row.items()}


def _drop(value: object) -> object:
    if isinstance(value, dict):
        return {name: _drop(part) for name, part in value.items() if part is not None}
    return [_drop(part) for part in value] if isinstance(value, list) else value


def _check_footer(file: Path, footer: FileMetaData, budget: UnpackBudget) -> list[str]:
    """Return the columns of texts. Raise DataError if a part of the file would unpack to too much by its own metadata,
    because a part may be unpacked at once."""
    columns = [footer.schema.column(number) for number in range(footer.num_columns)]
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for number, column in enumerate(columns):
            part = group.column(number)
            budget.check(file, max(part.total_uncompressed_size, part.num_values * max(column.length, 1)))
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _find_size(values: Array) -> int:
    """Return the number of bytes of the values. Each text counts as often as it occurs."""
    import pyarrow.compute
    import pyarrow.types

    kind = values.type
    if pyarrow.types.is_dictionary(kind):
        lengths = pyarrow.compute.binary_length(values.dictionary)
        return int(pyarrow.compute.sum(lengths.take(values.indices)).as_py() or 0)
    if pyarrow.types.is_struct(kind):
        return sum(map(_find_size, values.flatten()))
    if pyarrow.types.is_map(kind):
        return _find_size(values.keys) + _find_size(values.items)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        return _find_size(values.flatten())
    return int(values.nbytes)
