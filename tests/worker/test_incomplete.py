"""A model whose files lack tensors is refused by their names, but for a head that a classification starts anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import ModelSection
from sparsebp_cli.worker.model import build_model, build_tokenizer
from tests.worker.conftest import LLAMA

Tensors = dict[str, torch.Tensor]


def write_model(tiny_folder: Path, folder: Path, change: Callable[[Tensors], object], **config: object) -> ModelSection:
    values = {name: value for name, value in LLAMA.items() if name != "model_type"} | config
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **values)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return ModelSection(name=str(folder), tokenizer=str(tiny_folder / "tokenizer"))


@pytest.fixture
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerFast:
    return build_tokenizer(ModelSection(name="none", tokenizer=str(tiny_folder / "tokenizer")))  # type: ignore[return-value]


def without(*parts: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in [*tensors] if any(part in name for part in parts)]


@pytest.mark.parametrize("num_labels", [None, 3])
def test_a_model_that_lacks_a_layer_is_refused_with_the_names(
    tiny_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, num_labels: int | None
) -> None:
    section = write_model(tiny_folder, tmp_path / "model", without("layers.1."))
    with pytest.raises(
        DataError, match=r"the safetensors files lack 9 tensors that a Llama\w+ needs: model\.layers\.1\."
    ) as error:
        build_model(section, tokenizer, num_labels)
    assert str(error.value).endswith(" and 4 more")
    assert "score" not in str(error.value)


def test_a_language_model_without_its_head_is_refused(
    tiny_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    section = write_model(tiny_folder, tmp_path / "model", without("lm_head"), tie_word_embeddings=False)
    with pytest.raises(DataError, match=r"lack 1 tensors that a LlamaForCausalLM needs: lm_head\.weight$"):
        build_model(section, tokenizer, None)


def test_a_tied_head_is_in_no_file_and_is_no_loss(
    tiny_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    section = write_model(tiny_folder, tmp_path / "model", lambda _: None, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors")
    build_model(section, tokenizer, None)


def test_a_classification_starts_its_head_anew_and_says_so(
    tiny_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    section, told = write_model(tiny_folder, tmp_path / "model", lambda _: None), []
    build_model(section, tokenizer, 3, told.append)
    assert told == [f"initialised at random because {section.name} has no classification head: score.weight"]


def test_a_tensor_of_another_shape_is_refused_by_name(
    tiny_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    section = write_model(
        tiny_folder, tmp_path / "model", lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})
    )
    with pytest.raises(DataError, match=r"1 tensors have other shapes than config\.json requires: model\.norm\.weight"):
        build_model(section, tokenizer, None)


def test_a_damaged_file_of_weights_is_one_line(
    tiny_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    section = write_model(tiny_folder, tmp_path / "model", lambda _: None)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"junkjunk")
    with pytest.raises(DataError, match="its header must have at most 8 bytes"):
        build_model(section, tokenizer, None)
