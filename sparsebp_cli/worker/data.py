"""Build token ids and labels of training, validation and test examples from a recipe's dataset."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.run.census import Census
from sparsebp_cli.source.architecture import Architecture
from sparsebp_cli.source.column import Rows, name_classes, read_labels
from sparsebp_cli.source.split import find_splits, take_rows
from sparsebp_cli.worker.census import count_data
from sparsebp_cli.worker.encoding import IGNORED, EncodedExample, EncodedSplit
from sparsebp_cli.worker.format import encode
from sparsebp_cli.worker.gap import Gaps
from sparsebp_cli.worker.held_out import draw_rows, draw_test, find_keys
from sparsebp_cli.worker.text_check import check_texts

__all__ = ["IGNORED", "Data", "EncodedExample", "build_data"]


@dataclass(frozen=True)
class Data:
    """Training, validation and test examples."""

    train: list[EncodedExample]  # in the order of the dataset
    held_out: list[EncodedExample]  # validation examples: read by evaluations during training
    label_names: list[str]  # classes by number; empty unless this is a classification
    # read once, after the last step; empty if the recipe has no test split
    test: list[EncodedExample] = field(default_factory=list)
    gaps: Gaps | None = None  # for a masked language model: masks drawn at every visit of a training example
    held_out_rows: Rows = ()  # rows that examples' ``document`` numbers; empty if the tail of packed text is held out
    test_rows: Rows = ()
    census: Census = field(default_factory=dict)  # data statistics; see run/census.py

    def digest(self, without: Collection[str] = ()) -> str:
        """Return 16 hexadecimal digits that depend on every token, label and column of all splits, except the columns
        ``without``."""
        sha = hashlib.sha256()
        for split in (self.train, self.held_out, *([self.test] if self.test else [])):
            # Include lengths and separators, so that moving a token between examples changes the digest.
            sha.update(len(split).to_bytes(8, "little"))
            for example in split:
                sha.update(example.input_ids.tobytes() + b"|" + example.labels.tobytes())
                if example.token_type_ids is not None:
                    sha.update(b"|types|" + example.token_type_ids.tobytes())
                for name, column in sorted(example.columns.items()):
                    if name not in without:
                        sha.update(b"|" + name.encode() + b"|" + column.tobytes())
        return sha.hexdigest()[:16]


def build_data(
    section: DatasetSection,
    tokenizer: PreTrainedTokenizerBase,
    columns: Collection[str] = (),
    architecture: Architecture = "causal",
    *,
    head: Sequence[str] = (),
    refuses: bool = True,
) -> Data:
    """Load a recipe's dataset and tokenise its splits. ``columns`` names columns of character spans; the training
    examples hold them as token masks. ``head`` are the classes of :func:`~sparsebp_cli.worker.model.read_head`. With
    ``refuses``, raise DataError if most rows have a fault of :func:`check_texts`; otherwise only record the faults."""
    sides = _divide(section)
    label_names = []
    if section.format == "classification":  # use the labels of all rows that training might have received
        of_training = [*sides.train, *(sides.held_out if section.eval_split is None else ())]
        label_names = name_classes(read_labels(of_training, section.column("label")), head)
    train = encode(sides.train, section, tokenizer, columns, label_names, architecture)
    held_out = encode(sides.held_out, section, tokenizer, (), label_names, architecture)
    test = encode(sides.test, section, tokenizer, (), label_names, architecture)
    if section.eval_split is None and not section.draws_rows:
        _cut_tail(train, held_out, test, section)
    gaps = Gaps.of(tokenizer) if architecture == "masked" else None
    if gaps is not None:
        held_out.examples, test.examples = gaps.draw_all(held_out.examples), gaps.draw_all(test.examples)
    num_made = len(train.examples)
    train.examples = train.examples[: section.max_train_examples]
    if section.format == "completion" and section.train_on == "all":
        train.examples = [replace(example, labels=example.input_ids) for example in train.examples]
    has_test = section.test_split is not None or section.test_fraction is not None
    for name, part in (("training", train), ("held-out", held_out), *([("test", test)] if has_test else [])):
        if not part.examples:
            raise DataError(f"dataset {section.name}: the {name} split has no example{_why_none(part, section)}")
    counted = train if gaps is None else replace(train, examples=gaps.draw_all(train.examples))
    parts = {"train": (sides.train, counted), "validation": (sides.held_out, held_out)}
    parts |= {"test": (sides.test, test)} if has_test else {}
    census = count_data(parts, section, label_names, num_made - len(train.examples))
    for name, (rows, found) in parts.items():
        census["splits"][name]["texts"] = check_texts(rows, found, section, tokenizer, refuses=refuses)
    return Data(
        train.examples,
        held_out.examples,
        label_names,
        test.examples,
        gaps=gaps,
        held_out_rows=sides.held_out,
        test_rows=sides.test,
        census=census,
    )


@dataclass(frozen=True)
class Sides:
    """The rows of each split."""

    train: Rows
    held_out: Rows  # empty if the tail of packed text is held out
    test: Rows


def _divide(section: DatasetSection) -> Sides:
    """Read the rows, and draw the held-out ones, unless the recipe names splits for them or packs texts."""
    splits = find_splits(section)
    rows = take_rows(splits, section.split, section.max_examples)
    held_out: Rows = []
    if section.eval_split is not None:
        held_out = take_rows(splits, section.eval_split, section.max_examples)
    elif section.draws_rows:
        number = max(1, round(section.eval_fraction * len(rows)))
        drawn = draw_rows(find_keys(rows, section), number, section)
        held_out, is_out = [rows[row] for row in drawn], set(drawn)
        rows = [row for number, row in enumerate(rows) if number not in is_out]
    test: Rows = take_rows(splits, section.test_split, section.max_examples) if section.test_split else []
    if held_out and section.test_fraction is not None:
        keys = find_keys(held_out, section)
        lengths = [len(str(row.get(section.read_columns[0]) or "")) for row in held_out]
        if section.format == "chat":
            lengths = list(map(len, keys))
        is_test = draw_test(keys, lengths, section)
        test = list(itertools.compress(held_out, is_test))
        held_out = list(itertools.compress(held_out, (not one for one in is_test)))
    return Sides(rows, held_out, test)


def _cut_tail(train: EncodedSplit, held_out: EncodedSplit, test: EncodedSplit, section: DatasetSection) -> None:
    """Move the last blocks of packed text to validation, and the last of these to the test split. Each cut leaves at
    most one document on both sides."""
    number = max(1, round(section.eval_fraction * len(train.examples)))
    _move_tail(train, held_out, number)
    if section.test_fraction is None:
        return
    if len(held_out.examples) < 2:
        raise DataError(
            f"dataset {section.name}: test_fraction needs 2 or more held-out examples of {section.max_seq_length} "
            f"tokens, got {len(held_out.examples)}"
        )
    number = min(len(held_out.examples) - 1, max(1, round(section.test_fraction * len(held_out.examples))))
    _move_tail(held_out, test, number)


def _move_tail(source: EncodedSplit, target: EncodedSplit, number: int) -> None:
    source.examples, target.examples = source.examples[:-number], source.examples[-number:]
    source.block_rows, target.block_rows = source.block_rows[:-number], source.block_rows[-number:]
    for part in (source, target):
        part.num_rows = part.block_rows[-1][1] - part.block_rows[0][0] + 1 if part.block_rows else 0


def _why_none(part: EncodedSplit, section: DatasetSection) -> str:
    if part.dropped:
        reasons = ", ".join(f"in {number} rows, {reason}" for reason, number in part.dropped.items())
        return f": {reasons} (max_seq_length is {section.max_seq_length})"
    return f" of {section.max_seq_length} tokens" if section.format == "text" else ": it has no rows"
