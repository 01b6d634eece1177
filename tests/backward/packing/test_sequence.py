"""Rows that hold several sequences, as trl's packing and padding-free collators make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError
from tests.exactness.axis import AXES
from tests.exactness.subject import make_model as make_family

from .case import IGNORED, count_flops, error, gradients

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
PROMPT, LENGTHS = 20, (31, 40, 26)


def make_model(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | options))).train()


def make_texts() -> list[Tensor]:
    """Texts that begin with one prompt."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 64, (length,), generator=generator) for length in LENGTHS]
    return [torch.cat((texts[0][:PROMPT], text[PROMPT:])) for text in texts]


def collate(texts: list[Tensor], **options: Any) -> dict[str, Any]:
    """One row, by the collator of trl; the prompts are not trained."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    examples = [{"input_ids": text.tolist(), "labels": [IGNORED] * PROMPT + text[PROMPT:].tolist()} for text in texts]
    return dict(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, **options)(examples))


def alone(model: PreTrainedModel, texts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return loss and gradients of the mean over all labels, one text at a time, by the plain model."""
    model.zero_grad(set_to_none=True)
    number, total = sum(len(text) - PROMPT for text in texts), torch.zeros(())
    for text in texts:
        logits = model(input_ids=text[None], use_cache=False).logits[0, PROMPT - 1 : -1]
        loss = cross_entropy(logits, text[PROMPT:], reduction="sum") / number
        loss.backward()
        total += loss.detach()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return total, grads


@pytest.mark.parametrize("multiple", [None, 64])
@pytest.mark.parametrize("uses_cache", [False, True])
def test_a_row_of_several_texts_has_the_gradient_of_each_text_alone(uses_cache: bool, multiple: int | None) -> None:
    model, texts = make_model(), make_texts()
    expected_loss, expected = alone(model, texts)
    batch = collate(texts, pad_to_multiple_of=multiple)
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"} <= set(batch)
    with sbp.attach(model, "lossless") as engine:
        loss, grads = gradients(model, engine, batch if uses_cache else batch | {"use_cache": False})
        note = engine.notes["packing"]
    assert error(expected, grads) < 1e-6
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert f"{2 * PROMPT} in a shared prefix" in note
    # Where a cache is made, transformers does not look at the position numbers: its step mixes the texts.
    assert ("the ordinary step is wrong" in note) == uses_cache


def test_a_text_without_a_label_in_a_row_of_several_is_not_computed() -> None:
    model, texts = make_model(), make_texts()
    batch = collate(texts) | {"use_cache": False}
    batch["labels"][0, LENGTHS[0] : LENGTHS[0] + LENGTHS[1]] = IGNORED
    loss, expected = gradients(model, None, batch)
    with sbp.attach(model, sbp.make_policy("lossless", prefixes="separate")) as engine:
        own, grads = gradients(model, engine, batch)
        note = engine.notes["packing"]
    assert error(expected, grads) < 1e-6
    assert float(own) == pytest.approx(float(loss), rel=1e-6)
    # All of the second text, and the last token of the others, which predicts nothing.
    assert f"{LENGTHS[1] + 2} after the last label" in note


def test_a_row_of_texts_with_one_prompt_costs_less_than_half() -> None:
    model, texts = make_model(), make_texts() * 2
    batch = collate(texts) | {"use_cache": False}
    plain = count_flops(model, None, batch)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        gradients(model, engine, batch)  # the first batch tries the last layer
        own = count_flops(model, engine, batch)
    assert own < 0.5 * plain


def test_a_row_of_which_every_position_is_trained_runs_the_plain_step_bit_for_bit() -> None:
    model = make_model(hidden_size=64, vocab_size=64)
    texts = [torch.randint(3, 64, (100,), generator=torch.Generator().manual_seed(n)) for n in range(2)]
    batch = collate(texts) | {"use_cache": False}
    batch["labels"] = torch.cat([torch.tensor([IGNORED, *text[1:]]) for text in texts])[None]
    loss, expected = gradients(model, None, batch)
    with sbp.attach(model, "lossless") as engine:
        own, grads = gradients(model, engine, batch)
        assert "nothing to skip" in engine.notes["packing"]
    assert torch.equal(loss, own)
    assert all(torch.equal(one, other) for one, other in zip(expected, grads, strict=True))


