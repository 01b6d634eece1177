"""A text that training reads is the text of its user, or the recipe says what is wrong with it."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.run.census import find_warnings
from sparsebp_cli.source.bundled import austen_llama
from sparsebp_cli.source.column import as_rows
from sparsebp_cli.source.reader import iter_rows
from sparsebp_cli.worker.format import encode
from sparsebp_cli.worker.text_check import check_texts

TURN = "{% for m in messages %}<|{{ m.role }}|>\n"
REST = "<eos>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
PLAIN = TURN + "{{ m.content }}" + REST
CALLS = "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} ARGUMENTS{% endfor %}{{ m.content or '' }}"
CALL = TURN + CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}") + REST
ROME, OSLO = {"city": "Rome"}, {"unit": "C", "days": 0.5}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(austen_llama())
    return found


@pytest.fixture(scope="module")
def with_start() -> Any:
    """Return a tokenizer that puts a beginning of sequence in front of a text."""
    found: Any = AutoTokenizer.from_pretrained(austen_llama())
    found.add_special_tokens({"bos_token": "<s>"})
    start = [("<s>", found.convert_tokens_to_ids("<s>"))]
    found.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=start)
    return found


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: object, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calls(arguments: object) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def check(rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **section: Any) -> dict[str, Any]:
    """Return what is wrong with rows, and the trained text of the first."""
    values = {"name": "rows", "max_seq_length": 64, "format": "chat"} | section
    dataset, placed = DatasetSection(**values), as_rows(rows, "rows, row")
    found = encode(placed, dataset, tokenizer)
    return {**check_texts(placed, found, dataset, tokenizer), "texts": [one.text for one in found.written]}


def kinds(found: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {fault["kind"]: (fault["number"], fault["of"]) for fault in found["faults"]}


def talks(*answers: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"messages": [user("Is it warm?"), answer]} for answer in answers]


@pytest.mark.parametrize(
    "written",
    ["{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}", "{{ '' + c.function.arguments + '' }}"],
    ids=["as JSON", "as it is", "joined with text"],
)
def test_arguments_of_a_call_are_written_once_whether_they_are_an_object_or_its_json(
    tokenizer: PreTrainedTokenizerBase, written: str
) -> None:
    template = TURN + CALLS.replace("ARGUMENTS", written) + REST
    found = check(talks(calls(ROME), calls(json.dumps(ROME))), tokenizer, chat_template=template)
    assert found["faults"] == []
    assert found["texts"][0] == found["texts"][1]
    assert 'CALL weather {"city": "Rome"}<eos>' in found["texts"][0]


def test_arguments_that_are_no_json_and_are_written_in_quotes_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = talks(calls('city: "Rome"'))
    with pytest.raises(DataError, match=r"1 of 1 rows have text that .* writes in Python syntax, in tool_calls"):
        check(rows, tokenizer, chat_template=CALL)


def test_rows_have_the_same_text_from_every_kind_of_file(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [*talks(calls(ROME), calls(OSLO), says("No.")), {"messages": [user("Hi"), says("ho", name="x")]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerows([["messages"], *([json.dumps(row["messages"])] for row in rows)])
    section = DatasetSection(name="rows", format="chat", chat_template=CALL)
    texts = {
        name: [one.text for one in encode(list(iter_rows(tmp_path / name)), section, tokenizer).written]
        for name in ("a.jsonl", "a.json", "a.parquet", "a.csv")
    }
    assert "null" not in "".join(texts["a.parquet"])
    for name, found in texts.items():
        assert found == texts["a.jsonl"], name


def test_numbers_and_booleans_have_the_text_that_stands_in_the_file(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    section, texts = DatasetSection(name="rows", format="completion"), []
    for value in ("1e-7", "0.30", "true", "12"):
        (tmp_path / "a.jsonl").write_text(f'{{"prompt": "a\\n", "completion": {value}}}\n')
        (tmp_path / "a.csv").write_text(f'prompt,completion\n"a\n",{value}\n')
        files = [tmp_path / name for name in ("a.jsonl", "a.csv")]
        texts += [encode(list(iter_rows(file)), section, tokenizer).written[0].text for file in files]
        assert texts[-2:] == [f"a\n{value}"] * 2


def test_one_part_of_text_is_a_text_and_several_are_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    part, other = {"type": "text", "text": "It is."}, {"type": "text", "text": "Very."}
    found = check(talks(says([part]), says("It is.")), tokenizer, chat_template=PLAIN)
    assert found["faults"] == []
    assert found["texts"][0] == found["texts"][1]
    with pytest.raises(DataError, match=r"1 of 1 rows have text that .* in Python syntax, in content"):
        check(talks(says([part, other])), tokenizer, chat_template=PLAIN)
    loop = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    parts = check(talks(says([part, other])), tokenizer, chat_template=TURN + loop + "{% endif %}" + REST)
    assert parts["faults"] == []


def test_marks_that_leave_out_the_end_of_a_turn_are_refused_and_few_turns_are_named(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = talks(*[says(f"ho {number}") for number in range(4)])
    marked = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
    marked += "{{ m.content }}{% endif %}"
    with pytest.raises(DataError, match=r"4 of 4 trained turns do not end with .*inside \{% generation %\}"):
        check(rows, tokenizer, chat_template=TURN + marked + REST, train_on="last")
    some = marked.replace("{% endgen", "{% if '2' not in m.content %}<eos>{% endif %}{% endgen")
    found = check(rows, tokenizer, chat_template=TURN + some + REST.replace("<eos>", ""), train_on="last")
    assert kinds(found) == {"end": (1, 4)}
    assert found["faults"][0]["first"].endswith(", row 3")
    assert (found["affected"], found["rows"]) == (1, 4)


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": "<s>a kind word"}],
        [{"prompt": "<s>two and\n", "completion": "three"}],
        [{"prompt": "two and\n", "completion": "three<eos>\n"}],
    ],
    ids=["text", "prompt", "end"],
)
def test_a_beginning_or_end_that_the_data_have_already_is_refused(
    with_start: PreTrainedTokenizerBase, rows: list[dict[str, Any]]
) -> None:
    form = "text" if "text" in rows[0] else "completion"
    with pytest.raises(DataError, match=r"1 of 1 rows begin or end .* twice .*remove this token from the data"):
        check(rows, with_start, format=form, max_seq_length=8)
    clean = [{name: text.replace("<s>", "").replace("<eos>\n", "<eos>") for name, text in row.items()} for row in rows]
    assert check(clean, with_start, format=form, max_seq_length=8)["faults"] == []


def test_a_beginning_that_template_and_message_both_write_is_refused(with_start: PreTrainedTokenizerBase) -> None:
    rows = [{"messages": [user("<s>Hi"), says("ho")]}]
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    with pytest.raises(DataError, match="twice"):
        check(rows, with_start, chat_template=template)


def test_what_an_assistant_says_must_be_written_and_other_parts_are_named(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"1 of 1 rows have trained text that .* does not write, in reasoning_content"):
        check(talks(says("ho", reasoning_content="because")), tokenizer, chat_template=PLAIN)
    rows = [{"messages": [user("Hi") | {"name": "Ann"}, says("ho")], "tools": [{"function": {"name": "weather"}}]}]
    found = check(rows, tokenizer, chat_template=PLAIN)
    assert kinds(found) == {"unread": (1, 1)}
    assert found["faults"][0]["shown"] == "name, tools"
    few = check(talks(says("ho", thinking="so"), says("a"), says("b")), tokenizer, chat_template=PLAIN)
    assert kinds(few) == {"lost": (1, 3)}


def test_control_tokens_of_messages_are_named_and_refused_where_most_rows_have_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = [{"messages": [user(f"{end}Hi"), says("ho")]} for end in ("<eos>", "", "")]
    found = check(rows, tokenizer, chat_template=PLAIN)
    assert kinds(found) == {"control": (1, 3)}
    with pytest.raises(DataError, match=r"1 of 1 rows have control tokens in their own messages, such as <eos>"):
        check(rows[:1], tokenizer, chat_template=PLAIN)


def test_control_tokens_of_plain_texts_are_a_warning_and_in_most_rows_a_note(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    levels = []
    for texts in (["a<eos>b", "a", "b"], ["a<eos>b", "c<eos>d", "e"]):
        found = check([{"text": text} for text in texts], tokenizer, format="text", max_seq_length=8)
        split = {"dropped": {}, "cut_reasons": {}, "classes": {}, "texts": found}
        levels += [level for level, _ in find_warnings({"splits": {"train": split}, "shared": {}})]
    assert levels == ["warning", "info"]


def test_null_arguments_of_json_are_kept_and_named(tokenizer: PreTrainedTokenizerBase) -> None:
    found = check(talks(calls({"city": "Rome", "unit": None})), tokenizer, chat_template=CALL)
    assert kinds(found) == {"null": (1, 1)}
    assert '"unit": null' in found["texts"][0]
