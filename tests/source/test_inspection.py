"""What the inspection of model and data finds, and what it reports as unknown."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from sparsebp_cli.cli.validate import load_checked
from sparsebp_cli.errors import DataError, RecipeError
from sparsebp_cli.source.weight import check_weights, refuse_absurd

RECIPE = """\
version: 1
name: r
model: {model}
dataset: {data}
target: {target}
"""
CONFIG = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 4}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<s>"}, {"content": "a"}]}
CHOICE = "---\nconfigs:\n- {config_name: x, data_files: a.*}\n---\n"
Check = Callable[..., list[str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check a recipe that lies in a folder of its own; return what is not known."""
    (tmp_path / "work").mkdir()
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def check(data: str = "{name: austen}", model: str = "{name: austen-llama}", target: str = "local") -> list[str]:
        file = tmp_path / "recipes" / "r.yaml"
        file.write_text(RECIPE.format(model=model, data=data, target=target))
        return load_checked(file, [])[2]

    return check


@pytest.fixture
def refuse(check: Check, tmp_path: Path) -> Callable[..., str]:
    """Check a recipe that is wrong; return the line, without the folder."""

    def refuse(*words: str, **more: str) -> str:
        with pytest.raises(RecipeError) as caught:
            check(*words, **more)
        assert "\n" not in str(caught.value)
        return str(caught.value).replace(str(tmp_path), "")

    return refuse


def write(folder: Path, name: str, content: str | bytes) -> None:
    (folder / "recipes" / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def write_model(folder: Path, name: str = "model", **changes: Any) -> Path:
    place = folder / "recipes" / name
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG | changes))
    (place / "model.safetensors").write_bytes(b"")
    (place / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return place


def test_a_misspelt_file_is_named_with_the_places_and_the_nearest(refuse: Any, tmp_path: Path) -> None:
    write(tmp_path, "pairs.jsonl", '{"text": "a"}\n')
    assert refuse("{name: pears.jsonl}") == (
        "/recipes/r.yaml:4:17: dataset.name: no file or folder pears.jsonl; searched in: /recipes, /work; "
        "did you mean pairs.jsonl?"
    )
    assert "did you mean pairs.jsonl" in refuse("{name: ./pears.jsonl}")
    assert "no file or folder ../../none/x.txt" in refuse("{name: ../../none/x.txt}")


def test_names_that_a_hub_may_have_are_not_known_from_here(check: Check) -> None:
    model, data = check("{name: org/data}", "{name: austen-lama}")
    assert model.startswith("model.name: austen-lama is not on this machine; the hub may have it; searched in: ")
    assert model.endswith("/hub; did you mean austen-llama?")
    assert data.startswith("dataset.name: org/data is not on this machine")


def test_a_model_in_the_cache_of_the_hub_is_known(check: Check, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--small" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert check(model="{name: org/small}") == []


@pytest.mark.parametrize(
    ("name", "content", "options", "text"),
    [
        ("a.jsonl", "", "", "dataset.name: /recipes/a.jsonl: is empty"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "", "a.jsonl, line 2: not JSON: Expecting value"),
        ("a.jsonl", "[1]\n[2]\n", "", "a.jsonl, line 1: must be a JSON object, got a list"),
        ("a.jsonl", '{"txet": "a"}\n', "", "dataset.columns: the dataset has no column 'text'; it has txet; did"),
        ("a.jsonl", '{"text": ["a"]}\n', "", "a.jsonl, line 1: column 'text' must contain text, got a list"),
        ("a.json", '[{"test": "a"}]', "", "the dataset has no column 'text'; it has test; did you mean test"),
        ("a.json", '[\n {"test":\n "a"}\n]', "", "the dataset has no column 'text'; it has test; did you mean test"),
        ("a.csv", "prompt,completion\n1,2\n", "", "the dataset has no column 'text'; it has prompt, completion"),
        ("a.csv", "prompt, text\n1,2\n", "", "no column 'text'; it has prompt, ' text'; did you mean ' text'?"),
        (
            "a.tsv",
            "prompt\tanswer\n1\t2\n",
            ", format: completion",
            "dataset.columns: the dataset has no column 'completion'",
        ),
        ("a.csv", "text\n", "", "a.csv: has a header and no rows"),
        ("a.txt", b"abc\xff", "", "a.txt, line 1: not UTF-8 text: got byte 0xff"),
        ("a.txt", "abc", ", format: completion", "dataset.columns: the dataset has no column 'prompt'; it has"),
        ("a.txt", "abc", ", eval_split: test", "dataset.eval_split: the dataset has no split 'test'; it has train"),
        ("a.jsonl", '{"text": "a"}', ", format: classification", "dataset.columns: the dataset has no column 'la"),
        (
            "a.jsonl",
            '{"text": "a", "label": 0.5}',
            ", format: classification",
            "must contain a text, a whole number or a bool",
        ),
        ("a.jsonl", '{"text": "a"}\n\n{"text": null}\n', "", "a.jsonl, line 3: column 'text' must contain text"),
        ("a.jsonl", '{"text": "a"}\n{"more": 1}\n', "", "a.jsonl, line 2: column 'text' must contain text"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": 3}\n',
            "",
            "line 2: the value in column 'text' is a number, but text in earlier rows",
        ),
        ("a.bin", "abc", "", "cannot read .bin; allowed: .txt"),
        ("a.parquet", "PAR1abc", "", "a.parquet: not a Parquet file: "),
    ],
)
def test_rows_that_a_run_could_not_read_are_refused(
    refuse: Any, tmp_path: Path, name: str, content: str | bytes, options: str, text: str
) -> None:
    write(tmp_path, name, content)
    line = refuse(f"{{name: {name}{options}}}")
    assert line.startswith("/recipes/r.yaml:4:")
    assert text in line


def test_a_date_of_a_parquet_file_is_called_a_date(refuse: Any, tmp_path: Path) -> None:
    table = pyarrow.table({"text": [datetime.date(2020, 1, 1)]})
    pyarrow.parquet.write_table(table, tmp_path / "recipes" / "a.parquet")
    assert refuse("{name: a.parquet}").endswith("a.parquet, row 1: column 'text' must contain text, got a date")


def test_a_label_that_training_lacks_is_refused(refuse: Any, check: Check, tmp_path: Path) -> None:
    (tmp_path / "recipes" / "d").mkdir()
    write(tmp_path, "d/train.csv", "text,label\none,a\ntwo,b\n")
    write(tmp_path, "d/validation.csv", "text,label\nthree,c\n")
    section = "{name: ./d, format: classification, eval_split: validation"
    line = refuse(section + "}")
    assert line.startswith("/recipes/r.yaml:4:")
    assert line.endswith("validation.csv, line 2: label 'c' is not among the labels of the training split: a, b")
    write(tmp_path, "d/train.csv", "text,label\none,a\ntwo,b\nfour,c\n")
    assert check(section + "}") == []
    assert "label 'c'" in refuse(section + ", max_examples: 2}")  # the run does not read the third row either


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": 4.5}\n\n{"text": 3, "more": 1}\n'),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n'),
        ("a.json", '[{"text": "a"},\n {"text": "b"}]'),
        ("a.csv", 'text,more\n"a\nb",1\n'),
        ("a.md", "\ufeffabc"),
        ("a.txt", "é" * 600_000),
        ("a.jsonl", '{"text": "%s"}\n' % ("a" * 2_000_000)),
    ],
)
def test_rows_that_a_run_can_read_are_accepted(check: Check, tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path, name, content)
    assert not [line for line in check(f"{{name: {name}}}") if "too large" not in line]


