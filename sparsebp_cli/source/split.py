"""Find the splits of a dataset that a recipe names. Each is read only when requested."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsebp_cli.errors import DataError, SparseBPError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.run import home
from sparsebp_cli.run.stored_recipe import MARK
from sparsebp_cli.source.column import as_rows, missing_split
from sparsebp_cli.source.folder import check_folder
from sparsebp_cli.source.name import DATASETS, find_source
from sparsebp_cli.source.reader import FORMATS, Row, UnpackBudget, drop_nulls, find_suffix, iter_rows

Splits = Mapping[str, Callable[[], Iterator[Row]]]
PLAIN = {"Value", "ClassLabel", "Json"}  # features of datasets; reading any other may open files that a row names


def find_splits(section: DatasetSection, folders: Sequence[Path] = ()) -> Splits:
    """Return the splits of a dataset by name, as functions that read their rows. A single file is the training split.
    Relative paths are searched in the folders in order, by default in the working folder. Raise DataError if the
    dataset is not found, or is a folder with other files than data."""
    if MARK in section.split:
        raise DataError(f"dataset.split is {section.split!r}: SparseBP compares such a run, but cannot train it again")
    source = find_source(section.name, DATASETS, folders)
    if callable(source):
        return _of_tables(source(), section.name)
    if not isinstance(source, Path):
        return _of_tables(_load_from_hub(section), section.name)
    if source.is_dir():
        return {name: _reader(files) for name, files in find_files(source, section).items()}
    return {section.split: _reader([source])}


def take_rows(splits: Splits, name: str, most: int | None) -> list[Row]:
    """Return at most ``most`` rows from the start of a split. Raise DataError if the split does not exist or a row
    cannot be read."""
    if name not in splits:
        raise missing_split(name, splits)
    return list(itertools.islice(splits[name](), most))


def _reader(files: Sequence[Path]) -> Callable[[], Iterator[Row]]:
    def read() -> Iterator[Row]:
        budget = UnpackBudget(files)
        return itertools.chain.from_iterable(iter_rows(file, budget) for file in files)

    return read


def _of_tables(tables: Mapping[str, Any], name: str) -> Splits:
    def reader(split: str) -> Callable[[], Iterator[Row]]:
        rows = tables[split]
        is_arrow = hasattr(rows, "features")  # a table of datasets
        return lambda: iter(as_rows(map(drop_nulls, rows) if is_arrow else rows, f"{name}, split {split}"))

    return {split: reader(split) for split in tables}


def find_files(folder: Path, section: DatasetSection) -> dict[str, list[Path]]:
    """Return the data files of a folder by split. As in ``datasets``, the files' names or the folder's README determine
    the split."""
    every = check_folder(folder)
    from datasets import load_dataset_builder

    with _explained(section.name):
        builder = load_dataset_builder(str(folder), name=section.subset, cache_dir=_cache())
        named = builder.config.data_files or {}
        found = {str(name): [Path(file) for file in files] for name, files in named.items()}
    for file in itertools.chain.from_iterable(found.values()):
        if find_suffix(file) not in FORMATS:  # check_folder allows no other
            raise DataError(f"{file}: cannot read {file.suffix}")
    read = {file.resolve() for files in found.values() for file in files}
    if left := [file for file in every if file.resolve() not in read]:
        raise DataError(
            f"{left[0]}: would not be read: give all files of a folder one format, and name all or none after a split, "
            "such as train-2.jsonl"
        )
    return found


def _load_from_hub(section: DatasetSection) -> dict[str, Any]:
    """Return the splits of a hub id. Tables are read as texts, as in files."""
    from datasets import disable_progress_bars, load_dataset, load_dataset_builder

    disable_progress_bars()
    options: dict[str, Any] = {"path": section.name, "name": section.subset, "revision": section.revision}
    options["cache_dir"] = _cache()
    with _explained(section.name):
        if load_dataset_builder(**options).name == "csv":
            options |= {"dtype": str, "keep_default_na": False}
        return {name: _keep_plain(rows, section) for name, rows in load_dataset(**options).items()}


def _keep_plain(rows: Any, section: DatasetSection) -> Any:
    """Drop columns of images, audio and similar types: reading a row would open and decode the files that it names."""
    wanted = {*section.read_columns, section.column("label")}
    kinds = {name: type(feature).__name__ for name, feature in rows.features.items() if not _is_plain(feature)}
    for name in kinds.keys() & wanted:
        raise DataError(f"column {name!r} must contain text, got {kinds[name]}")
    return rows.remove_columns(list(kinds))


def _is_plain(feature: object) -> bool:
    """Return whether reading a feature of ``datasets``, including nested features, decodes no file."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    if isinstance(feature, list):
        return all(map(_is_plain, feature))
    if hasattr(feature, "feature"):
        return _is_plain(feature.feature)
    return type(feature).__name__ in PLAIN


def _cache() -> str:
    return str(home() / "cache" / "datasets")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn the many error types of ``datasets`` into a one-line error."""
    try:
        yield
    except SparseBPError:
        raise
    except Exception as error:
        reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"dataset {name}: {reason}") from None
