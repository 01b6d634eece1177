"""Hostile folders of models: each is refused in one line or is harmless, and nothing that lies in it runs."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import ModelSection
from sparsebp_cli.source import read_config
from sparsebp_cli.source.weight import check_weights
from sparsebp_cli.worker.model import build_model, build_tokenizer
from tests.worker.conftest import LLAMA

pytestmark = pytest.mark.promise("R12")

MODULES = (
    "x",
    "sitecustomize",
    "json",
    "tokenizer",
    "tokenization_evil",
    "modeling_evil",
    "configuration_llama",
    "torch",
)
DEEP = '{"a":' * 100_000
SAFETENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
Change = Callable[[Path], object]


class Trap:
    """Makes a canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.fixture(scope="module")
def good(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer that can be loaded."""
    folder = tmp_path_factory.mktemp("good") / "model"
    shutil.copytree(tiny_folder / "tokenizer", folder)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA | {"vocab_size": 300})).save_pretrained(folder)
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it with traps in it and in the working folder; ``pickle.bin`` beside it holds another trap."""
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    shutil.copy(good / SAFETENSORS, tmp_path / "outside.safetensors")
    for module in MODULES:
        for beside in (folder, tmp_path):
            (beside / f"{module}.py").write_text(f"import os; os.mkdir({str(tmp_path / 'canary')!r})\n")
    torch.save({"lm_head.weight": Trap(tmp_path / "canary")}, tmp_path / "pickle.bin")
    monkeypatch.chdir(tmp_path)
    return folder


def settings(name: str, **values: Any) -> Change:
    """Change keys of a JSON file."""

    def change(folder: Path) -> None:
        file = folder / name
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | values))

    return change


def config(**values: Any) -> Change:
    return settings("config.json", **values)