def test_what_is_no_regular_file_is_not_opened(refuse: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipes" / "a.jsonl")
    assert "a.jsonl: is not a regular file" in refuse("{name: a.jsonl}")


@pytest.mark.promise("R32")
@pytest.mark.parametrize(
    "replace",
    [os.mkfifo, lambda file: file.symlink_to("/dev/zero"), lambda file: file.write_bytes(b"\xff" * 8 + b"{}")],
    ids=["pipe", "endless", "header of 2**64 bytes"],
)
def test_weights_that_cannot_be_opened_are_refused_unopened(tmp_path: Path, replace: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    replace(folder / "model.safetensors")
    with pytest.raises(DataError, match=r"model\.safetensors: (is not a regular file|its header must have at most)"):
        check_weights(folder, {"model_type": "llama"})


def test_weights_that_this_user_may_not_read_are_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(os, "access", lambda file, mode: file.suffix != ".safetensors")  # root may read all files
    with pytest.raises(DataError, match=r"model\.safetensors: cannot be read: permission denied"):
        check_weights(tmp_path, {"model_type": "llama"})


# By every kind of name that a size has: those of llama, of single architectures, inner ones, lists.
ABSURD: dict[str, object] = {
    "num_hidden_layers": 10**9,
    "hidden_size": 10**11,
    "vocab_size": 1e12,
    "num_local_experts": 10**9,
    "max_position_embeddings": 10**14,
    "type_vocab_size": 10**12,
    "embedding_size": 10**12,
    "state_size": 10**12,
    "kv_lora_rank": 10**12,
    "hidden_sizes": [32, 10**12],
    "depths": [2, 10**9],
    "n_ctx": float("inf"),
}


@pytest.mark.promise("R32")
@pytest.mark.parametrize("key", ABSURD)
@pytest.mark.parametrize(
    "wrap", [lambda given: given, lambda given: {"text_config": given}, lambda given: {"a": [given]}]
)
def test_a_random_model_that_no_machine_holds_is_refused(key: str, wrap: Any) -> None:
    with pytest.raises(DataError, match=f"^{key} must be at most [0-9]+ for any model, got"):
        refuse_absurd({"model_type": "llama", **wrap({key: ABSURD[key]})}, "")


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(DataError, match=r"^hidden_size must be at least 0, got -5"):
        refuse_absurd({"model_type": "llama", "hidden_size": -5}, "")


@pytest.mark.slow
@pytest.mark.model
def test_the_config_of_no_architecture_is_refused() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = 0
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]().to_dict()
        except Exception:
            continue  # it needs arguments, or a library that is not here
        made += 1
        refuse_absurd(config, name)
    assert made > 300


def test_installed_datasets_are_looked_into(refuse: Any) -> None:
    assert "has no column 'prompt'; it has text" in refuse("{name: austen, format: completion}")
    assert "dataset.eval_split: the dataset has no split 'tset'; it has" in refuse("{name: austen, eval_split: tset}")


@pytest.mark.parametrize(
    ("config", "removed", "text"),
    [
        ({"auto_map": {}}, "", "config.json: 'auto_map' is not allowed"),
        (
            {"vocab_size": 2},
            "",
            "the tokenizer has 3 tokens, but the model's embedding has only 2 rows: give the model's tokenizer",
        ),
        ({}, "config.json", "model: no readable config.json"),
        ({"num_hidden_layers": 10**9}, "", "num_hidden_layers must be at most 8192 for any model, got 1000000000"),
        ({"text_config": {"hidden_size": 1e11}}, "", "hidden_size must be at most 4194304 for any model, got 1000000"),
        ({}, "model.safetensors", "model: no weights in safetensors; found config.json, tokenizer.json"),
        ({}, "tokenizer.json", "model: no tokenizer files; found config.json, model.safetensors"),
        ({"max_position_embeddings": 32}, "", "dataset.max_seq_length: must be at most 32 for this model, got 64"),
        ({"max_position_embeddings": None, "n_positions": 16}, "", "must be at most 16 for this model, got 64"),
        ({"text_config": {"max_position_embeddings": 8}}, "", "must be at most 8 for this model, got 64"),
    ],
)
def test_models_that_a_run_could_not_load_are_refused(
    refuse: Any, tmp_path: Path, config: dict[str, Any], removed: str, text: str
) -> None:
    place = write_model(tmp_path, **config)
    if removed:
        (place / removed).unlink()
    assert text in refuse("{name: austen, max_seq_length: 64}", "{name: model}")


def test_a_folder_of_adapters_alone_is_told_from_one_without_a_model(refuse: Any, tmp_path: Path) -> None:
    place = write_model(tmp_path)
    (place / "config.json").rename(place / "adapter_config.json")
    text = "is an adapter: give its base model here, and this folder as model.adapter"
    assert text in refuse("{name: austen}", "{name: model}")


def test_a_good_model_and_a_reference_are_accepted(check: Check, tmp_path: Path) -> None:
    write_model(tmp_path)
    assert check("{name: austen, max_seq_length: 64}", "{name: ../recipes/model}") == []


def test_sequences_longer_than_a_config_are_refused(refuse: Any) -> None:
    model = "{config: {model_type: llama, max_position_embeddings: 32}, tokenizer: austen-llama}"
    assert "dataset.max_seq_length: must be at most 32" in refuse("{name: austen, max_seq_length: 64}", model)


def test_files_that_are_not_here_may_be_where_a_run_works(check: Check) -> None:
    (line,) = check("{name: /data/text.jsonl}", target="{kind: slurm}")
    assert line.startswith("dataset.name: no file or folder /data/text.jsonl; searched in: /data")
    assert line.endswith("; the machine that trains may have it")


def test_a_look_imports_neither_torch_nor_transformers(check: Check, tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", '{"text": "a"}\n')
    check("{name: a.jsonl}")
    code = (
        "import sys; from pathlib import Path; from sparsebp_cli.cli.validate import load_checked\n"
        f"load_checked(Path({str(tmp_path / 'recipes' / 'r.yaml')!r}), ['policy=topk', 'policy.0.keep=0.5'])\n"
        "print({'torch', 'transformers', 'datasets', 'mlflow'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (("a.jsonl", "b.csv"), "b.csv"),
        (("a.jsonl", "b.csv", "c.csv"), "a.jsonl"),
        (("train.jsonl", "extra.jsonl"), "extra.jsonl"),
        (("train/a.jsonl", "b.jsonl"), "b.jsonl"),
        (("a.jsonl", "b.json", "c.jsonl.gz", "dataset_infos.json", "__cache__/d.jsonl"), None),
        (("train-1.jsonl", "train-2.jsonl", "test.jsonl"), None),
        (("a.jsonl", "b.csv", "README.md"), None),
    ],
)
def test_a_file_of_a_folder_that_no_split_would_read_is_refused(
    check: Check, refuse: Any, tmp_path: Path, names: tuple[str, ...], left: str | None
) -> None:
    for number, name in enumerate(names):
        file = tmp_path / "rows" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = json.dumps({"text": f"row {number}"}) + "\n"
        other = {".csv": f"text\nrow {number}\n", ".md": CHOICE}.get(file.suffix, rows)
        content = ("{}" if name == "dataset_infos.json" else other).encode()
        file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    data = f"{{name: {tmp_path / 'rows'}}}"
    if left is None:
        check(data)
    else:
        assert f"/rows/{left}: would not be read" in refuse(data)
