"""The dropout of a recipe is that of every part of its model; without one the config decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from sparsebp_cli.recipe.schema import ModelSection
from sparsebp_cli.worker.model import build_model, build_tokenizer

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def dropouts(model: nn.Module) -> set[float]:
    found = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    return found | {module.dropout_prob for module in model.modules() if hasattr(module, "dropout_prob")}


@pytest.mark.parametrize("dropout", [None, 0.0, 0.3])
def test_a_pretrained_model_has_the_dropout_of_its_recipe(
    dropout: float | None, tiny_folder: Path, tmp_path: Path
) -> None:
    BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=3, **SMALL)).save_pretrained(tmp_path / "bert")
    section = ModelSection(name=str(tmp_path / "bert"), tokenizer=str(tiny_folder / "tokenizer"), dropout=dropout)
    model = build_model(section, build_tokenizer(section), num_labels=3)
    assert dropouts(model) == {0.1 if dropout is None else dropout}
    assert model.config.num_labels == 3


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_a_random_model_has_the_dropout_of_its_recipe(dropout: float | None, tiny_folder: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.2, "attn_pdrop": 0.2}
    section = ModelSection(config=config, tokenizer=str(tiny_folder / "tokenizer"), dropout=dropout)
    model = build_model(section, build_tokenizer(section), num_labels=None)
    assert dropouts(model) == ({0.1, 0.2} if dropout is None else {dropout})


def test_a_dropout_that_no_config_names_is_set_too(tiny_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    first = GPT2LMHeadModel.__init__

    def build(self: GPT2LMHeadModel, config: GPT2Config, *args: Any, **options: Any) -> None:
        first(self, config, *args, **options)
        self.transformer.drop = nn.Dropout(0.7)

    monkeypatch.setattr(GPT2LMHeadModel, "__init__", build)
    section = ModelSection(name=str(tmp_path / "gpt2"), tokenizer=str(tiny_folder / "tokenizer"), dropout=0.0)
    assert dropouts(build_model(section, build_tokenizer(section), num_labels=None)) == {0.0}
