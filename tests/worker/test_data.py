"""Datasets become examples; what cannot be is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection, ModelSection
from sparsebp_cli.source.split import find_splits, take_rows
from sparsebp_cli.worker.batch import BatchOrder, collate, num_targets
from sparsebp_cli.worker.data import IGNORED, EncodedExample, build_data
from sparsebp_cli.worker.held_out import draw_test
from sparsebp_cli.worker.model import build_model, build_tokenizer
from tests.worker.conftest import LLAMA, work

PAIRS = [
    {"prompt": f"spell {n}", "completion": f"word number {n}", "label": n % 3, "text": f"text {n}"} for n in range(40)
]


@pytest.fixture
def tokenizer(tiny_folder):
    return build_tokenizer(ModelSection(config=LLAMA, tokenizer=str(tiny_folder / "tokenizer")))


def write(folder: Path, suffix: str) -> Path:
    """The pairs, as a file of one of the formats."""
    import pandas

    file = folder / f"pairs{suffix}"
    frame = pandas.DataFrame(PAIRS)
    match suffix:
        case ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in PAIRS), encoding="utf-8")
        case ".csv":
            frame.to_csv(file, index=False)
        case ".tsv":
            frame.to_csv(file, index=False, sep="\t")
        case ".parquet":
            frame.to_parquet(file)
    return file


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_every_file_format_gives_the_same_examples(tmp_path, tokenizer, suffix) -> None:
    digests = set()
    for kind in (suffix, ".jsonl"):
        section = DatasetSection(name=str(write(tmp_path, kind)), format="completion", max_seq_length=32)
        digests.add(build_data(section, tokenizer).digest())
    assert len(digests) == 1


def test_a_prompt_is_never_trained_and_a_completion_always_is(tmp_path, tokenizer) -> None:
    section = DatasetSection(name=str(write(tmp_path, ".jsonl")), format="completion", max_seq_length=64)
    data = build_data(section, tokenizer)
    assert (len(data.train), len(data.held_out)) == (36, 4)
    for example in (*data.train, *data.held_out):
        row = next(
            row for row in PAIRS if tokenizer.decode(example.input_ids) == row["prompt"] + row["completion"] + "</s>"
        )
        trained = example.input_ids[example.labels != IGNORED]
        ignored = example.input_ids[example.labels == IGNORED]
        assert tokenizer.decode(trained) == row["completion"] + tokenizer.eos_token
        assert tokenizer.decode(ignored) == row["prompt"]


def test_a_truncated_completion_without_any_target_is_left_out(tmp_path, tokenizer) -> None:
    file = tmp_path / "long.jsonl"
    rows = [{"prompt": "x" * 200, "completion": "y"}, *PAIRS[:5]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = build_data(DatasetSection(name=str(file), format="completion", max_seq_length=32), tokenizer)
    assert len(data.train) + len(data.held_out) == 5


def test_packed_text_loses_no_token_but_the_last_block(tiny_folder, tokenizer) -> None:
    data = build_data(DatasetSection(name=str(tiny_folder / "text.txt"), max_seq_length=16), tokenizer)
    stream = np.concatenate([e.input_ids for e in (*data.train, *data.held_out)])
    text = (tiny_folder / "text.txt").read_text()
    assert (text + tokenizer.eos_token).startswith(tokenizer.decode(stream))
    assert len(stream) > len(tokenizer(text)["input_ids"]) - 17


def test_a_packed_block_knows_the_document_that_gave_most_of_its_tokens(tmp_path, tokenizer) -> None:
    file = tmp_path / "texts.jsonl"
    rows = [{"text": "a" * 40}, {"text": "b" * 6}, {"text": "c" * 60}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = build_data(DatasetSection(name=str(file), max_seq_length=8, columns={"text": "text"}), tokenizer)
    found = [*data.train, *data.held_out]
    ends = np.cumsum([len(tokenizer(row["text"], add_special_tokens=False)["input_ids"]) + 1 for row in rows])
    owners = [np.searchsorted(ends, np.arange(8 * n, 8 * n + 8), side="right") for n in range(len(found))]
    assert [example.document for example in found] == [int(np.bincount(owner).argmax()) for owner in owners]
    assert {example.document for example in found} >= {0, 2}


def test_an_example_of_its_own_row_knows_that_row(tmp_path, tokenizer) -> None:
    file = tmp_path / "long.jsonl"
    rows = [*PAIRS[:3], {"prompt": "x" * 200, "completion": "y"}, *PAIRS[3:6]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    section = DatasetSection(name=str(file), format="completion", max_seq_length=32, eval_split="train")
    data = build_data(section, tokenizer)
    assert [example.document for example in data.train] == [0, 1, 2, 4, 5, 6]


def test_classification_takes_numbers_and_names(tmp_path, tokenizer) -> None:
    named = [row | {"label": "abc"[row["label"]]} for row in PAIRS]
    file = tmp_path / "named.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in named), encoding="utf-8")
    by_name = build_data(DatasetSection(name=str(file), format="classification"), tokenizer)
    by_number = build_data(DatasetSection(name=str(write(tmp_path, ".jsonl")), format="classification"), tokenizer)
    assert by_name.label_names == ["a", "b", "c"]
    assert [int(e.labels) for e in by_name.train] == [int(e.labels) for e in by_number.train]


def test_a_classification_is_trained_and_its_accuracy_measured(tmp_path, tiny_recipe, prepared) -> None:
    from sparsebp_cli.run import History

    dataset = {"name": str(write(tmp_path, ".jsonl")), "format": "classification", "max_seq_length": 16}
    run = prepared(tiny_recipe(dataset=dataset, policy=[{"name": "topk", "keep": 0.5}]))
    assert work(run) == 0, (run.path / "worker.log").read_text()
    history = History.load(run.path)
    assert 0.0 <= history.last("eval/accuracy") <= 1.0
    assert 0.0 <= history.last("eval/macro_f1") <= 1.0


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "./nowhere.txt"}, "no file or folder"),
        ({"name": "package:json/nothing.txt"}, "has no 'nothing.txt'"),
        ({"name": "package:no_such_package/x"}, "no installed package"),
        ({"name": "package:json/../os.py"}, "has no '../os.py'"),
        ({"name": "@pairs", "format": "completion", "columns": {"prompt": "promt"}}, "did you mean prompt?"),
        ({"name": "@pairs", "split": "trian"}, "the dataset has no split"),
        ({"name": "@pairs", "eval_split": "test"}, "it has train"),
        ({"name": "@binary"}, "cannot read .bin"),
        ({"name": "@short", "max_seq_length": 64}, "no example of 64 tokens"),
    ],
)
def test_data_that_cannot_be_used_is_refused_in_one_line(tmp_path, tokenizer, section, says) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0")
    (tmp_path / "short.txt").write_text("short")
    names = {"@pairs": write(tmp_path, ".jsonl"), "@binary": tmp_path / "x.bin", "@short": tmp_path / "short.txt"}
    section = section | {"name": str(names.get(section["name"], section["name"]))}
    if "split" in section:  # the split of a single file is called as the recipe says
        section |= {"name": "austen"}
    with pytest.raises(DataError) as caught:
        build_data(DatasetSection(**section), tokenizer)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_order_of_batches_is_a_function_of_seed_and_number(tiny_folder, tokenizer) -> None:
    data = build_data(DatasetSection(name=str(tiny_folder / "text.txt"), max_seq_length=16), tokenizer)
    first, second = (BatchOrder(data.train, 4, 5, 0) for _ in range(2))
    numbers = [0, 7, 10_000, 7, 3]
    for number in numbers:
        assert torch.equal(first[number]["input_ids"], second[number]["input_ids"])
    epoch = len(data.train)
    drawn = [BatchOrder(data.train, 1, 5, 0)[n]["input_ids"] for n in range(epoch)]
    assert sorted(x.tolist() for x in drawn) == sorted([e.input_ids.tolist()] for e in data.train)


def test_padding_is_masked_and_never_a_target(tmp_path, tokenizer) -> None:
    section = DatasetSection(name=str(write(tmp_path, ".jsonl")), format="completion", max_seq_length=64)
    examples = sorted(build_data(section, tokenizer).train, key=lambda example: len(example.input_ids))
    batch = collate([examples[0], examples[-1]], tokenizer.pad_token_id)
    assert int(batch["attention_mask"].sum()) == len(examples[0].input_ids) + len(examples[-1].input_ids)
    assert batch["input_ids"].shape[1] % 8 == 0
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()
    assert num_targets(batch) == int((batch["labels"] != IGNORED).sum())


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": '{"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}}'}, "auto_map"),
        ({"config.json": '{"model_type": "llama", "_attn_implementation": "a/b"}'}, "_attn_implementation"),
        ({"config.json": "{"}, "no readable config.json"),
        ({}, "no readable config.json"),
        ({"config.json": json.dumps(LLAMA | {"vocab_size": 300}), "pytorch_model.bin": "pickle"}, "safetensors"),
    ],
)
def test_a_hostile_or_broken_model_folder_is_refused_in_one_line(tmp_path, tokenizer, files, says) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    with pytest.raises(DataError) as caught:
        build_model(ModelSection(name=str(folder)), tokenizer, None)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_setting_of_a_random_model_is_named(tokenizer, tiny_folder) -> None:
    path = str(tiny_folder / "tokenizer")
    with pytest.raises(DataError, match=r"config\.hiden_size.*did you mean hidden_size"):
        build_model(ModelSection(config=LLAMA | {"hiden_size": 3}, tokenizer=path), tokenizer, None)
    with pytest.raises(DataError, match=r"unknown 'lama'.*did you mean"):
        build_model(ModelSection(config={"model_type": "lama"}, tokenizer=path), tokenizer, None)


# The test split


def split_file(folder: Path, rows: list[dict[str, object]]) -> str:
    """A folder whose dataset has the splits train and test."""
    place = folder / "data"
    place.mkdir()
    for name in ("train", "test"):
        text = "".join(json.dumps(row | {"text": f"{name} {row['text']}"}) + "\n" for row in rows)
        (place / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return str(place)


def ids(examples: list[EncodedExample]) -> list[bytes]:
    return [example.input_ids.tobytes() for example in examples]


@pytest.mark.parametrize("form", ["text", "completion", "classification"])
def test_a_test_fraction_takes_from_what_is_held_out_and_never_from_training(tmp_path, tokenizer, form) -> None:
    place = split_file(tmp_path, PAIRS)
    for given in ({"eval_split": "test"}, {"eval_fraction": 0.25}):
        options = {"name": place, "format": form, "max_seq_length": 8 if form == "text" else 32} | given
        plain = build_data(DatasetSection(**options), tokenizer)
        cut = build_data(DatasetSection(**options, test_fraction=0.5), tokenizer)
        assert ids(cut.train) == ids(plain.train)
        assert plain.test == []
        assert plain.digest() != cut.digest()
        assert 0.3 < len(cut.test) / (len(cut.test) + len(cut.held_out)) < 0.7
        if form != "text" or "eval_split" not in given:  # else packed anew, each part by itself
            assert sorted(ids(cut.held_out) + ids(cut.test)) == sorted(ids(plain.held_out))


def test_documents_of_one_text_are_on_one_side_in_any_order_of_the_data() -> None:
    section = DatasetSection(name="x", test_fraction=0.5)
    texts = [f"question {number // 3}" for number in range(30)]
    is_test = draw_test(texts, [1] * 30, section)
    assert sum(is_test) == 15
    tested = {text for text, drawn in zip(texts, is_test, strict=True) if drawn}
    assert len(tested) == 5
    assert draw_test(texts[::-1], [1] * 30, section) == is_test[::-1]


def test_a_long_document_leaves_both_sides_something_a_single_one_is_refused() -> None:
    section = DatasetSection(name="x", test_fraction=0.01)
    for texts in (["a", "b"], ["b", "a"]):
        assert sum(draw_test(texts, [1, 1000], section)) == 1
    with pytest.raises(DataError, match="test_fraction needs 2 or more held-out documents, got 1"):
        draw_test(["a", "a"], [1, 1], section)


@pytest.mark.parametrize(
    ("name", "form", "column"),
    [("austen", "text", "text"), ("python-docs", "text", "text"), ("cmudict", "completion", "prompt")],
)
def test_the_shipped_held_out_texts_are_halved_by_document(name, form, column) -> None:
    section = DatasetSection(name=name, format=form, eval_split="test", test_fraction=0.5)
    texts = [str(row[column]) for row in take_rows(find_splits(section), "test", None)]
    is_test = draw_test(texts, [len(text) for text in texts], section)
    sides = [[text for text, drawn in zip(texts, is_test, strict=True) if drawn is side] for side in (False, True)]
    assert not set(sides[0]) & set(sides[1])
    assert 0.4 < sum(map(len, sides[1])) / sum(map(len, texts)) < 0.6


def test_a_test_split_is_another_one_and_given_in_one_way() -> None:
    with pytest.raises(ValueError, match=r"give only one of test_split and test_fraction, got both \(test and 0.5\)"):
        DatasetSection(name="x", test_split="test", test_fraction=0.5)
    for key in ("split", "eval_split"):
        with pytest.raises(ValueError, match=f"test_split and {key} must be different splits, got a for both"):
            DatasetSection(name="x", test_split="a", **{key: "a"})


def test_fewer_training_examples_leave_what_is_held_out_as_it_is(tmp_path, tokenizer) -> None:
    options = {"name": str(write(tmp_path, ".jsonl")), "format": "completion", "max_seq_length": 64}
    whole, cut = (build_data(DatasetSection(**options, **more), tokenizer) for more in ({}, {"max_train_examples": 10}))
    assert [len(data.train) for data in (whole, cut)] == [36, 10]
    assert [example.input_ids.tolist() for example in cut.train] == [e.input_ids.tolist() for e in whole.train[:10]]
    assert [e.input_ids.tolist() for e in cut.held_out] == [e.input_ids.tolist() for e in whole.held_out]
