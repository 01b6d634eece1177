"""What a script asks of a forward beside labels and a mask leaves the gradient what it is in a copy of the model.

Shape letters: B examples, T positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    StableLmConfig,
    StableLmForCausalLM,
)

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ROTARY = SIZES | {"intermediate_size": 24, "num_key_value_heads": 2}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**ROTARY)),
    "stablelm": lambda: StableLmForCausalLM(StableLmConfig(**ROTARY)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ),
    "base": lambda: LlamaModel(LlamaConfig(**ROTARY)),
    "classifier": lambda: BertForSequenceClassification(BertConfig(**SIZES | NO_DROPOUT, intermediate_size=24)),
}
Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def _make(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().train()


def _make_batch(side: str, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(1, 60, (3, 24), generator=torch.Generator().manual_seed(seed))
    ids[:, :18] = ids[:1, :18].clone()
    count = torch.arange(24)
    mask = (count < torch.tensor([24, 17, 9])[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _compare(model: Any, loss: Loss, batches: list[dict[str, Tensor]], **options: Any) -> Any:
    """Compare each step with that of a copy, by autograd; return the engine."""
    plain = deepcopy(model)
    with sbp.attach(model, [sbp.make_policy("lossless", **options)]) as engine:
        for batch in batches:
            expected = loss(plain, batch)
            expected.backward()  # type: ignore[no-untyped-call]
            got = loss(model, batch)
            engine.backward(got)
            assert float(got.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                if one.grad is not None:
                    assert other.grad is not None
                    assert float((one.grad - other.grad).norm()) <= 1e-5 * float(one.grad.norm()) + 1e-8
            plain.zero_grad()
            model.zero_grad()
    return engine


def _states_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch, output_hidden_states=True)
    real = batch["attention_mask"].bool()
    first = output.loss if "labels" in batch else output.last_hidden_state[real].square().mean()
    sizes = [(number + 1) * state[real].square().mean() for number, state in enumerate(output.hidden_states)]
    assert {tuple(state.shape[:2]) for state in output.hidden_states} == {tuple(real.shape)}
    return first + torch.stack(sizes).sum()


@pytest.mark.parametrize("verify", ["first", "always", "never"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "base", "classifier"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_states_of_packed_rows_are_those_of_the_batch(name: str, side: str, verify: str) -> None:
    if (name, side) == ("classifier", "left"):
        side = "right"  # its pooler reads the first position
    batches = [_make_batch(side, seed) for seed in range(2)]
    for batch in batches:
        if name == "base":
            del batch["labels"]
        if name == "classifier":
            batch["labels"] = torch.tensor([0, 1, 1])
    engine = _compare(_make(name), _states_loss, batches, verify=verify)
    assert "in 2 of 2 batches" in engine.notes["packing"]


def test_all_real_positions_have_hidden_states_behind_the_last_label() -> None:
    batch = _make_batch("right")
    batch["labels"][:, 4:] = -100
    engine = _compare(_make("llama"), _states_loss, [batch])
    assert "0 after the last label" in engine.notes["packing"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_loss_that_reads_hidden_states_of_padding_is_refused(number: int) -> None:
    model, batch = _make("llama"), _make_batch("right")
    with sbp.attach(model, "lossless") as engine:
        output = model(**batch, output_hidden_states=True)
        with pytest.raises(UnsupportedError, match="positions that the policy skipped"):
            engine.backward(output.loss + output.hidden_states[number].square().mean())
        output = model(**batch, output_hidden_states=True)  # of a kind that was compared: by the gradient
        with pytest.raises(UnsupportedError, match=r"hidden states . of the model at 22 positions"):
            engine.backward(output.loss + output.hidden_states[number].square().mean())


def _empty(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    batch["input_ids"][1], batch["attention_mask"][1] = 0, 0
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "base"])
def test_an_example_without_a_token_keeps_the_batch_packed(name: str, verify: str) -> None:
    batch = _empty(_make_batch("right"))
    if name == "base":
        del batch["labels"]
    engine = _compare(_make(name), _states_loss, [batch], verify=verify)
    assert "in 1 of 1 batches" in engine.notes["packing"]


def test_the_row_of_an_example_without_a_token_is_not_read_in_silence() -> None:
    model, batch = _make("llama"), _empty(_make_batch("right"))
    with sbp.attach(model, [sbp.make_policy("lossless", verify="never")]) as engine:
        output = model(**batch, output_hidden_states=True)
        with pytest.raises(UnsupportedError, match=r"positions? that the policy skipped"):
            engine.backward(output.loss + output.hidden_states[1][:, 0].square().sum())


@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_a_head_that_reads_an_example_without_a_token_runs_plainly(verify: str) -> None:
    batch = _make_batch("right") | {"labels": torch.tensor([0, 1, 1])}
    batch["attention_mask"][1] = 0

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    _compare(_make("classifier"), loss, [batch], verify=verify)


@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "base", "classifier"])
def test_a_model_may_answer_with_a_tuple(name: str, verify: str) -> None:
    batch = _make_batch("right")
    if name == "base":
        del batch["labels"]
    if name == "classifier":
        batch["labels"] = torch.tensor([0, 1, 1])

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        first: Tensor = model(**batch, return_dict=False)[0]
        return first if first.dim() == 0 else first[batch["attention_mask"].bool()].square().mean()

    engine = _compare(_make(name), loss, [batch], verify=verify)
    assert "in 1 of 1 batches" in engine.notes["packing"]


def test_a_configuration_that_asks_for_hidden_states_gets_them_by_position() -> None:
    model, batch = _make("llama"), _make_batch("left")
    model.config.output_hidden_states = True

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        output = model(**batch)
        own: Tensor = output.hidden_states[1][batch["attention_mask"].bool()].square().mean()
        return own + output.loss

    assert "in 1 of 1 batches" in _compare(model, loss, [batch]).notes["packing"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("verify", ["first", "never"])
def test_shifted_labels_train_the_positions_they_stand_at(side: str, verify: str) -> None:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        shifted = pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        shifted[0, -1] = 7  # the label of another rank's first position
        shifted[1, 4:9] = -100
        found: Tensor = model(**batch, shift_labels=shifted).loss
        return found

    engine = _compare(_make("llama"), loss, [_make_batch(side, seed) for seed in range(2)], verify=verify)
    assert "in 2 of 2 batches" in engine.notes["packing"]


def test_a_forward_that_is_asked_for_attention_weights_runs_plainly() -> None:
    model = _make("llama")
    model.set_attn_implementation("eager")

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        output = model(**batch, output_attentions=True)
        weights: Tensor = output.attentions[0][0, 0, -1, -1]
        return output.loss + weights

    engine = _compare(model, loss, [_make_batch("right")])
    assert "their forward requests output_attentions" in engine.notes["packing"]


@pytest.mark.parametrize("verify", ["first", "always", "never"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_reentrant_checkpointing_is_packed_and_compared(side: str, verify: str) -> None:
    model = _make("llama")
    checkpoint_activations(model, use_reentrant=True)
    before = model.model._gradient_checkpointing_func
    engine = _compare(model, lambda m, b: m(**b).loss, [_make_batch(side, n) for n in range(3)], verify=verify)
    assert "in 3 of 3 batches" in engine.notes["packing"]
    assert ("compared" in engine.notes["packing"]) == (verify != "never")
    assert model.model._gradient_checkpointing_func is before


@pytest.mark.parametrize("name", ["llama", "stablelm", "gpt2"])
@pytest.mark.parametrize("mean", [False, True])
def test_an_own_loss_may_read_the_padding_that_predicts_the_first_label(name: str, mean: bool) -> None:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        z = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        if mean:
            return z[batch["attention_mask"].bool()].square().mean()
        return cross_entropy(z[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    engine = _compare(_make(name), loss, [_make_batch("left", seed) for seed in range(3)])
    assert "in 3 of 3 batches" in engine.notes["packing"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_model_that_calls_the_attention_interface_is_packed_whatever_its_flag_is(side: str) -> None:
    model = _make("stablelm")
    assert not model._supports_attention_backend
    engine = _compare(model, lambda m, b: m(**b).loss, [_make_batch(side)], verify="always")
    assert "in 1 of 1 batches" in engine.notes["packing"]


def test_a_decoder_without_position_numbers_is_refused_when_it_is_attached() -> None:
    config = BartConfig(
        vocab_size=60, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=24, dropout=0.0
    )
    with pytest.raises(UnsupportedError, match="position_ids, which BartForCausalLM does not take"):
        sbp.attach(BartForCausalLM(config).train(), "lossless")


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("verify", ["always", "never"])
def test_embeddings_that_a_model_changes_in_place_are_new_for_each_pass(verify: str, *, is_frozen: bool) -> None:
    from transformers import CTRLConfig, CTRLLMHeadModel

    torch.manual_seed(0)
    options = {"n_embd": 16, "n_layer": 2, "n_head": 2, "dff": 24, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = CTRLLMHeadModel(CTRLConfig(vocab_size=60, **options)).train()
    model.get_input_embeddings().requires_grad_(not is_frozen)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        # Scaled in place: a leaf that has a gradient is refused by PyTorch.
        embedded = model.get_input_embeddings()(batch["input_ids"]) * 1
        found: Tensor = model(
            inputs_embeds=embedded, attention_mask=batch["attention_mask"], labels=batch["labels"]
        ).loss
        return found

    engine = _compare(model, loss, [_make_batch("right"), _make_batch("right", 1)], verify=verify)
    assert "in 2 of 2 batches" in engine.notes["packing"]


def test_a_score_of_embeddings_that_change_in_place_is_the_plain_one() -> None:
    from transformers import CTRLConfig, CTRLLMHeadModel

    torch.manual_seed(0)
    options = {"n_embd": 16, "n_layer": 2, "n_head": 2, "dff": 24, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model, batch = CTRLLMHeadModel(CTRLConfig(vocab_size=60, **options)).train(), _make_batch("right")

    def score() -> Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"])
        with torch.no_grad():
            found: Tensor = model(
                inputs_embeds=embedded.detach().clone(), attention_mask=batch["attention_mask"], labels=batch["labels"]
            ).loss
        return found

    expected = score()
    with sbp.attach(model, [sbp.make_policy("lossless", verify="always")]) as engine:
        assert float(score()) == pytest.approx(float(expected), rel=1e-5)
        assert "differ" not in str(engine.notes)


@pytest.mark.parametrize("value", [0, 0.0, ""], ids=repr)
def test_an_unknown_argument_is_refused_whatever_its_value(value: object) -> None:
    model, batch = _make("llama"), _make_batch("right")
    with sbp.attach(model, "lossless"):
        with pytest.raises(UnsupportedError, match="does not support ignore_index in training: leave it out"):
            model(**batch, ignore_index=value)
        assert model(**batch, ignore_index=None).loss.isfinite()


@pytest.mark.parametrize("kept", [10, torch.arange(14, 24)], ids=["number", "positions"])
def test_labels_of_the_kept_logits_alone_run_plainly_with_the_reason(kept: Any) -> None:
    model, batch = _make("llama"), _make_batch("right")
    batch |= {"labels": batch["labels"][:, 14:].contiguous(), "logits_to_keep": kept}
    expected = model(**batch).loss
    with torch.no_grad():
        score = model(**batch).loss
    with sbp.attach(model, "lossless") as engine:
        assert torch.equal(model(**batch).loss, expected)
        with torch.no_grad():
            assert torch.equal(model(**batch).loss, score)
        assert "their labels do not have the shape (examples, positions) of the batch" in engine.notes["packing"]


def test_a_configuration_of_two_models_is_refused_with_a_way_out() -> None:
    first = _make("llama")
    second = LlamaForCausalLM(first.config)
    with sbp.attach(first, "lossless"), pytest.raises(UsageError, match="shares its configuration"):
        sbp.attach(second, "lossless")
