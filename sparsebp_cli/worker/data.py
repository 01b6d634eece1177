"""Token ids and labels of training, validation and test examples, from a recipe's dataset."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError, SparseBPError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.run import home
from sparsebp_cli.source import (
    DATASETS,
    LOADERS,
    TEXT_FEATURES,
    check_folder,
    check_text,
    find_source,
    missing_column,
    missing_split,
    refuse_deep,
)
from sparsebp_cli.worker.token_mask import mask_tokens

IGNORED = -100  # the label that transformers' losses ignore

Rows = Sequence[dict[str, object]]


class DataSplit(Protocol):
    """The rows of a split, read one by one."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> dict[str, object]: ...


class Table(DataSplit, Protocol):
    """A split of ``datasets``."""

    @property
    def features(self) -> Mapping[str, object]: ...
    def remove_columns(self, names: list[str], /) -> DataSplit: ...


Item = TypeVar("Item")


@dataclass(frozen=True)
class Example:
    """One tokenised example."""

    input_ids: np.ndarray  # int64, at most max_seq_length
    labels: np.ndarray  # int64, as long as input_ids, -100 where nothing is trained; or one class (0-d)
    # further columns that policies read, by name, as long as input_ids
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    document: int = 0  # row of the dataset; of a packed block, the row that most of its tokens are from


@dataclass(frozen=True)
class Data:
    """Training, validation and test examples."""

    train: list[Example]  # in the order of the dataset
    held_out: list[Example]  # validation: read by evaluations during training
    label_names: list[str]  # classes by number; empty unless this is a classification
    # read once, after the last step; empty if the recipe has no test split
    test: list[Example] = field(default_factory=list)
    # training examples that policies compare with and nobody trains on, by their place among all of them
    set_aside: dict[int, Example] = field(default_factory=dict)

    def with_set_aside(self, number: int | None, seed: int) -> Data:
        """Return the data with ``number`` training examples set aside, drawn by the seed; with None, the same data.
        Raise DataError if nothing is left to train on."""
        if number is None:
            return self
        if number >= len(self.train):
            many = f"the {len(self.train)} training examples"
            raise DataError(f"dataset.policy_validation_examples: must be below {many}, got {number}")
        # By a hash, so that no library's version changes what is drawn.
        drawn = sorted(range(len(self.train)), key=lambda place: hashlib.sha256(f"{seed} {place}".encode()).digest())
        aside = {place: self.train[place] for place in sorted(drawn[:number])}
        return replace(self, train=[e for place, e in enumerate(self.train) if place not in aside], set_aside=aside)

    def digest(self, without: Collection[str] = ()) -> str:
        """Return 16 hexadecimal digits that depend on every token, label and column of all splits, except the columns
        ``without``, and not on which examples are set aside."""
        sha, left = hashlib.sha256(), iter(self.train)
        places = range(len(self.train) + len(self.set_aside))
        for split in (
            [self.set_aside.get(place) or next(left) for place in places],
            self.held_out,
            *([self.test] if self.test else []),
        ):
            sha.update(len(split).to_bytes(8, "little"))
            for example in split:
                sha.update(example.input_ids.tobytes() + b"|" + example.labels.tobytes())
                for name, column in sorted(example.columns.items()):
                    if name not in without:
                        sha.update(b"|" + name.encode() + b"|" + column.tobytes())
        return sha.hexdigest()[:16]


def build_data(section: DatasetSection, tokenizer: PreTrainedTokenizerBase, columns: Collection[str] = ()) -> Data:
    """Load a recipe's dataset and tokenise its splits. ``columns`` names columns of character spans; the training
    examples hold them as token masks."""
    splits = _load_splits(section)
    rows = _pick(splits, section.split, section.max_examples)
    held_out_rows = _pick(splits, section.eval_split, section.max_examples) if section.eval_split else None
    test_rows = _pick(splits, section.test_split, section.max_examples) if section.test_split else []
    if held_out_rows and section.test_fraction is not None:
        question = section.prompt_column if section.format == "completion" else section.text_column
        texts = ["" if text is None else str(text) for text in _column(held_out_rows, question)]
        held_out_rows, test_rows = draw_test(held_out_rows, texts, [len(t) for t in texts], section)
    label_names = _label_names(rows, section.label_column) if section.format == "classification" else []

    def build(some: Rows, columns: Collection[str] = ()) -> list[Example]:
        if section.format == "text":
            return _pack(some, section, tokenizer, columns)
        if section.format == "completion":
            return _complete(some, section, tokenizer, columns)
        return _classify(some, section, tokenizer, label_names)

    train, test = build(rows, columns), build(test_rows) if test_rows else []
    if held_out_rows:
        held_out = build(held_out_rows)
    else:
        num_held_out = max(1, round(section.eval_fraction * len(train)))
        train, held_out = train[:-num_held_out], train[-num_held_out:]
        if section.test_fraction is not None:
            held_out, test = _cut_test(held_out, section)
    train = train[: section.max_train_examples]
    if section.format == "completion" and not section.completion_only_loss:
        train = [replace(example, labels=example.input_ids) for example in train]
    has_test = section.test_split is not None or section.test_fraction is not None
    for name, split in (("training", train), ("held-out", held_out), *([("test", test)] if has_test else [])):
        if not split:
            raise DataError(
                f"dataset {section.name}: the {name} split has no example of {section.max_seq_length} tokens"
            )
    return Data(train, held_out, label_names, test)


