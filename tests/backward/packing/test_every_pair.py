"""Every encoder-decoder and every classifier of the installed transformers that can be made tiny, packed or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartModel,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError
from tests import architectures
from tests.backward.token import test_every_decoder as tiny_models

from .case import ALL, IGNORED, LIMIT, error, errors, gradients, make_batch, make_pair_batch

FEW = (("right", "completion", "none"), ("left", "dense", "tree"), ("none", "last", "groups"))
REFUSED = {
    "FSMTConfig",  # its plain forward does not take labels alone
    "BigBirdPegasusConfig",
    "LEDConfig",
    "LongT5Config",
    "MvpConfig",
    "NllbMoeConfig",
    "PegasusXConfig",
    "SwitchTransformersConfig",
    "UMT5Config",
}


def bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_ffn_dim": 48, f"{side}_attention_heads": 4}
    sizes |= {"dropout": 0.0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
    return BartForConditionalGeneration(BartConfig(**sizes)).train()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    ).train()


def _judge(monkeypatch: pytest.MonkeyPatch, implementation: str, arrangements: Any) -> dict[str, str]:
    """Return each model with why it is refused, empty where it is packed."""
    monkeypatch.setitem(tiny_models.TINY, "decoder_start_token_id", 2)
    packed, refused, wrong = set(), {}, {}
    found: dict[str, str] = {}
    for name, model in tiny_models.every_model(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING):
        model.config.decoder_start_token_id = 2
        family = name.partition(" ")[0]
        try:
            model.set_attn_implementation(implementation)
            gradients(model, None, make_pair_batch("right", "completion", "none"))
        except Exception:  # without this attention, or not trained by sources and labels
            continue
        try:
            bad = errors(model, arrangements, make_pair_batch)
            packed.add(family)
            found[type(model).__name__] = ""
            if bad:
                wrong[name] = str(bad)
        except UnsupportedError as refusal:
            refused[family] = found[type(model).__name__] = str(refusal)
        except Exception as other:  # all of them are told together
            wrong[name] = f"{type(other).__name__}: {other}"
        assert not any("forward" in vars(module) for module in model.modules()), name
    assert wrong == {}
    assert packed >= {"BartConfig", "T5Config", "MT5Config", "PegasusConfig", "MarianConfig", "M2M100Config"}
    assert len(packed) >= 10
    assert set(refused) <= REFUSED
    assert not any("\n" in text for text in refused.values())
    return found


@pytest.mark.filterwarnings("ignore")  # what transformers says while it makes them
@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.long)])
def test_every_encoder_decoder_is_packed_exactly_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, implementation: str, request: pytest.FixtureRequest
) -> None:
    found = _judge(monkeypatch, implementation, FEW[1:2])
    if implementation == "sdpa":
        architectures.hold(request.config, "lossless, encoder and decoder", found)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_encoder_decoder_is_packed_exactly_in_every_arrangement(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    _judge(monkeypatch, implementation, ALL)


@pytest.mark.filterwarnings("ignore")
def test_every_classifier_is_packed_exactly_or_refused_by_name(request: pytest.FixtureRequest) -> None:
    found: dict[str, str] = {}
    wrong: dict[str, str] = {}
    batch = make_batch("right", "dense", "none") | {"labels": torch.arange(6) % 2}
    for name, model in tiny_models.every_model(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING):
        try:
            model.set_attn_implementation("sdpa")
            expected = gradients(model, None, batch)
        except Exception:  # without this attention, or not trained by this batch
            continue
        try:
            with sbp.attach(model, "lossless") as engine:
                got = gradients(model, engine, batch)
                found[type(model).__name__] = "" if "skipped" in engine.notes["packing"] else "left as it is"
            if error(expected[1], got[1]) > LIMIT:
                wrong[name] = str(error(expected[1], got[1]))
        except UnsupportedError as refusal:
            found[type(model).__name__] = str(refusal)
            if "\n" in str(refusal):
                wrong[name] = str(refusal)
    assert wrong == {}
    assert list(found.values()).count("") >= 25
    architectures.hold(request.config, "lossless, classification", found)


@pytest.mark.parametrize("make", [bart, t5])
def test_a_source_of_several_examples_is_encoded_once(make: Any) -> None:
    model, batch = make(), make_pair_batch("right", "completion", "groups")
    rows: list[int] = []
    layer = (model.get_encoder().layers if make is bart else model.get_encoder().block)[1]

    def count(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows.append(inputs[0].shape[1])

    count.__module__ = "torch"  # packing makes way for a hook of a script
    layer.register_forward_pre_hook(count)
    expected = gradients(model, None, batch)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        got = gradients(model, engine, batch)
        claim = engine.notes["packing"]
    assert error(expected[1], got[1]) < LIMIT
    assert rows == [44, 44 + int(batch["attention_mask"][3:].sum())]
    assert "88 in a shared prefix" not in claim
    assert " 0 in a shared prefix" not in claim


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [bart, t5])
def test_checkpointing_of_an_encoder_decoder_computes_the_packed_rows_again(make: Any) -> None:
    model = make()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert errors(model, FEW, make_pair_batch) == {}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    batch = make_pair_batch(*FEW[0])
    model(**batch).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with sbp.attach(model, "lossless") as engine:  # computes these batches plainly, and says so
        engine.backward(model(**batch).loss)
        assert "reentrant checkpointing: set use_reentrant=False" in engine.notes["packing"]
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters() if name in expected)


def test_the_gradient_of_an_encoder_decoder_is_compared_and_its_logits_can_be_read() -> None:
    model, batch = bart(), make_pair_batch("left", "completion", "tree")
    trained = batch["labels"] != IGNORED
    expected = model(**batch).logits[trained]
    with sbp.attach(model, "lossless") as engine:
        output = model(**batch)
        assert "gradient compared with the ordinary one in 1 of" in engine.notes["packing"]
        assert output.logits.shape == (*batch["labels"].shape, 64)
        torch.testing.assert_close(output.logits[trained], expected)


def test_a_loss_of_the_users_own_gets_logits_of_an_encoder_decoder() -> None:
    model, batch = bart(), make_pair_batch("right", "dense", "groups")
    labels = batch.pop("labels")
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels.clamp(min=0))
    batch["decoder_attention_mask"] = (labels != IGNORED).long()

    def run(engine: sbp.Engine | None) -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(**batch).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        engine.backward(loss) if engine else loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = run(None)
    with sbp.attach(model, "lossless") as engine:
        assert error(expected, run(engine)) < LIMIT
        assert "skipped" in engine.notes["packing"]


def test_an_encoder_decoder_with_nothing_to_leave_out_is_plain_bit_for_bit() -> None:
    model, batch = bart(), make_pair_batch("none", "dense", "none")
    batch["labels"] = batch["input_ids"].clone()
    expected = gradients(model, None, batch)
    with sbp.attach(model, "lossless") as engine:
        got = gradients(model, engine, batch)
        assert engine.notes["packing"] == "nothing to skip in 1 batches"
    assert all(torch.equal(one, other) for one, other in zip(expected[1], got[1], strict=True))


def test_an_encoder_decoder_without_a_head_above_its_decoder_is_refused() -> None:
    text = "lossless needs a language-model head above the decoder, which the encoder-decoder {} lacks"
    with pytest.raises(UnsupportedError, match=text.format("BartModel")):
        sbp.attach(BartModel(bart().config).train(), "lossless")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    sides = [BertConfig(**sizes, num_hidden_layers=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)] * 2
    joined = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*sides))
    with pytest.raises(UnsupportedError, match=text.format("EncoderDecoderModel")):
        sbp.attach(joined.train(), "lossless")