def test_texts_in_a_row_are_kept_apart_where_the_plain_step_mixes_them() -> None:
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    model, texts = GptOssForCausalLM(config).train(), make_texts()
    _, expected = alone(model, texts)
    batch = collate(texts) | {"use_cache": False}
    assert error(expected, gradients(model, None, batch)[1]) > 1e-2
    with sbp.attach(model, "lossless") as engine:
        grads = gradients(model, engine, batch)[1]
        assert "the ordinary step is wrong" in engine.notes["packing"]
    assert error(expected, grads) < 1e-6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"position_ids": None}, "pass position_ids that restart there"),
        ({"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long)}, "and no attention_mask"),
        (
            {"cu_seq_lens_k": torch.tensor([0, 5, sum(LENGTHS)])},
            "cu_seq_lens_k and position_ids begin sequences at different positions",
        ),
        ({"seq_idx": torch.zeros(1, sum(LENGTHS))}, "seq_idx and position_ids begin sequences at different positions"),
    ],
)
def test_a_batch_whose_bounds_are_not_those_of_its_position_numbers_runs_plainly(
    change: dict[str, Any], reason: str
) -> None:
    model = make_model()
    batch = {name: v for name, v in (collate(make_texts()) | change).items() if v is not None} | {"use_cache": False}
    _, expected = gradients(model, None, batch)
    with sbp.attach(model, "lossless") as engine:
        grads = gradients(model, engine, batch)[1]
        assert reason in engine.notes["packing"]
    assert all(torch.equal(one, other) for one, other in zip(expected, grads, strict=True))


def test_bounds_of_several_rows_at_once_are_refused_for_a_batch_of_several_rows() -> None:
    model = make_model()
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5] * 2] * 2)
    labels = ids.masked_fill(torch.arange(12) < 9, IGNORED)
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels, "cu_seq_lens_q": torch.tensor([0, 6, 12])}
    with sbp.attach(model, "lossless") as engine:
        gradients(model, engine, batch)
        assert "begin sequences at different positions" in engine.notes["packing"]


def test_what_packing_does_not_know_is_still_refused() -> None:
    model = make_model()
    with sbp.attach(model, "lossless") as engine, pytest.raises(UnsupportedError, match="head_mask"):
        gradients(model, engine, collate(make_texts()) | {"head_mask": True})


@pytest.mark.parametrize("uses_cache", [False, True])
def test_a_mask_that_is_made_before_the_cache_knows_of_texts_in_a_row(uses_cache: bool) -> None:
    from transformers import MoshiConfig
    from transformers.models.moshi.modeling_moshi import MoshiForCausalLM

    torch.manual_seed(0)
    config = MoshiConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48)
    model = MoshiForCausalLM(config).train()
    ids, position = torch.tensor([[14, 55, 35, 23, 9]]), torch.tensor([[4, 5, 10, 12, 13]])
    batch = {"input_ids": ids, "labels": ids, "position_ids": position, "use_cache": uses_cache}
    model(**batch).loss.backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    with sbp.attach(model, [sbp.make_policy("lossless", verify="never")]) as engine:
        _, grads = gradients(model, engine, batch)
    assert error(grads, expected) < 1e-5


@pytest.mark.parametrize("name", ["chunks", "LlamaForCausalLM"])
def test_checkpointing_which_makes_no_cache_is_seen_wherever_the_layers_are(name: str) -> None:
    """The layers of Llama 4 are in a model of their own below the one with the head."""
    case = {axis: values[0] for axis, values in AXES.items()} | {"architecture": name, "wrapper": "checkpointing"}
    model = make_family(case)
    ids, position = torch.tensor([[12, 8, 20, 5]]), torch.tensor([[7, 20, 27, 28]])
    batch = {"input_ids": ids, "labels": ids, "position_ids": position}
    expected = model(**batch).loss
    with sbp.attach(model, [sbp.make_policy("lossless", verify="never")]):
        assert float(model(**batch).loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("name", ["OPTForCausalLM", "BioGptForCausalLM", "AfmoeForCausalLM"])
def test_a_model_whose_mask_mixes_texts_holds_them_apart_in_every_batch(name: str) -> None:
    """In one of two batches nothing can be left out, and no comparison has told of the mixing."""
    model = make_family({axis: values[0] for axis, values in AXES.items()} | {"architecture": name})
    ids, position = torch.tensor([[14, 55, 35, 23, 9, 7]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    for labelled in (6, 5):
        labels = ids.masked_fill((torch.arange(6) >= labelled) | (position == 0), IGNORED)
        model.zero_grad()
        for part in (slice(3), slice(3, None)):
            logits = model(input_ids=ids[:, part], use_cache=False).logits[0, :-1]
            size = int((labels != IGNORED).sum())
            cross_entropy(logits, labels[0, part][1:], ignore_index=IGNORED, reduction="sum").div(size).backward()
        expected = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        batch = {"input_ids": ids, "labels": labels, "position_ids": position, "use_cache": False}
        with sbp.attach(model, [sbp.make_policy("lossless", verify="never")]) as engine:
            _, grads = gradients(model, engine, batch)
        assert error(grads, expected) < 1e-5


def test_a_model_that_looks_ahead_is_known_where_each_text_has_one_position() -> None:
    model = make_family({axis: values[0] for axis, values in AXES.items()} | {"architecture": "BertGenerationDecoder"})
    ids = torch.tensor([[52, 3]])
    model(input_ids=ids, labels=ids).loss.backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    with sbp.attach(model, [sbp.make_policy("lossless", verify="never")]) as engine:
        _, grads = gradients(model, engine, {"input_ids": ids, "labels": ids})
    assert error(grads, expected) < 1e-5
