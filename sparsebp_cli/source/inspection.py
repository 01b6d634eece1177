"""Inspect a recipe's model and data before a run: find errors, and what this machine cannot know."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparsebp_cli.entry_point import entry_points
from sparsebp_cli.errors import AbsentDataError, DataError
from sparsebp_cli.policy import ReferenceReader, make_policy
from sparsebp_cli.policy.field_error import Location
from sparsebp_cli.policy.known_kind import find_columns
from sparsebp_cli.recipe.schema import GROUP, DatasetSection, Recipe
from sparsebp_cli.run.census import MOST_LOST
from sparsebp_cli.source.adapter import find_adapter, read_adapter
from sparsebp_cli.source.architecture import find_architecture
from sparsebp_cli.source.attention import refuse_missing_package
from sparsebp_cli.source.column import (
    Rows,
    missing_split,
    name_classes,
    number_labels,
    read_column,
    read_labels,
    read_texts,
)
from sparsebp_cli.source.conversation import holds_messages, list_names, read_talks, read_template
from sparsebp_cli.source.model import (
    check_files,
    check_tokenizer,
    count_tokens,
    read_config,
    refuse_mismatch,
    refuse_too_long,
)
from sparsebp_cli.source.name import DATASETS, MODELS, find_source, hub_cache, hub_folder, search_hint
from sparsebp_cli.source.split import Splits, find_splits, take_rows
from sparsebp_cli.source.weight import check_weights, refuse_absurd

FEWEST_BLOCKS = 100  # of packed text: with fewer (counted in bytes), a split may have no block
MOST_SPECIAL = 16  # maximal number of special tokens around an example
MOST_ROWS = 100_000  # number of rows inspected in each split; the run reads all rows, with the same reader
CONTROL_TOKEN = re.compile(r"<[^<>\s]{1,40}>|\[[A-Z]{2,}\]")  # possible control tokens, such as <eos>, <|end|>, [SEP]
OWN = ("sparsebp", "sparsebp-tools")  # packages whose datasets are small and local, so that they may be loaded here


@dataclass(frozen=True)
class SourceProblem:
    """A problem that the inspection found."""

    kind: Literal["wrong", "unknown"]  # wrong: the run would fail; unknown: only the run's machine can tell
    location: Location  # key of the recipe
    text: str  # what is wrong or unknown
    is_absent: bool = False  # whether another machine may have what is missing here


def inspect_sources(recipe: Recipe, folders: Sequence[Path], *, is_here: bool) -> Iterator[SourceProblem]:
    """Yield problems of the model and data that a recipe names, without torch, transformers or network. Relative paths
    are searched in the folders in order. ``is_here`` says whether the run executes on this machine; otherwise files
    missing here may exist there."""
    for check in (_inspect_model, _inspect_reference, _inspect_template, _inspect_data):
        for found in check(recipe, folders):
            if found.is_absent and not is_here:
                yield SourceProblem("unknown", found.location, f"{found.text}; the machine that trains may have it")
            else:
                yield found


def needs_tokens(section: DatasetSection, folders: Sequence[Path]) -> bool:
    """Return whether only a tokenizer can find the data's problems. A model may tokenise prompts differently when it is
    asked, or texts may hold control tokens. Too many rows may be dropped or cut, or no data may be left. Apart from
    special tokens, a text has at most as many tokens as bytes. Raise DataError as the run would."""
    # Tests check the texts of our own datasets; tokenising them all takes half a minute.
    is_ours = section.name in entry_points(group=DATASETS).names and _is_own(section.name)
    if section.format == "chat" or (section.format == "completion" and not is_ours):
        return True
    splits = find_splits(section, folders)
    for name in filter(None, dict.fromkeys([section.split, section.eval_split, section.test_split])):
        rows = take_rows(splits, name, min(section.max_examples or MOST_ROWS, MOST_ROWS))
        texts = ["".join(str(row.get(column, "")) for column in section.read_columns) for row in rows]
        if not is_ours and any(map(CONTROL_TOKEN.search, texts)):
            return True
        lengths = [len(text.encode()) for text in texts]
        if section.format == "text":
            if sum(lengths) < FEWEST_BLOCKS * section.max_seq_length:
                return True
        elif sum(length + MOST_SPECIAL > section.max_seq_length for length in lengths) > MOST_LOST * len(rows):
            return True
    return False


def _problems_of(
    location: Location, check: Callable[..., object], *args: object, **options: object
) -> list[SourceProblem]:
    """Run a check and return its error as a list of at most one problem."""
    try:
        check(*args, **options)
    except DataError as error:
        return [SourceProblem("wrong", location, str(error), isinstance(error, AbsentDataError))]
    except OSError as error:
        return [SourceProblem("wrong", location, f"cannot be read: {error.strerror or error}")]
    return []


def _inspect_model(recipe: Recipe, folders: Sequence[Path]) -> Iterator[SourceProblem]:
    section, tokenizer = recipe.model, None
    yield from _problems_of(("model", "attention"), refuse_missing_package, section.attention)
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
    if section.adapter is not None:
        yield from _problems_of(
            ("model", "adapter"), lambda name: read_adapter(find_adapter(name, section.name)), section.adapter
        )
    if section.tokenizer is not None:
        at = ("model", "tokenizer")
        tokenizer, problems = _find_model(section.tokenizer, at, folders)
        yield from problems
        yield from () if tokenizer is None else _problems_of(at, check_tokenizer, tokenizer)
    if config is None:
        return
    if section.name is None:
        yield from _problems_of(("model", "config"), refuse_absurd, config, "")
    at = ("model", "name" if section.name is not None else "config")
    yield from _problems_of(at, find_architecture, config, recipe.dataset.format)
    yield from _problems_of(("dataset", "max_seq_length"), refuse_too_long, config, recipe.dataset.max_seq_length)
    text = config.get("text_config")
    rows = (text if isinstance(text, Mapping) else config).get("vocab_size")
    number = None if tokenizer is None else count_tokens(tokenizer)
    if number is not None and isinstance(rows, int):
        yield from _problems_of(("model", "tokenizer" if section.tokenizer else "name"), refuse_mismatch, number, rows)


def _find_model(name: str, location: Location, folders: Sequence[Path]) -> tuple[Path | None, list[SourceProblem]]:
    """Return the folder of a model or tokenizer, None if it is not on this machine; and the problems found."""
    try:
        source = find_source(name, MODELS, folders)
        found = source() if callable(source) else source
    except DataError as error:
        return None, [SourceProblem("wrong", location, str(error), isinstance(error, AbsentDataError))]
    except Exception as error:  # a plug-in's function may fail in any way
        return None, [SourceProblem("wrong", location, f"{name} is broken: {type(error).__name__}: {error}")]
    if isinstance(found, Path):
        return found, []
    cached = hub_folder(name, "models")
    if cached is not None and (cached / "config.json").is_file():
        return None, []  # do not inspect the hub's cache: a snapshot may be incomplete
    return None, [_unknown(name, location, MODELS, folders)]


def _unknown(name: str, location: Location, group: str, folders: Sequence[Path]) -> SourceProblem:
    text = f"{name} is not on this machine; the hub may have it"
    return SourceProblem("unknown", location, f"{text}{search_hint(name, group, [*folders, hub_cache()])}")


def _inspect_reference(recipe: Recipe, folders: Sequence[Path]) -> Iterator[SourceProblem]:
    for number, entry in enumerate(recipe.policy):
        policy = make_policy(entry.name, **entry.options)
        if isinstance(policy, ReferenceReader) and policy.reference is not None:
            at: Location = ("policy", number, "reference")
            folder, problems = _find_model(policy.reference, at, folders)
            yield from problems
            if folder is not None:
                yield from _problems_of(at, read_config, folder)


def _inspect_template(recipe: Recipe, folders: Sequence[Path]) -> Iterator[SourceProblem]:
    if recipe.dataset.chat_template is not None:
        at: Location = ("dataset", "chat_template")
        yield from _problems_of(at, read_template, recipe.dataset.chat_template, folders)


def _inspect_data(recipe: Recipe, folders: Sequence[Path]) -> Iterator[SourceProblem]:
    section = recipe.dataset
    policies = [make_policy(entry.name, **entry.options) for entry in recipe.policy]
    spans = find_columns(policies)
    name: Location = ("dataset", "name")
    try:
        source = find_source(section.name, DATASETS, folders)
    except DataError as error:
        yield SourceProblem("wrong", name, str(error), isinstance(error, AbsentDataError))
        return
    if not isinstance(source, Path) and not callable(source):
        known = hub_folder(section.name, "datasets") is not None
        text = f"{section.name} is in the hub's cache: its rows are checked when the run starts"
        yield SourceProblem("unknown", name, text) if known else _unknown(section.name, name, DATASETS, folders)
        return
    if callable(source) and not _is_own(section.name):
        yield SourceProblem(
            "unknown", name, f"{section.name} is a dataset of a plugin: it is loaded when the run starts"
        )
        return
    try:
        splits = find_splits(section, folders)
    except DataError as error:
        yield SourceProblem("wrong", name, str(error))
        return
    yield from _inspect_splits(section, splits, spans)


def _is_own(name: str) -> bool:
    entry = next(entry for entry in entry_points(group=DATASETS) if entry.name == name)
    return entry.dist is not None and entry.dist.name in OWN


def _inspect_splits(section: DatasetSection, splits: Splits, spans: Collection[str]) -> Iterator[SourceProblem]:
    """Read the rows of the recipe's splits as the run will, and yield the first problem."""
    keys = {key: getattr(section, key) for key in ("split", "eval_split", "test_split")}
    for key, wanted in keys.items():
        if wanted is not None and wanted not in splits:
            yield SourceProblem("wrong", ("dataset", key), str(missing_split(wanted, splits)))
            return
    most, classes = min(section.max_examples or MOST_ROWS, MOST_ROWS), list[str]()
    for key, wanted in keys.items():
        try:
            rows = [] if wanted is None else take_rows(splits, wanted, most)
        except DataError as error:
            yield SourceProblem("wrong", ("dataset", "name"), str(error))
            return
        problems = list(_inspect_rows(section, rows, spans if key == "split" else ()))
        if section.format == "classification" and not problems:
            label = section.column("label")
            # Training rows that are not inspected may have further labels.
            if key == "split" and (len(rows) < most or most == section.max_examples):
                classes = name_classes(read_labels(rows, label))
            elif classes:
                problems = _problems_of(("dataset", key), number_labels, rows, label, classes)
        yield from problems
        if problems:
            return


def _inspect_rows(section: DatasetSection, rows: Rows, spans: Collection[str]) -> Iterator[SourceProblem]:
    at: Location = ("dataset", "columns")
    if section.format == "chat":
        for name in list_names(section.columns):
            yield from _problems_of(at, read_column, rows, name)
    if section.format == "chat" or (section.format == "completion" and holds_messages(rows, section.column("prompt"))):
        yield from _problems_of(at, read_talks, rows, section)
    else:
        for name in section.read_columns:
            may_be_empty = section.format != "classification"
            yield from _problems_of(at, read_texts, rows, name, may_be_empty=may_be_empty)
    if section.format == "classification":
        yield from _problems_of(at, read_labels, rows, section.column("label"))
    if GROUP in section.columns:
        yield from _problems_of(at, read_column, rows, section.column(GROUP))
    for name in spans:
        yield from _problems_of(("dataset", "name"), read_column, rows, name)