def draw_test(
    items: Sequence[Item], texts: Sequence[str | bytes], lengths: Sequence[int], section: DatasetSection
) -> tuple[list[Item], list[Item]]:
    """Split held-out items into validation and test by whole documents, in the order of the items. Documents are
    ordered by a hash of their text, so neither the order of the data nor a seed decides, and items with equal text stay
    together; the test gets ``test_fraction`` of the total length, as nearly as whole documents allow."""
    assert section.test_fraction is not None
    documents: dict[str, int] = {}  # hash to length
    keys = [hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest() for text in texts]
    for key, length in zip(keys, lengths, strict=True):
        documents[key] = documents.get(key, 0) + length
    if len(documents) < 2:
        raise DataError(
            f"dataset {section.name}: test_fraction needs 2 or more held-out documents, got {len(documents)}; give a "
            "test_split"
        )
    order, wanted = sorted(documents), section.test_fraction * sum(documents.values())
    sums = list(itertools.accumulate(documents[key] for key in order))[:-1]  # one document is left for validation
    test = set(order[: 1 + min(range(len(sums)), key=lambda number: abs(sums[number] - wanted))])
    chosen = [key in test for key in keys]
    kept = itertools.compress(items, (not one for one in chosen))
    return list(kept), list(itertools.compress(items, chosen))


def _cut_test(held_out: list[Example], section: DatasetSection) -> tuple[list[Example], list[Example]]:
    """Split held-out examples into validation and test. Packed text is cut once, so that at most one document is on
    both sides; other examples are drawn."""
    if section.format != "text":
        prompts = [_prompt(example) for example in held_out]
        return draw_test(held_out, [ids.tobytes() for ids in prompts], [1] * len(held_out), section)
    assert section.test_fraction is not None
    if len(held_out) < 2:
        raise DataError(
            f"dataset {section.name}: test_fraction needs 2 or more held-out examples of {section.max_seq_length} "
            f"tokens, got {len(held_out)}"
        )
    num_test = min(len(held_out) - 1, max(1, round(section.test_fraction * len(held_out))))
    return held_out[:-num_test], held_out[-num_test:]


def _prompt(example: Example) -> np.ndarray:
    """Return the untrained tokens of a completion, or all tokens of a classification example."""
    return example.input_ids[example.labels == IGNORED] if example.labels.ndim else example.input_ids


def _load_splits(section: DatasetSection) -> dict[str, DataSplit]:
    source = find_source(section.name, DATASETS)
    if callable(source):
        return dict(source())
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()

    options: dict[str, Any] = {"cache_dir": str(home() / "cache" / "datasets")}
    if isinstance(source, Path) and source.is_file():
        if source.suffix not in LOADERS:
            raise DataError(f"{source}: cannot read {source.suffix or 'no suffix'}; allowed: {', '.join(LOADERS)}")
        options |= {"path": LOADERS[source.suffix], "data_files": {section.split: str(source)}}
        options |= {"sample_by": "document"} if LOADERS[source.suffix] == "text" else {}
        options |= {"sep": "\t"} if source.suffix == ".tsv" else {}
        if LOADERS[source.suffix] == "json":
            refuse_deep(source)
    else:
        if isinstance(source, Path):
            check_folder(source)
        options |= {"path": str(source), "name": section.subset, "revision": section.revision}
    try:
        return {name: _keep_readable(rows, section) for name, rows in load_dataset(**options).items()}
    except SparseBPError:
        raise
    except Exception as error:  # datasets raises many types, each for a dataset that the user has to correct
        reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"dataset {section.name}: {reason}") from None


def _keep_readable(rows: Table, section: DatasetSection) -> DataSplit:
    """Drop columns of images, audio and the like: reading a row would open and decode the files that it names."""
    wanted = {section.text_column, section.label_column, section.prompt_column, section.completion_column}
    kinds = {name: type(feature).__name__ for name, feature in rows.features.items() if not _is_plain(feature)}
    for name in kinds.keys() & wanted:
        raise DataError(f"column {name!r}: must be text, got {kinds[name]}")
    return rows.remove_columns(list(kinds))


