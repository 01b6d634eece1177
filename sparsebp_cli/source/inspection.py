"""Inspection of the model and the data of a recipe before a run: errors, and what cannot be known on this machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparsebp_cli.entry_point import entry_points
from sparsebp_cli.errors import DataError
from sparsebp_cli.policy import ReferenceReader, TokenSelector, make_policy
from sparsebp_cli.policy.field_error import Location
from sparsebp_cli.recipe.schema import DatasetSection, Recipe
from sparsebp_cli.source.data import NUM_ROWS, Rows, check_rows, missing_split, read_rows
from sparsebp_cli.source.folder import check_folder
from sparsebp_cli.source.model import (
    check_files,
    check_tokenizer,
    count_tokens,
    read_config,
    refuse_mismatch,
    refuse_too_long,
)
from sparsebp_cli.source.name import DATASETS, MODELS, find_source, hub_cache, hub_folder, search_hint
from sparsebp_cli.source.weight import check_weights

ABSENT = " is not on this machine"  # of a name that is known, and whose files can be got
OWN = "sparsebp"  # the distribution whose datasets are small and local, and so may be loaded here


@dataclass(frozen=True)
class Problem:
    """One result of the inspection."""

    kind: Literal["wrong", "unknown"]  # wrong: the run would fail; unknown: only the machine of the run can tell
    location: Location  # key of the recipe
    text: str  # what is wrong or unknown


def inspect_sources(recipe: Recipe, folders: Sequence[Path], *, is_here: bool) -> Iterator[Problem]:
    """Yield the problems of the model and the data that a recipe names, without torch, transformers or the network.
    Relative paths are searched in the folders in order. ``is_here`` is whether the run is to execute on this machine;
    files missing here may exist on another one."""
    for check in (_inspect_model, _inspect_reference, _inspect_data):
        for found in check(recipe, folders):
            text = found.text
            if found.kind == "wrong" and not is_here and (text.startswith("no file or folder") or ABSENT in text):
                yield Problem("unknown", found.location, f"{text}; the machine of the run may have one")
            else:
                yield found


def _problems_of(location: Location, check: Callable[..., object], *args: object, **options: object) -> list[Problem]:
    """Return the error of a check as a list of at most one problem."""
    try:
        check(*args, **options)
    except DataError as error:
        return [Problem("wrong", location, str(error))]
    except OSError as error:
        return [Problem("wrong", location, f"cannot be read: {error.strerror or error}")]
    return []


def _inspect_model(recipe: Recipe, folders: Sequence[Path]) -> Iterator[Problem]:
    section, tokenizer = recipe.model, None
    config: Mapping[str, object] | None = section.config
    if section.name is not None:
        at: Location = ("model", "name")
        tokenizer, problems = _find_model(section.name, at, folders)
        if tokenizer is not None:
            problems += _problems_of(at, read_config, tokenizer)
            problems = problems or _problems_of(at, check_files, tokenizer, has_tokenizer=section.tokenizer is None)
            problems = problems or _problems_of(
                at, lambda folder: check_weights(folder, read_config(folder)), tokenizer
            )
            config = None if problems else read_config(tokenizer)
        yield from problems
        if any(problem.kind == "wrong" for problem in problems):
            return
    if section.tokenizer is not None:
        at = ("model", "tokenizer")
        tokenizer, problems = _find_model(section.tokenizer, at, folders)
        yield from problems
        yield from () if tokenizer is None else _problems_of(at, check_tokenizer, tokenizer)
    if config is None:
        return
    yield from _problems_of(("dataset", "max_seq_length"), refuse_too_long, config, recipe.dataset.max_seq_length)
    text = config.get("text_config")
    rows = (text if isinstance(text, Mapping) else config).get("vocab_size")
    number = None if tokenizer is None else count_tokens(tokenizer)
    if number is not None and isinstance(rows, int):
        yield from _problems_of(("model", "tokenizer" if section.tokenizer else "name"), refuse_mismatch, number, rows)


def _find_model(name: str, location: Location, folders: Sequence[Path]) -> tuple[Path | None, list[Problem]]:
    """Return the folder of a model or tokenizer if it is on this machine, and the problems."""
    try:
        source = find_source(name, MODELS, folders)
        found = source() if callable(source) else source
    except DataError as error:
        return None, [Problem("wrong", location, str(error))]
    except Exception as error:  # a plugin's own function may fail in any way
        return None, [Problem("wrong", location, f"{name} is broken: {type(error).__name__}: {error}")]
    if isinstance(found, Path):
        return found, []
    cached = hub_folder(name, "models")
    if cached is not None and (cached / "config.json").is_file():
        return None, []  # a snapshot in the cache may be incomplete, so it is not inspected
    return None, [_unknown(name, location, MODELS, folders)]


def _unknown(name: str, location: Location, group: str, folders: Sequence[Path]) -> Problem:
    text = f"{name}{ABSENT}; the hub may have it"
    return Problem("unknown", location, f"{text}{search_hint(name, group, [*folders, hub_cache()])}")


def _inspect_reference(recipe: Recipe, folders: Sequence[Path]) -> Iterator[Problem]:
    entries = {(*phase.key, n): entry for phase in recipe.phases for n, entry in enumerate(phase.policies)}
    for key, entry in entries.items():
        policy = make_policy(entry.name, **entry.options)
        if isinstance(policy, ReferenceReader) and policy.reference is not None:
            at: Location = (*key, "reference")
            folder, problems = _find_model(policy.reference, at, folders)
            yield from problems
            if folder is not None:
                yield from _problems_of(at, read_config, folder)


def _inspect_data(recipe: Recipe, folders: Sequence[Path]) -> Iterator[Problem]:
    section = recipe.dataset
    policies = [make_policy(entry.name, **entry.options) for entry in recipe.policies]
    spans = frozenset(name for policy in policies if isinstance(policy, TokenSelector) for name in policy.reads)
    name: Location = ("dataset", "name")
    try:
        source = find_source(section.name, DATASETS, folders)
    except DataError as error:
        yield Problem("wrong", name, str(error))
        return
    if isinstance(source, Path) and source.is_dir():
        problems = _problems_of(name, check_folder, source)
        yield from problems
        if not problems:
            yield Problem(
                "unknown", name, f"{source} is a folder: its splits and columns are checked when the run starts"
            )
    elif isinstance(source, Path):
        yield from _inspect_file(section, source, spans)
    elif callable(source):
        yield from _inspect_installed(section, source, spans)
    elif hub_folder(section.name, "datasets") is None:
        yield _unknown(section.name, name, DATASETS, folders)
    else:
        yield Problem("unknown", name, f"{section.name} is in the hub's cache: its rows are checked when it runs")


def _inspect_file(section: DatasetSection, file: Path, spans: Collection[str]) -> Iterator[Problem]:
    try:
        rows = read_rows(file)
    except DataError as error:
        yield Problem("wrong", ("dataset", "name"), str(error))
        return
    if not rows:
        yield Problem("unknown", ("dataset", "name"), f"{file} is one JSON text, too large to be inspected")
    yield from _inspect_splits(section, {section.split: rows}, spans)


def _inspect_installed(
    section: DatasetSection, load: Callable[[], Mapping[str, Rows]], spans: Collection[str]
) -> Iterator[Problem]:
    entry = next(entry for entry in entry_points(group=DATASETS) if entry.name == section.name)
    if entry.dist is None or entry.dist.name != OWN:
        text = f"{section.name} is a dataset of a plugin: it is loaded when the run starts"
        yield Problem("unknown", ("dataset", "name"), text)
        return
    try:
        splits = {name: rows[:NUM_ROWS] for name, rows in load().items()}
    except DataError as error:
        yield Problem("wrong", ("dataset", "name"), str(error))
        return
    yield from _inspect_splits(section, splits, spans)


def _inspect_splits(section: DatasetSection, splits: Mapping[str, Rows], spans: Collection[str]) -> Iterator[Problem]:
    for key in ("split", "eval_split", "test_split"):
        wanted = getattr(section, key)
        if wanted is not None and wanted not in splits:
            yield Problem("wrong", ("dataset", key), str(missing_split(wanted, splits)))
            return
    rows = splits[section.split]
    if not rows:
        return
    columns = {"completion": ("prompt_column", "completion_column")}.get(section.format, ("text_column",))
    for key in columns:
        yield from _problems_of(("dataset", key), check_rows, rows, [getattr(section, key)], None)
    if section.format == "classification":
        yield from _problems_of(("dataset", "label_column"), check_rows, rows, (), section.label_column)
    yield from _problems_of(("dataset", "name"), check_rows, rows, (), None, spans)