def content(name: str, data: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def instead(name: str, make: Callable[[Path], object]) -> Change:
    """Put something else in a file's place."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def grow(file: Path) -> None:
    """A sparse file of 1 GiB."""
    with file.open("wb") as stream:
        stream.truncate(2**30)


def pickled(name: str) -> Change:
    """Weights as a pickle only."""

    def change(folder: Path) -> None:
        (folder / SAFETENSORS).unlink()
        shutil.copy(folder.parent / "pickle.bin", folder / name)

    return change


def indexed(name: object, *, link: bool = False) -> Change:
    """Weights by an index that names a file."""

    def change(folder: Path) -> None:
        tensors = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA | {"vocab_size": 300})).state_dict()
        (folder / SAFETENSORS).unlink()
        shutil.copy(folder.parent / "pickle.bin", folder / "pickle.bin")
        target = str(folder.parent / "outside.safetensors") if name == "absolute" else name
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, target)}))
        if link:
            (folder / str(name)).symlink_to("/etc/passwd")

    return change


def header(entries: Any, size: int = 1200) -> Change:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return content(SAFETENSORS, struct.pack("<Q", len(text)) + text + bytes(size))


def tensor(dtype: str = "F32", shape: Any = (300,), offsets: Any = (0, 1200)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


LONG_HEADER = "its header must have at most"
CODE = {"AutoConfig": "x.X", "AutoModelForCausalLM": "modeling_evil.M", "AutoTokenizer": ["tokenization_evil.T", None]}
REFUSED: dict[str, tuple[Change, str]] = {
    **{f"pickle {name}": (pickled(name), "safetensors") for name in
       ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl", "tf_model.h5", "adapter_model.bin")},
    "auto_map": (config(auto_map=CODE), "'auto_map' is not allowed"),
    "auto_map of a part": (config(text_config={"auto_map": CODE}), "'auto_map' is not allowed"),
    "_attn_implementation": (config(_attn_implementation="a/b"), "'_attn_implementation' is not allowed"),
    "_commit_hash": (config(_commit_hash="x"), "'_commit_hash' is not allowed"),
    "_experts_implementation": (config(_experts_implementation="a/b"), "is not allowed"),
    "auto_map of the tokenizer": (settings("tokenizer_config.json", auto_map=CODE), "'auto_map' is not allowed"),
    "config is a link": (instead("config.json", lambda file: file.symlink_to("/etc/passwd")), "no readable config"),
    "config is a pipe": (instead("config.json", os.mkfifo), "is not a regular file"),
    "config is a folder": (instead("config.json", Path.mkdir), "is not a regular file"),
    "config of 1 GiB": (instead("config.json", grow), "must have at most 268435456 bytes"),
    "deep config": (content("config.json", DEEP), "no readable config"),
    "NaN": (config(hidden_size=float("nan")), "hidden_size"),
    "Infinity": (config(initializer_range=float("inf")), "initializer_range"),
    "negative size": (config(hidden_size=-1), "hidden_size must be at least 0"),
    "no heads": (config(num_attention_heads=0), "ZeroDivisionError"),
    "number as text": (config(hidden_size="32"), "hidden_size"),
    "unknown activation": (config(hidden_act="os.system"), "KeyError: 'os.system'"),
    "unknown dtype of the model": (config(dtype="os.system"), "no attribute 'os.system'"),
    "unknown rope": (config(rope_scaling={"rope_type": "evil"}), "evil"),
    "unknown model": (config(model_type="evil"), "evil"),
    "model type is a list": (config(model_type=["llama"]), "unhashable"),
    "wide": (config(hidden_size=2**20), "hidden_size must be at most 300 to fit the weights in its folder"),
    "wide part": (config(text_config={"hidden_size": 2**20}), "hidden_size must be at most 300"),
    "wider than any": (config(hidden_size=2**40), "hidden_size must be at most 4194304 for any model"),
    "deep model": (config(num_hidden_layers=5000), "num_hidden_layers must be at most 256 to fit the weights"),
    "many words": (config(vocab_size=10**6), "vocab_size must be at most 300"),
    "many labels": (config(num_labels=10**6), "num_labels must be at most 300"),
    "huge header": (content(SAFETENSORS, struct.pack("<Q", 2**62) + b"{}"), LONG_HEADER),
    "negative offset": (header({"a": tensor(offsets=(-4, 0))}), "expected usize"),
    "overlap": (header({"a": tensor(), "b": tensor()}), "invalid offset"),
    "wrong dtype": (header({"a": tensor("F64")}), "invalid shape, data type, or offset"),
    "unknown dtype": (header({"a": tensor("EVIL")}), "EVIL"),
    "overflowing shape": (header({"a": tensor(shape=(2**40, 2**40))}), "overflow"),
    "header is a list": (header(b"[" * 10_000), "invalid JSON in header"),
    "cut": (lambda folder: os.truncate(folder / SAFETENSORS, 5000), "incomplete"),
    "empty": (content(SAFETENSORS, b""), "header too small"),
    "pickle named safetensors": (
        instead(SAFETENSORS, lambda file: shutil.copy(file.parents[1] / "pickle.bin", file)), LONG_HEADER),
    "weights are a link": (instead(SAFETENSORS, lambda file: file.symlink_to("/etc/passwd")), LONG_HEADER),
    "weights are a folder": (instead(SAFETENSORS, Path.mkdir), "is not a regular file"),
    "weights are a pipe": (instead(SAFETENSORS, os.mkfifo), "is not a regular file"),
    "weights never end": (instead(SAFETENSORS, lambda file: file.symlink_to("/dev/zero")), "is not a regular file"),
    "a tokenizer's pipe": (instead("tokenizer.json", os.mkfifo), "is not a regular file"),
    "index to the parent": (indexed("../outside.safetensors"), "only safetensors files in the same folder"),
    "absolute index": (indexed("absolute"), "only safetensors files in the same folder"),
    "index to a link": (indexed("y.safetensors", link=True), "header"),
    "index to a pickle": (indexed("pickle.bin"), "only safetensors files in the same folder, got 'pickle.bin'"),
    "index to a pickle outside": (indexed("../pickle.bin"), "only safetensors files in the same folder"),
    "index to an address": (indexed("https://h.invalid/x.safetensors"), "only safetensors files in the same folder"),
    "index to a number": (indexed(5), "only safetensors files in the same folder"),
    "index is a list": (content(INDEX, "[]"), "must be a JSON object"),
    "deep index": (content(INDEX, DEEP), "must be a JSON object"),
    "index without a map": (content(INDEX, "{}"), "weight_map must map tensor names"),
    "adapter of another model": (
        settings("adapter_config.json", peft_type="LORA", base_model_name_or_path="/etc", auto_mapping={
            "base_model_class": "M", "parent_library": "modeling_evil"}), "is an adapter"),
    "deep generation config": (content("generation_config.json", DEEP), "RecursionError"),
    "generation config of 1 GiB": (instead("generation_config.json", grow), "at most 268435456 bytes"),
    "odd generation config": (settings("generation_config.json", watermarking_config={"a": 1}), "Watermarking"),
    "deep tokenizer": (content("tokenizer.json", DEEP), "RecursionError"),
    "tokenizer is a list": (content("tokenizer.json", "[]"), "cannot be interpreted"),
    "tokenizer is a link": (instead("tokenizer.json", lambda file: file.symlink_to("/etc/passwd")), "tokenizer"),
    "settings of the tokenizer are a list": (content("tokenizer_config.json", "[]"), "must be a JSON object"),
    "odd tokens": (settings("tokenizer_config.json", added_tokens_decoder={"x": 1}), "tokenizer"),
}  # fmt: skip
HARMLESS: dict[str, Change] = {
    "code beside": lambda folder: None,
    "trust_remote_code": config(trust_remote_code=True, custom_pipelines={"x": {"impl": "modeling_evil.M"}}),
    "_name_or_path": config(_name_or_path="/etc"),
    "what converters, OPT and Gemma 3 write": config(
        _model_name_or_path="/etc",
        _remove_final_layer_norm=False,
        _sliding_window_pattern=6,
        _experts_implementation=None,
    ),
    "an attention that is built in": config(_attn_implementation="eager", _attn_implementation_autoset=True),
    "attn_implementation": config(attn_implementation="evil/kernel", use_kernels=True),
    "architecture": config(architectures=["os.system"], tokenizer_class="os.system"),
    "unknown quantization": config(quantization_config={"quant_method": "evil"}),
    "trust_remote_code of the tokenizer": settings("tokenizer_config.json", trust_remote_code=True, _evil=1),
    "class of the tokenizer": settings("tokenizer_config.json", tokenizer_class="tokenization_evil.T"),
    "other files of the tokenizer": settings("tokenizer_config.json", tokenizer_file="/etc/passwd", vocab_file="../x"),
    "chat template": settings("tokenizer_config.json", chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "endless chat template": content(
        "chat_template.jinja", "{% for x in range(10**12) %}{{ x.__class__ }}{% endfor %}"
    ),
    "generation code": settings("generation_config.json", custom_generate="evil", auto_map=CODE, _evil=1, weird=[1]),
    "pickle beside safetensors": lambda folder: shutil.copy(folder.parent / "pickle.bin", folder / "pytorch_model.bin"),
}


def load(folder: Path) -> None:
    section = ModelSection(name=str(folder))
    build_model(section, build_tokenizer(section), None)


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_model_is_refused_in_one_line_and_runs_nothing(name: str, place: Path) -> None:
    change, says = REFUSED[name]
    change(place)
    with pytest.raises(DataError) as caught:
        load(place)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (place.parent / "canary").exists()


@pytest.mark.parametrize("name", HARMLESS)
def test_settings_that_have_no_effect_run_nothing(name: str, place: Path) -> None:
    HARMLESS[name](place)
    load(place)
    assert not (place.parent / "canary").exists()


def test_a_trap_in_a_pickle_works_where_it_is_loaded(place: Path) -> None:
    torch.load(place.parent / "pickle.bin", weights_only=False)
    assert (place.parent / "canary").exists()


def test_the_model_without_traps_is_accepted_by_the_first_look(good: Path) -> None:
    check_weights(good, read_config(good))
