"""A saved model's files get back what training and transformers changed of those of its source, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from sparsebp_cli.recipe.schema import ModelSection
from sparsebp_tools.release.origin import (
    Origin,
    find_vocabularies,
    restore_config,
    restore_generation,
    restore_limits,
    restore_tokenizer,
)

SAVED = {"model_type": "llama", "dtype": "bfloat16", "use_cache": False, "vocab_size": 9}


def origin_of(config: dict[str, Any] | None, dropout: float | None = None) -> Origin:
    return Origin(config=config, used={} if dropout is None else {"dropout": dropout})


@pytest.mark.parametrize(("source", "kept"), [({"use_cache": True}, True), ({"use_cache": False}, False), ({}, None)])
def test_the_cache_is_that_of_the_source(source: dict[str, Any], kept: bool | None) -> None:
    assert restore_config(SAVED, origin_of(source), []).get("use_cache") is kept


def test_a_dtype_stands_under_both_names_and_is_that_of_the_weights() -> None:
    found = restore_config(SAVED, origin_of({"torch_dtype": "float16"}), [])
    assert (found["dtype"], found["torch_dtype"]) == ("bfloat16", "bfloat16")


def test_dropouts_of_the_recipe_give_way_to_those_of_the_source_in_parts_too() -> None:
    saved = SAVED | {"attention_dropout": 0.3, "resid_pdrop": 0.3, "text_config": {"hidden_dropout": 0.3, "width": 0.3}}
    source = {"attention_dropout": 0.1, "text_config": {"hidden_dropout": 0.2}}
    found = restore_config(saved, origin_of(source, 0.3), [])
    assert (found["attention_dropout"], found["text_config"]) == (0.1, {"hidden_dropout": 0.2, "width": 0.3})
    assert "resid_pdrop" not in found  # the class has its own
    assert restore_config(saved, origin_of(source), [])["attention_dropout"] == 0.3  # the recipe changed none


def test_keys_that_a_newer_library_renames_stay_and_what_names_code_does_not() -> None:
    source = {
        "rope_theta": 5e5,
        "auto_map": {"AutoModel": "x.y"},
        "quantization_config": {"bits": 4},
        "_name_or_path": "/x",
    }
    found = restore_config(
        SAVED | {"_attn_implementation": "sdpa"}, origin_of(source | {"architectures": ["Other"]}), []
    )
    assert found["rope_theta"] == 5e5
    assert (
        not {"auto_map", "quantization_config", "_name_or_path", "_attn_implementation", "architectures"} & found.keys()
    )
    new = SAVED | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert restore_config(new, Origin(), [])["rope_theta"] == 7.0


def test_a_generation_config_loses_a_cache_that_is_off(tmp_path: Path) -> None:
    assert restore_generation({"use_cache": False, "top_k": 3}, Origin()) == {"top_k": 3}
    (tmp_path / "generation_config.json").write_text('{"use_cache": false}')
    assert restore_generation({"use_cache": False}, Origin(model=tmp_path)) == {"use_cache": False}


@pytest.fixture
def tokenizer(tmp_path: Path) -> tuple[Origin, dict[str, Any]]:
    """A source's folder with a tokenizer of sentencepiece, and the content of its tokenizer.json."""
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    inner.enable_truncation(512)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizerFast"}')
    (tmp_path / "spiece.model").write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    return Origin.find(ModelSection(name=str(tmp_path))), json.loads((tmp_path / "tokenizer.json").read_text())


def test_a_tokenizer_has_the_class_limits_and_vocabulary_of_its_source(
    tokenizer: tuple[Origin, dict[str, Any]],
) -> None:
    origin, inner = tokenizer
    saved = {"tokenizer_class": "TokenizersBackend", "is_local": True, "backend": "tokenizers", "eos_token": "b"}
    left = inner | {"truncation": {"max_length": 8}}  # by the last call while training
    assert restore_tokenizer(saved, left, origin) == {"tokenizer_class": "LlamaTokenizerFast", "eos_token": "b"}
    assert restore_limits(left, origin) == inner
    assert [file.name for file in find_vocabularies(left, origin)] == ["spiece.model"]


def test_a_tokenizer_that_is_another_one_now_is_read_as_it_is(tokenizer: tuple[Origin, dict[str, Any]]) -> None:
    origin, inner = tokenizer
    other = inner | {"added_tokens": []} | {"model": inner["model"] | {"vocab": {"a": 0, "c": 1}}}
    saved = {"tokenizer_class": "TokenizersBackend"}
    assert restore_tokenizer(saved, other, origin) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert restore_tokenizer(saved, inner, Origin()) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert restore_tokenizer({"tokenizer_class": "T5Tokenizer"}, inner, origin) == {"tokenizer_class": "T5Tokenizer"}
    assert find_vocabularies(other, origin) == []


def test_a_source_that_is_not_here_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert Origin.find(ModelSection(name="somebody/model")) == Origin()
    assert Origin.find(ModelSection(name=str(tmp_path / "gone"))) == Origin()
    random = Origin.find(ModelSection(config={"model_type": "llama"}, tokenizer="somebody/tokenizer", dropout=0.5))
    assert (random.config, random.used) == ({"model_type": "llama"}, {"dropout": 0.5})
