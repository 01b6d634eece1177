"""Hostile data: files and folders are refused in one line or are harmless, and nothing that lies in them runs."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection, Recipe
from sparsebp_cli.source import inspect_sources
from sparsebp_cli.source.reader import iter_rows
from sparsebp_cli.worker.data import build_data
from tests.worker.test_hostile_model import MODULES, Trap

pytestmark = [
    pytest.mark.promise("R12"),
    pytest.mark.filterwarnings("ignore:.*(py_extension_type|PyExtensionType).*"),
]

WORDS = "the quick brown fox jumps over the lazy dog " * 10
ROW = json.dumps({"text": WORDS}) + "\n"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
Write = Callable[[Path], object]


def lines(*more: str, num_good: int = 150) -> Write:
    """Lines of JSON; the inspection reads the first hundred."""
    return lambda file: file.write_text(ROW * num_good + "".join(line + "\n" for line in more))


def content(data: str | bytes) -> Write:
    return lambda file: file.write_bytes(data.encode() if isinstance(data, str) else data)


def parquet(column: pa.Array | None = None, **metadata: Any) -> Write:
    """A table of one column, with metadata of its schema."""
    table = pa.table({"text": pa.array([WORDS] * 20) if column is None else column})
    encoded = {key: value if isinstance(value, bytes) else json.dumps(value) for key, value in metadata.items()}
    return lambda file: pq.write_table(table.replace_schema_metadata(encoded), file)


def extension(name: str, metadata: Callable[[Path], bytes]) -> Write:
    """A column of an extension type of Arrow."""

    def write(file: Path) -> None:
        told = {"ARROW:extension:name": name.encode(), "ARROW:extension:metadata": metadata(file.parent)}
        field = pa.field("text", pa.string(), metadata=told)
        pq.write_table(pa.table([pa.array([WORDS] * 20)], schema=pa.schema([field])), file)

    return write


def feature(kind: str) -> Write:
    """A column that the library would decode: to read a row is to open the file that it names."""
    named = pa.array([{"bytes": None, "path": "/etc/passwd"}] * 20)
    return parquet(named, huggingface={"info": {"features": {"text": {"_type": kind}}}})


def folder(**files: str | bytes | Write) -> Write:
    """A folder with a good file of data and others; ``__`` stands for a dot, ``_in_`` for a slash."""

    def write(place: Path) -> None:
        place.mkdir()
        (place / "train.jsonl").write_text(ROW * 30)
        for name, given in files.items():
            file = place / name.replace("_in_", "/").replace("__", ".")
            file.parent.mkdir(exist_ok=True)
            given(file) if callable(given) else content(given)(file)

    return write


def packed(file: Path) -> None:
    """An archive of 50 MB that has 50 kB."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.jsonl", "\n" * 50_000_000)


def shards(file: Path) -> None:
    """An archive with a pickle, which readers of such archives decode by its suffix."""
    trap = file.with_name(".trap")
    trap.write_bytes(pickle.dumps(Trap(file.parents[1] / "canary")))
    with tarfile.open(file, "w") as archive:
        for suffix in ("pkl", "pyd", "npy"):
            archive.add(trap, f"a.{suffix}")


def card(paths: str) -> str:
    return f"---\nconfigs:\n- config_name: default\n  data_files: {paths}\n---\n"


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps(Trap(file.parents[1] / "canary")))


