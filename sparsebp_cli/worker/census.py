"""Compute the statistics of a recipe's data; ``run/census.py`` defines them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.run.census import Census
from sparsebp_cli.source.column import Rows
from sparsebp_cli.worker.encoding import IGNORED, EncodedExample, EncodedSplit


def count_data(
    sides: Mapping[str, tuple[Rows, EncodedSplit]], section: DatasetSection, label_names: Sequence[str], num_unused: int
) -> Census:
    """Return the data statistics of the splits by name. ``num_unused`` is the number of training examples beyond
    ``max_train_examples``."""
    splits = {name: _count(rows, found, label_names) for name, (rows, found) in sides.items()}
    splits["train"]["unused_examples"] = num_unused
    contents = {name: Counter(_contents(rows, section)) for name, (rows, _) in sides.items()}
    for name, content in contents.items():
        splits[name]["duplicates"] = content.total() - len(content)
    shared = {
        f"{one}, {other}": sum(number for text, number in contents[other].items() if text in contents[one])
        for one, other in itertools.combinations(contents, 2)
    }
    return {"splits": splits, "shared": shared}


def _count(rows: Rows, found: EncodedSplit, label_names: Sequence[str]) -> dict[str, Any]:
    lengths = np.array([len(flatten(example)[0]) for example in found.examples] or [0])
    names = ("shortest", "quarter", "median", "three_quarters", "longest")
    targets = sum(int(flatten(example)[1].sum()) if example.labels.ndim else 1 for example in found.examples)
    tokens = int(lengths.sum())
    classes = Counter(int(example.labels) for example in found.examples if not example.labels.ndim)
    return {
        "rows": found.num_rows if found.num_rows is not None else len(rows),
        "examples": len(found.examples),
        "dropped": dict(found.dropped),
        "cut": sum(found.cut.values()),
        "cut_reasons": dict(found.cut),
        "tokens": tokens,
        "targets": targets,
        "target_share": round(targets / tokens, 4) if tokens else 0.0,
        "lengths": dict(zip(names, map(int, np.quantile(lengths, (0, 0.25, 0.5, 0.75, 1))), strict=True)),
        "duplicates": 0,
        "classes": {name: classes[number] for number, name in enumerate(label_names)},
        "left_over_tokens": found.left_over,
        "unused_examples": 0,
    }


def _contents(rows: Rows, section: DatasetSection) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each row, without its label."""
    for row in rows:
        yield tuple(str(row.get(column)) for column in section.read_columns)


def flatten(example: EncodedExample) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of an example (an encoder's input before its decoder's output), and for each token whether the
    loss counts its prediction. The loss never counts a decoder's first token, nor any token in a classification."""
    ids, labels = example.input_ids, example.labels
    if example.is_pair:
        return np.concatenate([ids, labels]), np.repeat([False, True], [len(ids), len(labels)])
    if not labels.ndim:
        return ids, np.zeros(len(ids), dtype=bool)
    is_trained: np.ndarray = labels != IGNORED
    is_trained[0] = False
    return ids, is_trained
