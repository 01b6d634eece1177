"""Which layers `layers` and `turn: layers` mean, in models with an encoder and a decoder too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, WhisperConfig, WhisperForConditionalGeneration

import sparsebp_cli as sbp
from sparsebp_cli.backward.decoder.layers import LayerNumbers

from .conftest import tiny_model

_SIZES = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_BART = _SIZES | {"d_model": 16, "encoder_layers": 3, "decoder_layers": 2, "max_position_embeddings": 32}
_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
_T5 = _SIZES | {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 2}
STACKS = {
    "whisper": ("model.encoder.layers", 6, "model.decoder.layers", 2),
    "bart": ("model.encoder.layers", 3, "model.decoder.layers", 2),
    "t5": ("encoder.block", 3, "decoder.block", 2),
}


def _model(family: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    ids = torch.arange(3, 9)[None]
    if family == "whisper":
        options = _BART | _HEADS | {"encoder_layers": 6, "num_mel_bins": 4, "max_source_positions": 8}
        config = WhisperConfig(**options, max_target_positions=16)
        return WhisperForConditionalGeneration(config).train(), {"input_features": torch.randn(1, 4, 16), "labels": ids}
    options = _BART | _HEADS if family == "bart" else _T5
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **options))
    return model.train(), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("family", STACKS)
def test_encoder_layers_come_before_decoder_layers_and_a_note_says_so(family: str) -> None:
    model, batch = _model(family)
    encoder, num_encoder, decoder, num_decoder = STACKS[family]
    last, total = num_encoder + num_decoder - 1, num_encoder + num_decoder
    for layers, expected in (([-1], f"{decoder}.{num_decoder - 1}"), ([0], f"{encoder}.0"), ([last], None)):
        with sbp.attach(model, [sbp.make_policy("topk", keep=0.5, layers=layers)]) as engine:
            engine.backward(model(**batch).loss)
            report = engine.report()
        name = expected or f"{decoder}.{num_decoder - 1}"
        cut = {site.name for site in report.sites if site.calls and site.kept_share != 1.0}
        assert cut
        assert all(site.startswith(f"{name}.") for site in cut), layers
        assert report.notes[-1] == (
            f"layers 0 to {num_encoder - 1} are those of {encoder}, {num_encoder} to {total - 1} are those of {decoder}"
        )


@pytest.mark.parametrize(
    ("options", "stacks"), [({}, ("decoder", "encoder")), ({"freeze": ["*encoder*"]}, ("decoder",))]
)
def test_layers_of_both_stacks_take_turns_and_patterns_choose_one(options: Any, stacks: tuple[str, ...]) -> None:
    model, _ = _model("whisper")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    layers, turns = LayerNumbers(model), []
    with sbp.attach(model, [sbp.make_policy("frozen", turn="layers", **options)], optimizer=optimizer):
        for _ in range(8 if len(stacks) == 2 else 2):
            trained = [name for name, p in model.named_parameters() if p.requires_grad]
            turns.append({layers.number_of(name) for name in trained} - {None})
            optimizer.step()
    expected = [7, 6, 5, 4, 3, 2, 1, 0] if len(stacks) == 2 else [7, 6]
    assert turns == [{number} for number in expected]


def test_a_decoder_alone_has_its_one_stack() -> None:
    with sbp.attach(tiny_model("llama"), [sbp.make_policy("topk", keep=0.5, layers=[0])]) as engine:
        assert engine.report().notes == ("layers 0 to 1 are those of model.layers",)
    with sbp.attach(tiny_model("llama"), [sbp.make_policy("topk", keep=0.5)]) as engine:
        assert engine.report().notes == ()


def test_a_transformer_of_pytorch_has_both_stacks() -> None:
    layers = LayerNumbers(nn.Transformer(8, 2, 3, 2, 8, batch_first=True))
    assert layers.names == [f"encoder.layers.{i}" for i in range(3)] + [f"decoder.layers.{i}" for i in range(2)]
    assert layers.number_of("decoder.layers.1.linear1.weight") == 4
    assert layers.part_of("decoder.layers.1.linear1") == "decoder.layers.1"
    assert layers.number_of("decoder.norm") is None


def test_a_list_that_is_the_model_is_its_layers() -> None:
    layers = LayerNumbers(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert (layers.names, layers.number_of("1.weight"), layers.describe()) == (
        ["0", "1"],
        1,
        "layers 0 to 1 are those of the model",
    )
