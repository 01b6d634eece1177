"""The census of files that people have is that of a count by hand; what cannot be read is told with file and row."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection, Recipe
from sparsebp_cli.run.census import find_warnings
from sparsebp_cli.source import inspect_sources
from sparsebp_cli.worker.data import build_data
from sparsebp_cli.worker.data_preview import show_first

WORDS = ["the", "film", "is", "good", "bad", "very", "awful", "plot"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token a word, ``<s>`` before a text; an end of sequence is ours."""
    names = ["<s>", "</s>", "<unk>", "<pad>", *WORDS]
    inner = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    made: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    return made


def lines(rows: Iterable[object]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def labelled(labels: Iterable[object]) -> list[dict[str, object]]:
    """Texts of four words, no two alike."""
    return [{"text": f"the film is n{number}", "label": label} for number, label in enumerate(labels)]


def table(labels: Iterable[str]) -> bytes:
    return ("text,label\n" + "".join(f"the film is n{n},{label}\n" for n, label in enumerate(labels))).encode()


def zipped(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


LABELS = {"format": "classification", "max_seq_length": 8}
PAIRS = {"format": "completion", "max_seq_length": 8}
CHAT = {
    "format": "chat",
    "columns": {"user": ["instruction", "input"], "assistant": "output"},
    "chat_template": "{% for m in messages %}{% generation %}{{ m.content }} </s> {% endgeneration %}{% endfor %}",
}
TEXT = {"format": "text", "max_seq_length": 8}
MISSING = ["NA", "None", "null", "n/a", "SA", "EU"]
# Name, content, keys of the dataset, and the sums over training and validation, counted by hand.
COUNTED: dict[str, tuple[str, bytes, dict[str, Any], dict[str, Any]]] = {
    "names that look missing": (
        "a.csv",
        table(MISSING * 5),
        LABELS,
        {"rows": 30, "examples": 30, "tokens": 150, "targets": 30, "classes": dict.fromkeys(MISSING, 5)},
    ),
    "numbers as text": ("a.csv", table(["01", "1"] * 10), LABELS, {"rows": 20, "classes": {"01": 10, "1": 10}}),
    "stars": (
        "a.jsonl",
        lines(labelled([1, 2, 3, 4, 5] * 4)),
        LABELS,
        {"examples": 20, "classes": {"1": 4, "2": 4, "3": 4, "4": 4, "5": 4}},
    ),
    "ten and nine": ("a.jsonl", lines(labelled([9, 10] * 10)), LABELS, {"classes": {"9": 10, "10": 10}}),
    "booleans": ("a.jsonl", lines(labelled([True, False] * 10)), LABELS, {"classes": {"true": 10, "false": 10}}),
    "blank lines, mark and CRLF": (
        "a.jsonl",
        b"\xef\xbb\xbf" + lines(labelled("ab" * 10)).replace(b"\n", b"\r\n\r\n"),
        LABELS,
        {"rows": 20, "classes": {"a": 10, "b": 10}},
    ),
    "separators in a text": (
        "a.jsonl",
        '{"text": "the\u2028film", "label": "a"}\n'.encode() * 20,
        LABELS,
        {"rows": 20, "tokens": 60},
    ),
    "compressed lines": ("a.jsonl.gz", gzip.compress(lines(labelled("ab" * 10))), LABELS, {"rows": 20, "tokens": 100}),
    "compressed table": ("a.csv.zst", zipped(table("ab" * 10)), LABELS, {"rows": 20, "tokens": 100}),
    "one array": ("a.json", json.dumps(labelled("ab" * 10), indent=1).encode(), LABELS, {"rows": 20, "tokens": 100}),
    "lines in an array's file": ("a.json", lines(labelled("ab" * 10)), LABELS, {"rows": 20, "tokens": 100}),
    "values over lines": (
        "a.csv",
        b"text,label\n" + b'"the\nfilm, ""good""",a\n' * 20,
        LABELS,
        {"rows": 20, "tokens": 80},
    ),
    "long texts": (
        "a.jsonl",
        lines([{"text": "the film " * 10, "label": "a"}, {"text": "bad", "label": "b"}] * 10),
        LABELS,
        {"rows": 20, "examples": 20, "cut": 10, "tokens": 10 * 8 + 10 * 2},
    ),
    "long prompts": (
        "a.jsonl",
        lines({"prompt": ("film " * (20 if n % 2 else 2)) + f"n{n}", "completion": " good"} for n in range(40)),
        PAIRS,
        {
            "rows": 40,
            "examples": 20,
            "dropped": {"the prompt fills max_seq_length": 20},
            "cut": 0,
            "tokens": 20 * 6,
            "targets": 20 * 2,
        },
    ),
    "long completions": (
        "a.jsonl",
        lines({"prompt": f"n{n}", "completion": " good" * 30} for n in range(20)),
        PAIRS,
        {"rows": 20, "examples": 20, "cut": 20, "tokens": 160, "targets": 20 * 6, "dropped": {}},
    ),
    "just fits": (
        "a.jsonl",
        lines({"prompt": f"n{n}", "completion": " good" * 5} for n in range(20)),
        PAIRS,
        {"cut": 0, "tokens": 160, "targets": 20 * 6},
    ),
    "empty texts": (
        "a.jsonl",
        lines([{"text": ""}, {"text": "the film is good"}] * 20),
        TEXT,
        {"dropped": {"the text is empty": 20}, "examples": 15, "tokens": 120, "targets": 105},
    ),
    "empty completions": (
        "a.csv",
        b"prompt,completion\n" + b"".join(b"n%d, good\nn%d,\n" % (n, n) for n in range(20)),
        PAIRS,
        {"rows": 40, "dropped": {"the completion is empty": 20}, "examples": 20, "targets": 40},
    ),
    "empty turns": (
        "a.jsonl",
        lines({"instruction": f"n{n}", "input": "", "output": ["good", "", None, "film"][n % 4]} for n in range(40)),
        CHAT,
        {"rows": 40, "dropped": {"the user or the assistant has no text": 20}, "examples": 20},
    ),
    "left over": ("a.jsonl", lines([{"text": "the film is"}] * 21), TEXT, {"examples": 13, "left_over_tokens": 1}),
    "duplicates": ("a.jsonl", lines(labelled("a" * 10) * 3), LABELS, {"rows": 30, "duplicates": 20}),
    "texts of numbers": (
        "a.jsonl",
        lines({"prompt": n, "completion": n * n} for n in range(20)),
        PAIRS,
        {"examples": 20},
    ),
}
REFUSED: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "no label": (
        "a.jsonl",
        lines(labelled(["a"] * 150 + [None])),
        LABELS,
        "a.jsonl, line 151: column 'label' must contain a label, got none",
    ),
    "empty label": ("a.csv", table(["a", "b", ""]), LABELS, "a.csv, line 4: column 'label' must contain a label"),
    "no text": (
        "a.jsonl",
        lines([{"text": "the"}] * 30 + [{"other": 1}]),
        TEXT,
        "line 31: column 'text' must contain text, got none",
    ),
    "NaN": (
        "a.json",
        b'[{"text": "the"}, {"text": NaN}]',
        TEXT,
        "a.json, row 2: column 'text' must contain text, got none",
    ),
    "late byte": (
        "a.jsonl",
        lines(labelled("a" * 9000)) + '{"text": "größe"}'.encode("latin-1"),
        TEXT,
        "a.jsonl, line 9001: not UTF-8 text: got byte 0xf6",
    ),
    "half a character": (
        "a.jsonl",
        lines(labelled("ab")) + b'{"text": "a \\ud83d", "label": "a"}',
        LABELS,
        "a.jsonl, line 3: not valid Unicode: got half of a surrogate pair",
    ),
    "late list": (
        "a.jsonl",
        lines(labelled([*"ab" * 75, ["a"]])),
        LABELS,
        "line 151: column 'label' must contain a text",
    ),
    "late mapping": (
        "a.jsonl",
        lines([{"text": "the"}] * 150 + [{"text": {"a": 1}}]),
        TEXT,
        "line 151: column 'text' must contain text",
    ),
    "change of type": (
        "a.jsonl",
        lines(labelled([1] * 20 + ["1"])),
        LABELS,
        "line 21: the value in column 'label' is text, but a number in earlier rows",
    ),
    "half a class": (
        "a.jsonl",
        lines(labelled([0.5, 0.5])),
        LABELS,
        "line 1: column 'label' must contain a text, a whole number",
    ),
    "an infinite class": (
        "a.json",
        b'[{"text": "the", "label": 1.0}, {"text": "film", "label": -Infinity}]',
        LABELS,
        "row 2: column 'label' must contain a text, a whole number",
    ),
    "cut archive": (
        "a.jsonl.gz",
        gzip.compress(lines(labelled("ab" * 500)))[:-20],
        LABELS,
        "a.jsonl.gz: is damaged or truncated",
    ),
    "damaged archive": ("a.csv.zst", b"text,label\n", LABELS, "a.csv.zst: "),
    "open quote": ("a.csv", b'text,label\nthe,a\n"the,b\nfilm,a\n', LABELS, "not a table: unexpected end of data"),
    "too many values": (
        "a.csv",
        b"text,label\nthe,a\nthe, film,a\n",
        LABELS,
        "a.csv, line 3: must have at most 2 values",
    ),
    "the same column twice": ("a.csv", b"text,text\nthe,a\n", TEXT, "a.csv, line 1: the column 'text' occurs twice"),
    "the same key twice": ("a.jsonl", b'{"text": "a", "text": "b"}', TEXT, "line 1: the key 'text' occurs twice"),
}


def build(folder: Path, name: str, content: bytes, options: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any:
    (folder / name).write_bytes(content)
    return build_data(DatasetSection(name=str(folder / name), **options), tokenizer)


def look(file: Path, options: dict[str, Any]) -> list[str]:
    recipe = {"version": 1, "name": "x", "model": {"name": "austen-llama"}, "dataset": {"name": str(file), **options}}
    found = inspect_sources(Recipe.model_validate(recipe), [file.parent], is_here=True)
    return [problem.text for problem in found if problem.kind == "wrong"]


@pytest.mark.parametrize("case", COUNTED)
def test_the_census_of_a_file_is_that_of_a_count_by_hand(tmp_path: Path, tokenizer: Any, case: str) -> None:
    name, content, options, wanted = COUNTED[case]
    census = build(tmp_path, name, content, options, tokenizer).census
    splits = census["splits"].values()
    for key, value in wanted.items():
        if isinstance(value, dict):
            total: Counter[str] = Counter()
            for split in splits:
                total.update(split[key])
            assert total == value
        elif key != "duplicates":
            assert sum(split[key] for split in splits) == value, key
        else:  # of a row on its own side
            assert sum(split[key] for split in splits) == value
    assert look(tmp_path / name, options) == []


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_on_is_told_with_file_and_row(tmp_path: Path, tokenizer: Any, case: str) -> None:
    name, content, options, says = REFUSED[case]
    with pytest.raises(DataError) as caught:
        build(tmp_path, name, content, options, tokenizer)
    assert says in str(caught.value)
    found = look(tmp_path / name, options)  # the inspection has the same reader
    assert len(found) >= 1
    assert says in found[0]


def test_a_row_of_parquet_is_told_by_its_number(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["the film"] * 1500 + [None], "label": [1] * 1501}), file)
    with pytest.raises(DataError, match=r"a\.parquet, row 1501: column 'text' must contain text, got none"):
        build_data(DatasetSection(name=str(file), **LABELS), tokenizer)


