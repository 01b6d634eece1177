"""The shipped datasets: found by name, plain rows, the same on every call and in every process, without torch."""

import hashlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pydoc_data.topics import topics

import pytest

NAMES = ["austen", "cmudict", "python-docs"]
COLUMNS = {"austen": {"text"}, "python-docs": {"text"}, "cmudict": {"prompt", "completion"}}
SCRIPT = """
import hashlib, json, sys
from importlib.metadata import entry_points
content = {}
for entry in sorted(entry_points(group="sparsebp.datasets"), key=lambda e: e.name):
    if entry.name in sys.argv[1:]:
        content[entry.name] = hashlib.sha256(json.dumps(entry.load()()).encode()).hexdigest()
from sparsebp_cli.source import bundled
assert (bundled.austen_llama() / "config.json").is_file()
heavy = {"torch", "transformers", "datasets", "numpy", "mlflow"} & {name.partition(".")[0] for name in sys.modules}
print(json.dumps([content, sorted(heavy)]))
"""


def load(name):
    (entry,) = {entry for entry in entry_points(group="sparsebp.datasets") if entry.name == name}
    return entry.load()()


def digest(content):
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_each_is_found_by_name_and_holds_plain_rows_of_its_columns(name):
    splits = load(name)
    assert list(splits) == ["train", "test"]
    for rows in splits.values():
        assert rows
        for row in rows:
            assert set(row) == COLUMNS[name]
            assert all(isinstance(value, str) and value.strip() for value in row.values())


@pytest.mark.parametrize("name", NAMES)
def test_no_row_is_in_both_splits(name):
    splits = load(name)
    train, test = ({json.dumps(row) for row in splits[split]} for split in ("train", "test"))
    assert not train & test
    assert len(train) == len(splits["train"])
    assert len(test) == len(splits["test"])


def test_another_process_gets_the_same_rows_and_imports_nothing_heavy():
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *NAMES], capture_output=True, text=True, check=True, env=environment
    )
    content, heavy = json.loads(done.stdout)
    assert content == {name: digest(load(name)) for name in NAMES}
    assert heavy == []


def paragraphs(rows):
    return [" ".join(part.split()) for row in rows for part in row["text"].split("\n\n")]


def test_the_python_docs_hold_every_paragraph_of_this_python_once():
    splits = load("python-docs")
    train, test = paragraphs(splits["train"]), paragraphs(splits["test"])
    every = {" ".join(part.split()) for text in topics.values() for part in text.split("\n\n")} - {""}
    assert len(train) + len(test) == len(set(train) | set(test))  # what is held out is nowhere in training
    assert set(train) | set(test) == every
    characters = {split: sum(len(row["text"]) for row in rows) for split, rows in splits.items()}
    assert 0.03 < characters["test"] / sum(characters.values()) < 0.25


def test_the_dictionary_holds_30000_words_and_a_tenth_is_held_out():
    splits = load("cmudict")
    assert len(splits["train"]) + len(splits["test"]) == 30_000
    assert 0.09 < len(splits["test"]) / 30_000 < 0.115
    for row in splits["train"] + splits["test"]:
        assert re.fullmatch(r"[a-z]( [a-z'])*:", row["prompt"])
        assert re.fullmatch(r"( [A-Z]{1,2}[0-2]?)+", row["completion"])


def test_austen_is_cut_into_chapters_and_nothing_is_lost():
    from sparsebp_cli.source import bundled

    splits = bundled.load_austen()
    assert sum(row["text"].startswith("Chapter ") for row in splits["test"]) == 24
    for split, book in bundled.AUSTEN_BOOKS.items():
        whole = (bundled.AUSTEN_FOLDER / book).read_text(encoding="utf-8")
        assert " ".join(row["text"] for row in splits[split]).split() == whole.split()
        assert all(len(row["text"]) < 40_000 for row in splits[split])
