"""What token selection does not do is refused by name, before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
)

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from tests.backward.conftest import filled_cache
from tests.backward.families import tiny_decoder

from .case import Marked, make_batch, random_ids
from .test_families import decoder

BART = BartConfig(vocab_size=64, d_model=32, decoder_ffn_dim=48, decoder_layers=1, decoder_attention_heads=4)
TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_an_architecture_that_is_not_known_is_named_with_what_an_adapter_needs() -> None:
    with pytest.raises(UnsupportedError, match=r"the layer BartDecoderLayer: .* BranchLayout .*sparsebp\.layouts"):
        sbp.attach(BartForCausalLM(BART), [Marked()])


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mamba", {"state_size": 4}, "mix neighbouring positions"),
        ("xglm", {"d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 48}, "transformers' attention"),
    ],
)
def test_an_architecture_that_cannot_have_a_layout_is_refused_with_the_reason(
    family: str, options: dict[str, Any], reason: str
) -> None:
    model = tiny(family, **options)
    with pytest.raises(UnsupportedError, match=f"token selection does not support the layer .*{reason}"):
        sbp.attach(model, [Marked()])


@pytest.mark.parametrize("option", [{"output_router_logits": True}, {"router_jitter_noise": 0.1}])
def test_a_loss_and_noise_of_routers_are_refused_before_and_in_the_forward(option: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"MixtralForCausalLM has {next(iter(option))}"):
        sbp.attach(tiny("mixtral", num_local_experts=4, **option), [Marked()])
    model, batch = tiny("mixtral", num_local_experts=4), make_batch("scattered")
    with (
        sbp.attach(model, [Marked()]),
        pytest.raises(UnsupportedError, match="output_router_logits"),
    ):
        model(**batch.arguments, output_router_logits=True)


def tiny(family: str, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(TEXT | options)))
    model.train()
    return model


def pictured() -> PaliGemmaForConditionalGeneration:
    """A decoder of text and pictures, whose prompts look ahead."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "gemma", "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8, **sizes}
    vision = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, **sizes}
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32, image_token_id=63)
    )


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), "a causal language model of transformers, got Sequential"),
        (
            lambda: BertForMaskedLM(
                BertConfig(
                    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
                )
            ),
            "does not support the layer BertLayer",
        ),
        (pictured, "a text-only model, not a PaliGemmaConfig"),
        (lambda: tiny_decoder("gemma3_text", use_bidirectional_attention=True), "sets use_bidirectional_attention"),
        (lambda: tiny_decoder("gpt2", add_cross_attention=True), "sets add_cross_attention"),
        (
            lambda: tiny_decoder("llama", attn_implementation="flex_attention"),
            "the attention implementation eager or sdpa, got 'flex_att",
        ),
    ],
)
def test_a_model_that_is_no_plain_decoder_is_refused_when_attached(model: Any, complaint: str) -> None:
    found = model()
    with pytest.raises(UnsupportedError, match=complaint):
        sbp.attach(found, [Marked()])
    assert not any("forward" in module.__dict__ for module in found.modules())


def test_nodes_do_not_go_with_tokens() -> None:
    with pytest.raises(UnsupportedError, match="Marked needs sites='linears', got 'nodes'"):
        sbp.attach(decoder("llama"), [Marked()], sites="nodes")


def test_two_token_selectors_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="make the same decision"):
        sbp.attach(decoder("llama"), [Marked(), Marked(mode="detach")])


def test_a_model_with_a_loss_of_its_own_is_refused() -> None:
    model = decoder("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    with pytest.raises(UnsupportedError, match="ForCausalLMLoss; the model uses <lambda>"):
        sbp.attach(model, [Marked()])


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"output_attentions": True}, "output_attentions"),
        ({"logits_to_keep": 3}, "logits_to_keep"),
        ({"shift_labels": random_ids()}, "shift_labels"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 16])}, "layers with this input: cu_seq_lens_q"),
        ({"is_causal": True}, "layers with this input: is_causal"),
    ],
)
def test_an_argument_that_cannot_be_cut_is_refused(extra: dict[str, Any], complaint: str) -> None:
    model, batch = decoder("llama"), make_batch("scattered")
    with sbp.attach(model, [Marked(mode="detach")]):
        with pytest.raises(UnsupportedError, match=complaint):
            model(**batch.arguments, **extra)
        assert torch.isfinite(model(**batch.arguments).loss)  # the layers were given back


def test_keys_and_values_of_earlier_positions_are_refused() -> None:
    model, batch = decoder("llama"), make_batch("scattered")
    filled = filled_cache(model, random_ids())
    with sbp.attach(model, [Marked()]), pytest.raises(UnsupportedError, match=" and ".join(filled)):
        model(**batch.arguments, **filled)


def test_labels_of_another_shape_are_refused() -> None:
    model, batch = decoder("llama"), make_batch("scattered")
    short = {name: value[:, :12] for name, value in batch.arguments.items() if name != "input_ids"}
    complaint = r"positions\), \(3, 16\), got \(3, 12\)"
    with sbp.attach(model, [Marked()]) as engine:
        engine.columns(**short)
        with pytest.raises(UsageError, match=complaint):
            model(input_ids=batch.inputs["input_ids"])


def test_an_attached_model_is_refused() -> None:
    model = decoder("llama")
    with sbp.attach(model, [Marked()]), pytest.raises(UnsupportedError, match="already attached"):
        sbp.attach(model, [Marked()])


@pytest.mark.parametrize("mode", ["exact", "detach"])
@pytest.mark.parametrize("when", ["before attach", "after attach"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_a_hook_that_would_see_chosen_positions_alone_is_named(mode: str, when: str, register: str) -> None:
    """An activation penalty by a hook was 13 % off, without a word."""
    model = tiny("llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)

    def penalise(*_: object) -> None:
        """Stand for a script's own hook."""

    def hook() -> None:
        getattr(model.model.layers[0], register)(penalise)

    policy = sbp.make_policy("tokens", score="random", keep=0.5, mode=mode)
    if when == "before attach":
        hook()
    with sbp.attach(model, policy) as engine:
        if when == "after attach":
            hook()
        ids = torch.randint(1, 60, (2, 12))
        with pytest.raises(UnsupportedError, match=r"penalise, at 'model\.layers\.0'\) would not get the whole batch"):
            engine.backward(model(input_ids=ids, labels=ids).loss)
    assert all(parameter.grad is None for parameter in model.parameters())