def test_rows_of_packed_text_are_counted_on_the_sides_that_have_a_part_of_them(tmp_path: Path, tokenizer: Any) -> None:
    rows = lines([{"text": "the film is very good"}] * 40)  # 7 tokens each with both ends
    options = TEXT | {"eval_fraction": 0.2, "test_fraction": 0.5}
    splits = build(tmp_path, "a.jsonl", rows, options, tokenizer).census["splits"]
    assert {name: split["examples"] for name, split in splits.items()} == {"train": 28, "validation": 3, "test": 4}
    assert {name: split["rows"] for name, split in splits.items()} == {"train": 32, "validation": 4, "test": 5}


def test_losses_missing_classes_and_shared_rows_are_told_with_numbers(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    train = labelled("aab" * 10)
    (folder / "train.jsonl").write_bytes(lines(train))
    (folder / "test.jsonl").write_bytes(lines([*train[:2], {"text": "very good", "label": "a"}]))
    section = DatasetSection(name=str(folder), eval_split="test", **LABELS)
    told = dict(reversed(one) for one in find_warnings(build_data(section, tokenizer).census))
    assert told == {
        "data: validation has no example of 1 of 2 classes: b": "warning",
        "data: 2 of 3 validation rows are also in train": "warning",
    }
    long = lines(
        [{"prompt": "film " * 20, "completion": "x"}, *({"prompt": f"n{n}", "completion": "y"} for n in range(29))]
    )
    census = build(tmp_path, "long.jsonl", long, PAIRS, tokenizer).census
    assert list(find_warnings(census)) == [
        ("info", "data: 1 of 27 train rows are dropped: the prompt fills max_seq_length")
    ]


def test_nothing_left_is_told_with_the_reason(tmp_path: Path, tokenizer: Any) -> None:
    rows = lines([{"prompt": f"film {n} " * 20, "completion": "x"} for n in range(20)])
    with pytest.raises(
        DataError, match=r"training split has no example: in 18 rows, the prompt fills max_seq_length \(max"
    ):
        build(tmp_path, "a.jsonl", rows, PAIRS, tokenizer)


def test_the_first_examples_are_shown_as_a_person_reads_them(tmp_path: Path, tokenizer: Any) -> None:
    rows = lines([{"prompt": "the film is", "completion": " very good"}] * 20)
    data = build(tmp_path, "a.jsonl", rows, PAIRS, tokenizer)
    (shown, *_) = show_first(data, tokenizer)["train"]
    assert shown["tokens"] == ["<s>", "the", "film", "is", "very", "good", "</s>"]
    assert shown["trained"] == [False] * 4 + [True] * 3
    assert shown["ids"] == data.train[0].input_ids.tolist()
    assert shown["parts"] == [["<s> the film is", False], [" very good </s>", True]]
    assert sum(shown["trained"]) * len(data.train) == data.census["splits"]["train"]["targets"]