TRAP = "import os\nos.mkdir('canary')\n"
HOLDS = "a folder of data may contain"
# Name of the file or folder, what it is, what is said of it, and whether the inspection finds it.
REFUSED: dict[str, tuple[str, Write, str, bool]] = {
    "image": ("a.parquet", feature("Image"), "must contain text, got", True),
    "audio": ("a.parquet", feature("Audio"), "must contain text, got", True),
    "video": ("a.parquet", feature("Video"), "must contain text, got", True),
    "pdf": ("a.parquet", feature("Pdf"), "must contain text, got", True),
    "unknown feature": ("a.parquet", feature("os.system"), "", True),
    "bytes": ("a.parquet", parquet(pa.array([b"\xff\0"] * 20)), "must contain text, got bytes", True),
    "mappings": ("a.parquet", parquet(pa.array([{"a": 1}] * 20)), "must contain text, got", True),
    "not Parquet": ("a.parquet", content(b"PAR1" + bytes(100) + b"PAR1"), "a.parquet", True),
    "Parquet of traps": ("a.parquet", lambda file: file.write_bytes(pickle.dumps(Trap(file.parent / "canary"))),
                         "a.parquet", True),
    "deep": ("a.jsonl", lines(DEEP, num_good=0), "nested too deeply", True),
    "deep beyond the inspected rows": ("a.jsonl", lines(DEEP), "line 151: not JSON: nested too deeply", True),
    "deep lists": ("a.jsonl", lines('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}"), "nested too deeply", True),
    "deep and cut": ("a.json", content('{"text": ' + "[" * 200_000), "nested too deeply", True),
    "long number": ("a.jsonl", lines('{"text": 1' + "0" * 5000 + "}", num_good=3), "", True),
    "same key twice": ("a.jsonl", lines(*['{"text": "a", "text": "b"}'] * 99, num_good=0), "twice", True),
    "other kinds of rows": ("a.jsonl", lines('{"text": {"a": 1}}'), "", True),
    "line without an end": ("a.jsonl", content('{"text": "' + "a" * 4_000_000), "", True),
    "NaN": ("a.jsonl", lines('{"text": "a"}', '{"text": NaN}'), "column 'text' must contain text, got none", True),
    "NUL alone": ("a.csv", content(bytes(5000)), "", True),
    "open quote": ("a.csv", content('text\n"' + "a" * 300_000), "", True),
    "script": ("data", folder(data__py=TRAP), HOLDS, True),
    "script of another name": ("data", folder(x_in_load__py=TRAP), HOLDS, True),
    "pickle": ("data", folder(train__pkl=pickled), HOLDS, True),
    "pickles in an archive": ("data", folder(train__tar=shards), HOLDS, True),
    "packed": ("data", folder(train__zip=packed), HOLDS, True),
    "compressed": ("data", folder(train__jsonl__gz=b"\x1f\x8b"), "is damaged or truncated", True),
    "pages": ("data", folder(a__md="x"), HOLDS, True),
    "pipe": ("data", folder(test__txt=os.mkfifo), "is not a regular file", True),
    "card to a system file": ("data", folder(README__md=card("/etc/passwd")), "must name files in", True),
    "card to the parent": ("data", folder(README__md=card("[{split: train, path: ../x.txt}]")), "name files", True),
    "card to an address": ("data", folder(README__md=card("https://h.invalid/x.txt")), "must name files in", True),
    "card to an archive": ("data", folder(README__md=card("'zip://x.txt::train.zip'")), "must name files in", True),
    "card to a home": ("data", folder(README__md=card("{train: ['~/x.txt']}")), "must name files in", True),
    "card with code": ("data", folder(README__md="---\na: !!python/object/apply:os.mkdir [canary]\n---\n"),
                       "settings at its top (YAML) cannot be read", True),
    "deep card": ("data", folder(README__md="---\na: " + "[" * 100_000 + "\n---\n"), "cannot be read", True),
    "card of aliases": ("data", folder(README__md=card("&a [&b [*a, *b], *a, ../x]")), "must name files in", True),
    "settings": ("data", folder(__huggingface__yaml=card("/etc/passwd").replace("---\n", "")), "name files", True),
    "long card": ("data", folder(README__md="---\n" + "#" * 2_000_000), "more than the allowed 1048576 bytes", True),
    "infos": ("data", folder(dataset_infos__json='{"default": {"features": {"text": {"_type": "os.system"}}}}'),
              "os.system", True),
    "saved folder": ("data", folder(data__arrow=b"", state__json="{}"), HOLDS, True),
}  # fmt: skip
# One text of 100,000 letters, 1,000 times: less than 10 kB of Parquet.
REPEATED = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 100_000]))
TURNS = pa.StructArray.from_arrays([REPEATED], names=["content"])
TALKS = pa.ListArray.from_arrays(pa.array(range(0, 1001, 10)), TURNS)
BLOCKS = pa.DictionaryArray.from_arrays(pa.array([0] * 1000), pa.array([b"x" * 100_000], pa.binary(100_000)))


