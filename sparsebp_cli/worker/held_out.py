"""Choose the held-out rows by a hash of their content, so that neither the file's order nor a seed decides.

Rows with equal content are on the same side: equal texts, equal prompts, or all rows of a document if the recipe names
its column. The draw depends on nothing else, so it is the same on every machine and in every order of the rows.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy.error_text import show_with_type
from sparsebp_cli.recipe.schema import GROUP, DatasetSection
from sparsebp_cli.source.column import Rows, read_column
from sparsebp_cli.source.conversation import find_prompt


def find_keys(rows: Rows, section: DatasetSection) -> list[str]:
    """Return the key of each row: the document, else text or prompt. Rows with the same key are on the same side."""
    if GROUP in section.columns:
        column = section.column(GROUP)
        groups = read_column(rows, column)
        for row, group in zip(rows, groups, strict=True):
            if group is None or not isinstance(group, str | int):
                got = show_with_type(group)
                raise DataError(f"{row.place}: column {column!r} must contain text or a number, got {got}")
        return [str(group) for group in groups]
    if section.format == "chat":
        return [find_prompt(row, section.columns) for row in rows]
    columns = section.read_columns[: 1 if section.format == "completion" else None]
    values = zip(*(read_column(rows, column) for column in columns), strict=True)
    return ["\0".join("" if value is None else str(value) for value in row) for row in values]


def draw_rows(keys: Sequence[str], number: int, section: DatasetSection) -> list[int]:
    """Return the indices of the held-out rows in the order of the hash, so that any first part is a random draw too.

    There are exactly ``number``, unless no groups of equal keys have this sum: then fewer, or the smallest group if all
    are larger. With only one or two such groups, rows are drawn one by one, because holding out one group would leave
    only the other to train on. The data statistics then count the rows that are on both sides.
    """
    groups: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    by_document = GROUP in section.columns
    if len(groups if by_document else keys) < 2:
        what = f"values of {section.column(GROUP)!r}" if by_document else "rows"
        raise DataError(
            f"dataset {section.name}: validation data need 2 or more {what}, got {len(groups)}; give an eval_split"
        )
    if len(groups) < 3 and not by_document and min(map(len, groups.values())) > number:
        groups = {f"{key}\0{n}": [row] for key, rows in groups.items() for n, row in enumerate(rows)}
    # See decision 25.
    order = sorted(groups, key=hash_text)
    taken: list[str] = []
    free = number
    for key in order:
        if len(groups[key]) <= free and len(taken) < len(groups) - 1:
            taken.append(key)
            free -= len(groups[key])
    taken = taken or [min(order, key=lambda key: len(groups[key]))]
    return [row for key in taken for row in groups[key]]


def draw_test(keys: Sequence[str], lengths: Sequence[int], section: DatasetSection) -> list[bool]:
    """Return for each held-out row whether it is in the test split. Documents (rows with equal keys) stay whole and are
    ordered by a hash of their key. The test split gets ``test_fraction`` of the total length, as nearly as possible."""
    assert section.test_fraction is not None
    documents: Counter[str] = Counter()  # key to length
    for key, length in zip(keys, lengths, strict=True):
        documents[key] += length
    if len(documents) < 2:
        raise DataError(
            f"dataset {section.name}: test_fraction needs 2 or more held-out documents, got {len(documents)}; give a "
            "test_split"
        )
    order, wanted = sorted(documents, key=hash_text), section.test_fraction * sum(documents.values())
    sums = list(itertools.accumulate(documents[key] for key in order))[:-1]  # one document stays in validation
    test = set(order[: 1 + min(range(len(sums)), key=lambda number: abs(sums[number] - wanted))])
    return [key in test for key in keys]


def hash_text(text: str) -> str:
    """Return the hash that orders texts."""
    return hashlib.sha256(text.encode()).hexdigest()
