"""Held-out rows are drawn by their content: equal rows are on one side, in any order of the file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection, ModelSection
from sparsebp_cli.worker.data import Data, build_data
from sparsebp_cli.worker.held_out import draw_rows
from sparsebp_cli.worker.model import build_tokenizer
from tests.worker.conftest import LLAMA

PLAIN = DatasetSection(name="x", format="completion")
GROUPED = DatasetSection(name="x", format="completion", columns={"group": "document"})


@given(st.lists(st.sampled_from("abcdefghijkl"), min_size=8, max_size=60), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_equal_rows_are_on_one_side_and_the_number_is_kept_where_it_can_be(keys: list[str], number: int) -> None:
    counts = Counter(keys)
    if len(counts) < 3:
        return
    drawn = draw_rows(keys, number, PLAIN)
    assert len(drawn) == len(set(drawn)) < len(keys)
    out = {keys[row] for row in drawn}
    assert len(drawn) == sum(counts[key] for key in out), "a content is drawn as a whole"
    assert len(drawn) <= max(number, min(counts.values()))
    free = number - len(drawn)
    left = [size for key, size in counts.items() if key not in out]
    assert len(left) == 1 or free <= 0 or min(left) > free, "nothing more would fit"


def test_exactly_the_number_is_drawn_in_any_order_and_more_rows_change_little() -> None:
    keys = [f"row {number}" for number in range(1000)]
    drawn = draw_rows(keys, 100, PLAIN)
    assert len(drawn) == 100
    turned = draw_rows(keys[::-1], 100, PLAIN)
    assert [999 - row for row in turned] == drawn, "the first ones are the same as well"
    more = draw_rows([*keys, *(f"new {number}" for number in range(10))], 101, PLAIN)
    assert len(set(drawn) & set(more)) >= 95


def test_two_contents_are_drawn_row_by_row_and_documents_never() -> None:
    keys = ["good"] * 150 + ["bad"] * 150
    drawn = draw_rows(keys, 30, PLAIN)
    assert len(drawn) == 30
    assert {keys[row] for row in drawn} == {"good", "bad"}
    assert len(draw_rows(keys, 30, GROUPED)) == 150
    with pytest.raises(DataError, match="need 2 or more values of 'document', got 1; give an eval_split"):
        draw_rows(["one"] * 10, 1, GROUPED)


def build(folder: Path, tiny_folder: Path, rows: list[dict[str, Any]], **options: Any) -> Data:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_tokenizer(ModelSection(config=LLAMA, tokenizer=str(tiny_folder / "tokenizer")))
    return build_data(DatasetSection(name=str(file), **{"max_seq_length": 32} | options), tokenizer)


def test_a_file_that_is_sorted_by_label_holds_out_some_of_each_class(tmp_path: Path, tiny_folder: Path) -> None:
    rows = [{"text": f"number {n}", "label": f"class{n // 100}"} for n in range(400)]
    drawn = build(tmp_path, tiny_folder, rows, format="classification")
    assert len(drawn.held_out) == 40
    assert set(drawn.census["splits"]["validation"]["classes"].values()) != {0}
    assert min(drawn.census["splits"]["validation"]["classes"].values()) > 0
    assert build(tmp_path, tiny_folder, rows, format="classification").digest() == drawn.digest()


def test_a_document_is_on_one_side_also_of_packed_text_and_of_a_test(tmp_path: Path, tiny_folder: Path) -> None:
    rows = [{"text": f"document{n // 5} line {n} of the file", "document": n // 5} for n in range(300)]
    options = {"columns": {"group": "document"}, "eval_fraction": 0.2, "test_fraction": 0.5, "max_seq_length": 8}
    data = build(tmp_path, tiny_folder, rows, **options)
    splits = data.census["splits"]
    assert splits["train"]["rows"] == 240
    assert splits["validation"]["rows"] + splits["test"]["rows"] == 60
    assert splits["validation"]["rows"] % 5 == splits["test"]["rows"] % 5 == 0
    assert not any(data.census["shared"].values())


def test_the_tail_of_packed_text_is_held_out_unless_documents_are_named(tmp_path: Path, tiny_folder: Path) -> None:
    rows = [{"text": f"line {n} of the file"} for n in range(200)]
    tail = build(tmp_path, tiny_folder, rows, max_seq_length=8)
    drawn = build(tmp_path, tiny_folder, rows, max_seq_length=8, columns={"group": "text"})
    assert tail.digest() != drawn.digest()
    assert drawn.census["splits"]["validation"]["rows"] == 20
