"""Messages in columns of their own, of rows that need not all have every column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsebp_cli.errors import DataError
from sparsebp_cli.source.conversation import find_prompt, read_conversations
from sparsebp_cli.source.reader import iter_rows

COLUMNS = {"user": ["instruction", "input"], "assistant": "output"}
ROWS = [{"instruction": f"Say it {number} times.", "output": "it"} for number in range(4)]


def write(folder: Path, rows: list[dict[str, str]], name: str = "rows.jsonl") -> Path:
    file = folder / name
    if name.endswith(".csv"):
        names = list(rows[0])
        file.write_text("\n".join([",".join(names), *(",".join(row.values()) for row in rows)]) + "\n")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("place", [0, 3])
def test_a_row_without_an_empty_input_is_read_as_one_with_an_empty_input(tmp_path: Path, place: int) -> None:
    rows = [row | ({"input": "now"} if number == place else {}) for number, row in enumerate(ROWS)]
    talks = read_conversations(list(iter_rows(write(tmp_path, rows))), COLUMNS)
    asked = [talk.messages[0]["content"] for talk in talks]
    alike = read_conversations(
        list(iter_rows(write(tmp_path, [{"input": ""} | row for row in rows], "whole.jsonl"))), COLUMNS
    )
    assert asked == [talk.messages[0]["content"] for talk in alike]
    assert asked[place] == f"Say it {place} times.\n\nnow"


def test_rows_without_any_input_are_a_part_of_a_json_file_and_a_fault_of_a_table(tmp_path: Path) -> None:
    talks = read_conversations(list(iter_rows(write(tmp_path, ROWS))), COLUMNS)
    assert [len(talk.messages) for talk in talks] == [2] * 4
    with pytest.raises(DataError, match=r"^the dataset has no column 'input'; it has instruction, output; to read"):
        read_conversations(list(iter_rows(write(tmp_path, ROWS, "rows.csv"))), COLUMNS)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_role_without_any_of_its_columns_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"^the dataset has no column 'question'; it has instruction, output"):
        read_conversations(list(iter_rows(write(tmp_path, ROWS, name))), {"user": "question", "assistant": "output"})


def test_what_a_row_has_in_the_place_of_messages_is_named(tmp_path: Path) -> None:
    for value, said in (
        ([], "column 'messages' must contain a list of messages, got an empty list"),
        ([{"role": "user", "content": None}], "message 0: key 'content' must be text, got null"),
        ([{"role": "user"}], "message 0: 'content' is missing"),
    ):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"messages": value}) + "\n")
        with pytest.raises(DataError, match=rf"rows\.jsonl, line 1: .*{said}$"):
            read_conversations(list(iter_rows(file)), {})


def test_where_a_line_stops_to_be_json_is_told(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n{"text": "a\tb"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl, line 2: not JSON: Invalid control character, column 12$"):
        list(iter_rows(file))


def test_the_prompt_by_which_rows_are_held_out_together_is_that_of_the_columns(tmp_path: Path) -> None:
    rows = list(iter_rows(write(tmp_path, [row | {"system": "Be kind."} for row in ROWS])))
    prompts = [find_prompt(row, COLUMNS | {"system": "system"}) for row in rows]
    assert prompts == [json.dumps(["Be kind.", row["instruction"], None]) for row in ROWS]
    renamed = {"messages": "talk", "user": "human", "assistant": "gpt"}
    (talk,) = iter_rows(write(tmp_path, [{"talk": [{"role": "human", "content": "a"}, {"role": "gpt"}]}]))  # type: ignore[list-item]
    assert json.loads(find_prompt(talk, renamed)) == [{"role": "human", "content": "a"}]


def test_a_column_beside_the_messages_that_only_renames_a_role_is_refused(tmp_path: Path) -> None:
    """Its text would be left out without a word."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = list(iter_rows(write(tmp_path, [{"messages": messages}, {"messages": messages, "rules": "Be brief."}])))
    for columns in ({"system": "rules"}, {"messages": "messages", "system": "rules"}):
        with pytest.raises(DataError, match=r"rows.jsonl, line 2: column 'rules' would be ignored: beside a column"):
            read_conversations(rows, columns)
    named = [{"role": "rules", "content": "Be brief."}, *messages]
    rows = list(iter_rows(write(tmp_path, [{"messages": named, "rules": "x"}])))
    assert read_conversations(rows, {"system": "rules"})[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert len(read_conversations(rows, {"system": "rules", "user": "human"})[0].messages) == 3
