"""A first look at the model and the data of a recipe: what is wrong, and what cannot be known from here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy import TokenSelector, make_policy
from sparsebp_cli.policy.finding import Location
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
from sparsebp_cli.source.name import DATASETS, MODELS, find_source, hub_cache, hub_folder, tell_search
from sparsebp_cli.source.weight import check_weights

OWN = "sparsebp"  # whose datasets are small, and made of files that ship


@dataclass(frozen=True)
class Look:
    """One thing that was found.

    Args:
        kind: ``wrong`` ends a run before it starts; ``unknown`` is what only the place of the run can tell.
        location: The key of the recipe that it is about.
        text: What is wrong, or not known.
    """

    kind: Literal["wrong", "unknown"]
    location: Location
    text: str


def look(recipe: Recipe, folders: Sequence[Path], *, is_here: bool) -> Iterator[Look]:
    """Look at the model and the data that a recipe names, without torch, transformers or the network.

    Args:
        recipe: Resolved.
        folders: In which relative paths are looked for, in this order.
        is_here: Whether the run will work on this machine: elsewhere other files may lie.

    Yields:
        What was found; nothing where all is well.
    """
    for check in (_look_at_model, _look_at_reference, _look_at_data):
        for found in check(recipe, folders):
            text = found.text
            if found.kind == "wrong" and not is_here and text.startswith("no file or folder"):
                yield Look("unknown", found.location, f"{text}; where the run works there may be one")
            else:
                yield found


def _try(location: Location, check: Callable[..., object], *args: Any, **options: Any) -> list[Look]:
    """Return what a check says, at most one thing."""
    try:
        check(*args, **options)
    except DataError as error:
        return [Look("wrong", location, str(error))]
    except OSError as error:
        return [Look("wrong", location, f"cannot be read: {error.strerror or error}")]
    return []


def _look_at_model(recipe: Recipe, folders: Sequence[Path]) -> Iterator[Look]:
    section, tokenizer = recipe.model, None
    config: Mapping[str, Any] | None = section.config
    if section.name is not None:
        at: Location = ("model", "name")
        tokenizer, problems = _find_model(section.name, at, folders)
        if tokenizer is not None:
            problems += _try(at, read_config, tokenizer)
            problems = problems or _try(at, check_files, tokenizer, has_tokenizer=section.tokenizer is None)
            problems = problems or _try(at, lambda folder: check_weights(folder, read_config(folder)), tokenizer)
            config = None if problems else read_config(tokenizer)
        yield from problems
        if any(problem.kind == "wrong" for problem in problems):
            return
    if section.tokenizer is not None:
        at = ("model", "tokenizer")
        tokenizer, problems = _find_model(section.tokenizer, at, folders)
        yield from problems
        yield from () if tokenizer is None else _try(at, check_tokenizer, tokenizer)
    if config is None:
        return
    yield from _try(("dataset", "max_seq_length"), refuse_too_long, config, recipe.dataset.max_seq_length)
    text = config.get("text_config")
    rows = (text if isinstance(text, Mapping) else config).get("vocab_size")
    number = None if tokenizer is None else count_tokens(tokenizer)
    if number is not None and isinstance(rows, int):
        yield from _try(("model", "tokenizer" if section.tokenizer else "name"), refuse_mismatch, number, rows)


def _find_model(name: str, location: Location, folders: Sequence[Path]) -> tuple[Path | None, list[Look]]:
    """Find the folder of a model or tokenizer, as far as it is on this machine."""
    try:
        source = find_source(name, MODELS, folders)
        found = source() if callable(source) else source
    except DataError as error:
        return None, [Look("wrong", location, str(error))]
    except Exception as error:  # a plugin's own function may fail in any way
        return None, [Look("wrong", location, f"{name} is broken: {type(error).__name__}: {error}")]
    if isinstance(found, Path):
        return found, []
    cached = hub_folder(name, "models")
    if cached is not None and (cached / "config.json").is_file():
        return None, []  # of a snapshot not every file has to be there
    return None, [_unknown(name, location, MODELS, folders)]


def _unknown(name: str, location: Location, group: str, folders: Sequence[Path]) -> Look:
    text = f"{name} is not on this machine, a hub may have it"
    return Look("unknown", location, f"{text}{tell_search(name, group, [*folders, hub_cache()])}")


def _look_at_reference(recipe: Recipe, folders: Sequence[Path]) -> Iterator[Look]:
    for number, entry in enumerate(recipe.policy):
        policy = make_policy(entry.name, **entry.options)
        if isinstance(policy, TokenSelector) and policy.reference is not None:
            at: Location = ("policy", number, "reference")
            folder, problems = _find_model(policy.reference, at, folders)
            yield from problems
            if folder is not None:
                yield from _try(at, read_config, folder)


def _look_at_data(recipe: Recipe, folders: Sequence[Path]) -> Iterator[Look]:
    section = recipe.dataset
    policies = [make_policy(entry.name, **entry.options) for entry in recipe.policy]
    spans = frozenset(name for policy in policies if isinstance(policy, TokenSelector) for name in policy.reads)
    name: Location = ("dataset", "name")
    try:
        source = find_source(section.name, DATASETS, folders)
    except DataError as error:
        yield Look("wrong", name, str(error))
        return
    if isinstance(source, Path) and source.is_dir():
        problems = _try(name, check_folder, source)
        yield from problems
        if not problems:
            yield Look("unknown", name, f"{source} is a folder: which splits and columns it has is found when it runs")
    elif isinstance(source, Path):
        yield from _look_at_file(section, source, spans)
    elif callable(source):
        yield from _look_at_installed(section, source, spans)
    elif hub_folder(section.name, "datasets") is None:
        yield _unknown(section.name, name, DATASETS, folders)
    else:
        yield Look("unknown", name, f"{section.name} is in the hub's cache: its rows are looked at when it runs")


def _look_at_file(section: DatasetSection, file: Path, spans: Collection[str]) -> Iterator[Look]:
    try:
        rows = read_rows(file)
    except DataError as error:
        yield Look("wrong", ("dataset", "name"), str(error))
        return
    if not rows:
        yield Look("unknown", ("dataset", "name"), f"{file} is too large to be looked into as one JSON text")
    yield from _look_at_splits(section, {section.split: rows}, spans)


def _look_at_installed(section: DatasetSection, load: Callable[[], Any], spans: Collection[str]) -> Iterator[Look]:
    entry = next(entry for entry in entry_points(group=DATASETS) if entry.name == section.name)
    if entry.dist is None or entry.dist.name != OWN:
        text = f"{section.name} is a dataset of a plugin: it is loaded when the run starts"
        yield Look("unknown", ("dataset", "name"), text)
        return
    splits = {name: rows[:NUM_ROWS] for name, rows in load().items()}
    yield from _look_at_splits(section, splits, spans)


def _look_at_splits(section: DatasetSection, splits: Mapping[str, Rows], spans: Collection[str]) -> Iterator[Look]:
    for key in ("split", "eval_split", "test_split"):
        wanted = getattr(section, key)
        if wanted is not None and wanted not in splits:
            yield Look("wrong", ("dataset", key), str(missing_split(wanted, splits)))
            return
    rows = splits[section.split]
    if not rows:
        return
    columns = {"completion": ("prompt_column", "completion_column")}.get(section.format, ("text_column",))
    for key in columns:
        yield from _try(("dataset", key), check_rows, rows, [getattr(section, key)], None)
    if section.format == "classification":
        yield from _try(("dataset", "label_column"), check_rows, rows, (), section.label_column)
    yield from _try(("dataset", "name"), check_rows, rows, (), None, spans)