def compressed(begin: str, again: str, times: int, end: str = "", kind: str = "gzip") -> Write:
    """A compressed text of which a part occurs many times."""
    return lambda file: file.write_bytes(
        pa.compress((begin + again * times + end).encode(), kind, asbytes=True)
        if kind == "zstd"
        else gzip.compress((begin + again * times + end).encode())
    )


def write_long_list(file: Path) -> None:
    parquet(pa.ListArray.from_arrays([0, 70_000_000], pa.array(np.zeros(70_000_000, np.int8))))(file)


LONG_ROW = json.dumps({"text": "a" * 1_000_000}) + "\n"
BOMBS: dict[str, tuple[str, Write]] = {
    "Parquet": ("a.parquet", parquet(REPEATED)),
    "Parquet, a list of structs": ("a.parquet", parquet(TALKS)),
    "Parquet, blocks of one size": ("a.parquet", parquet(BLOCKS)),
    "Parquet, empty rows": ("a.parquet", parquet(pa.nulls(400_000, pa.string()))),
    "Parquet, one long list": ("a.parquet", write_long_list),
    "gz, many rows": ("a.jsonl.gz", compressed(ROW * 150, LONG_ROW, 80)),
    "gz, many short rows": ("a.jsonl.gz", compressed(ROW * 150, "{}\n", 400_000)),
    "gz, one line": ("a.jsonl.gz", compressed('{"text": "', "a", 70_000_000)),
    "gz, one text": ("a.txt.gz", compressed("", "a\n", 400_000)),
    "gz, one array": ("a.json.gz", compressed("[", "{},", 400_000, "{}]")),
    "gz, a table": ("a.csv.gz", compressed("text\n", "a\n", 400_000)),
    "zst": ("a.jsonl.zst", compressed("", ROW, 120_000, kind="zstd")),
    "a folder, together": ("data", lambda place: [place.mkdir(), *(
        parquet(REPEATED.slice(0, 400))(place / f"train-{number}.parquet") for number in range(3)
    )]),
}  # fmt: skip


HARMLESS: dict[str, tuple[str, Write]] = {
    "type of Python in Arrow": (
        "a.parquet",
        extension("arrow.py_extension_type", lambda place: pickle.dumps(Trap(place / "canary"))),
    ),
    "type of the library": (
        "a.parquet",
        extension("datasets.features.features.Array2DExtensionType", lambda _: b'[[1, 2], "int32"]'),
    ),
    "unknown type": ("a.parquet", extension("x.y", lambda _: b"\xff")),
    "deep metadata": ("a.parquet", parquet(huggingface=b"[" * 100_000)),
    "odd metadata": ("a.parquet", parquet(pandas=b"{{{", huggingface=b"{}")),
    "long line": ("a.jsonl", lines(json.dumps({"text": WORDS, "more": "a" * 4_000_000}))),
    "many brackets in a text": ("a.jsonl", lines(json.dumps({"text": '[{\\"' * 5000}))),
    "NUL in text": ("a.txt", content("abc \0 def " * 500)),
    "NUL in cells": ("a.csv", content("text\n" + "a\0b the fox\n" * 300)),
    "formulas": ("a.csv", content("text\n" + "=cmd|'/c touch canary'!A1\n" * 300)),
    "card that stays": ("data", folder(README__md=card("[{split: train, path: 'train*'}]") + "/etc/passwd")),
    "hidden files": ("data", folder(__git_in_hook__py=TRAP, __gitattributes="* filter=x", LICENSE=b"\xff")),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with modules that are traps."""
    for module in MODULES:
        (tmp_path / f"{module}.py").write_text(f"import os; os.mkdir({str(tmp_path / 'canary')!r})\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def look_at(path: Path) -> list[str]:
    """Return what the inspection finds wrong: ``validate``, ``run`` and ``export`` refuse these with exit code 2."""
    recipe = Recipe.model_validate(
        {"version": 1, "name": "x", "model": {"name": "austen-llama"}, "dataset": {"name": str(path)}}
    )
    return [found.text for found in inspect_sources(recipe, [path.parent], is_here=True) if found.kind == "wrong"]


def build(path: Path, tiny_folder: Path) -> int:
    """Build the data as a worker does."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "tokenizer")
    return len(build_data(DatasetSection(name=str(path), max_seq_length=16), tokenizer).train)


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_data_is_refused_in_one_line_and_runs_nothing(name: str, place: Path, tiny_folder: Path) -> None:
    file, write, says, is_seen = REFUSED[name]
    write(place / file)
    found = look_at(place / file)
    assert bool(found) == is_seen, found
    assert all(says in text and "\n" not in text for text in found)
    with pytest.raises(DataError) as caught:
        build(place / file, tiny_folder)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (place / "canary").exists()


@pytest.mark.parametrize("name", HARMLESS)
def test_odd_data_runs_nothing(name: str, place: Path, tiny_folder: Path) -> None:
    file, write = HARMLESS[name]
    write(place / file)
    assert look_at(place / file) == []
    assert build(place / file, tiny_folder) > 0
    assert not (place / "canary").exists()


@pytest.mark.promise("R32")
@pytest.mark.parametrize("name", BOMBS)
def test_data_that_unpack_to_too_much_are_refused_by_size(name: str, place: Path, tiny_folder: Path) -> None:
    file, write = BOMBS[name]
    write(place / file)
    with pytest.raises(
        DataError, match=r"unpacks to more than 64 MiB, over 100 times its own size.*dataset.max_examples"
    ):
        build(place / file, tiny_folder)


def test_fewer_rows_of_data_that_repeat_themselves_are_read(place: Path, tiny_folder: Path) -> None:
    compressed("", ROW, 120_000)(place / "a.jsonl.gz")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "tokenizer")
    section = DatasetSection(name=str(place / "a.jsonl.gz"), max_seq_length=16, max_examples=50)
    assert len(build_data(section, tokenizer).train) > 100