def _is_plain(feature: object) -> bool:
    """Return whether reading a feature of ``datasets``, including nested ones, decodes no file."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    if isinstance(feature, list):
        return all(map(_is_plain, feature))
    if hasattr(feature, "feature"):
        return _is_plain(feature.feature)
    return type(feature).__name__ in TEXT_FEATURES


def _pick(splits: dict[str, DataSplit], name: str, max_examples: int | None) -> Rows:
    if name not in splits:
        raise missing_split(name, splits)
    rows = splits[name]
    count = len(rows) if max_examples is None else min(max_examples, len(rows))
    return [rows[i] for i in range(count)]


def _column(rows: Rows, name: str) -> list[object]:
    if rows and name not in rows[0]:
        raise missing_column(name, rows[0])
    return [row[name] for row in rows]


def _texts(rows: Rows, name: str) -> list[object]:
    """Return a column of texts. A list or a mapping is refused, because ``str()`` would turn it into Python syntax."""
    texts = _column(rows, name)
    for number, text in enumerate(texts):
        check_text(text, name, number)
    return texts


def _ids(tokenizer: PreTrainedTokenizerBase, texts: Iterable[object]) -> list[list[int]]:
    texts = ["" if text is None else str(text) for text in texts]
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _pack(
    rows: Rows, section: DatasetSection, tokenizer: PreTrainedTokenizerBase, columns: Collection[str] = ()
) -> list[Example]:
    texts, length = _texts(rows, section.text_column), section.max_seq_length
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = [[*ids, *end] for ids in _ids(tokenizer, texts)]
    blocks = _blocks(documents, length)
    rows_of_tokens = np.repeat(np.arange(len(documents)), [len(ids) for ids in documents])
    owners = rows_of_tokens[: blocks.size].reshape(blocks.shape)
    marked = {
        name: _blocks(mask_tokens(tokenizer, [texts], _column(rows, name), name, end=len(end)), length)
        for name in columns
    }
    return [
        Example(block, block, {name: of_name[number] for name, of_name in marked.items()}, _most_common(owner))
        for number, (block, owner) in enumerate(zip(blocks, owners, strict=True))
    ]


def _blocks(parts: Iterable[Iterable[int]], length: int) -> np.ndarray:
    stream = np.array([i for part in parts for i in part], dtype=np.int64)
    return stream[: len(stream) // length * length].reshape(-1, length)


def _most_common(values: np.ndarray) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])


def _complete(
    rows: Rows, section: DatasetSection, tokenizer: PreTrainedTokenizerBase, columns: Collection[str] = ()
) -> list[Example]:
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = [_texts(rows, section.prompt_column), _texts(rows, section.completion_column)]
    prompts, completions = (_ids(tokenizer, part) for part in texts)
    marked = {
        name: mask_tokens(tokenizer, texts, _column(rows, name), name, start=len(start), end=len(end))
        for name in columns
    }
    examples = []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = np.array([*start, *prompt, *completion, *end][: section.max_seq_length], dtype=np.int64)
        labels = ids.copy()
        labels[: len(start) + len(prompt)] = IGNORED
        if (labels[1:] != IGNORED).any():
            cut = {name: by_row[number][: len(ids)] for name, by_row in marked.items()}
            examples.append(Example(ids, labels, cut, number))
    return examples


def _label_names(rows: Rows, column: str) -> list[str]:
    labels = set(_column(rows, column))
    numbers = [label for label in labels if isinstance(label, int)]
    if numbers and len(numbers) == len(labels):
        if min(numbers) < 0:
            raise DataError(f"column {column!r}: labels must be 0 or more, got {min(numbers)}")
        return [str(i) for i in range(max(numbers) + 1)]
    return sorted(str(label) for label in labels)


def _classify(
    rows: Rows, section: DatasetSection, tokenizer: PreTrainedTokenizerBase, names: list[str]
) -> list[Example]:
    number = {name: i for i, name in enumerate(names)}
    examples = []
    texts = _texts(rows, section.text_column)
    labelled = zip(_ids(tokenizer, texts), _column(rows, section.label_column), strict=True)
    for row, (ids, label) in enumerate(labelled):
        if str(label) not in number:
            raise DataError(f"label {label!r} is not among those of the training split: {', '.join(names[:10])}")
        kept = np.array(ids[: section.max_seq_length] or [tokenizer.pad_token_id], dtype=np.int64)
        examples.append(Example(kept, np.array(number[str(label)], dtype=np.int64), document=row))
    return examples