def test_texts_that_a_file_stores_as_numbers_are_read_as_they_are(place: Path) -> None:
    rows = [
        {"text": text, "turns": [{"c": text, "n": 1}], "more": {text or "": b"z"}} for text in ("a", None, "b", "a")
    ]
    kinds = {"text": pa.string(), "turns": pa.list_(pa.struct({"c": pa.large_string(), "n": pa.int32()}))}
    schema = pa.schema(kinds | {"more": pa.map_(pa.string(), pa.binary())})
    pq.write_table(pa.Table.from_pylist(rows, schema), place / "a.parquet")
    expected = pq.read_table(place / "a.parquet").to_pylist()
    expected[1]["turns"] = [{"n": 1}]  # every struct of a column has all keys: those without a value were not there
    assert [dict(row) for row in iter_rows(place / "a.parquet")] == expected


LONG = "x" * 200_000
TALK = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("row", "options", "architecture"),
    [
        ({"text": LONG}, {"format": "text"}, "causal"),
        ({"text": LONG}, {"format": "text"}, "masked"),
        ({"prompt": LONG, "completion": "x"}, {"format": "completion"}, "causal"),
        ({"prompt": "x", "completion": LONG}, {"format": "completion"}, "encoder-decoder"),
        (
            {"text": "x", "other": LONG, "label": "a"},
            {"format": "classification", "columns": {"text": ["text", "other"]}},
            "causal",
        ),
        ({"messages": TALK}, {"format": "chat"}, "causal"),
    ],
)
def test_a_pattern_of_a_tokenizer_that_takes_too_long_is_named_in_our_words(
    row: dict[str, Any], options: dict[str, Any], architecture: Any
) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from sparsebp_cli.source.column import as_rows
    from sparsebp_cli.worker.format import encode

    inner = Tokenizer(models.WordLevel({"x": 0, "?": 1, "[MASK]": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="[MASK]")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    section = DatasetSection(name="x", max_seq_length=64, **options)
    with pytest.raises(DataError, match="the tokenizer cannot split these texts: its pattern fails or takes too long"):
        encode(as_rows([row], "rows, row"), section, tokenizer, label_names=["a"], architecture=architecture)
