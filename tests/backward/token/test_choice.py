"""What a choice does beside its gradient: nothing where all is kept, the loss's weight, refusals of a wrong choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsebp_cli as sbp
from sparsebp_cli.backward.decoder.kv_cache import CACHE_NAMES
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import Step, TokenChoice, Tokens
from sparsebp_cli.policy.token import TokenMode
from tests.backward.families import tiny_decoder

from .case import Batch, Marked, assert_near, make_batch, plain_step, step
from .test_families import decoder

MODES: tuple[Any, ...] = ("exact", "detach")


def whole(mask: Any) -> Batch:
    """A batch whose every target is trained."""
    batch = make_batch("prompt", mask)
    real = batch.inputs.get("attention_mask", torch.ones_like(batch.inputs["labels"])).bool()
    return Batch(batch.inputs, torch.ones_like(real), real)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", ["none", "left", "right", "packed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_a_batch_that_is_trained_whole_is_dense_bit_for_bit(family: str, mask: Any, mode: Any) -> None:
    model = tiny_decoder(family)  # gpt2 with its dropout
    torch.manual_seed(3)
    dense = plain_step(model, whole(mask))
    torch.manual_seed(3)
    ours = step(model, whole(mask), mode)
    assert torch.equal(ours.loss, dense.loss)
    for name, gradient in dense.gradients.items():
        found = ours.gradients[name]
        assert gradient is not None
        assert found is not None
        assert torch.equal(found, gradient), name


@pytest.mark.parametrize("mode", MODES)
def test_a_disabled_engine_an_evaluation_and_no_grad_are_the_model_as_it_was(mode: Any) -> None:
    model, batch = decoder("llama"), make_batch("scattered")
    before = model(**batch.inputs)
    with sbp.attach(model, [Marked(mode=mode)]) as engine:
        with engine.disabled():
            disabled = model(**batch.arguments)
        with torch.no_grad():
            silent = model(**batch.arguments)
        evaluated = model.eval()(**batch.arguments)
        model.train()
        chosen = model(**batch.arguments)
    after = model(**batch.inputs)
    for output in (disabled, silent, evaluated, after):
        assert torch.equal(output.loss, before.loss)
        assert torch.equal(output.logits, before.logits)
    with pytest.raises(UnsupportedError, match="read logits in evaluation"):
        _ = chosen.logits
    assert not torch.equal(chosen.loss, before.loss)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("mode", MODES)
def test_each_trained_token_weighs_as_in_a_mean_over_all_micro_batches(mode: Any) -> None:
    model, batch = decoder("llama"), make_batch("scattered", "right")
    num_targets = int((batch.inputs["labels"][:, 1:] != -100).sum())
    num_trained = int((batch.trained[:, :-1] & (batch.inputs["labels"][:, 1:] != -100)).sum())
    num_items = torch.tensor(2 * num_targets)  # two such micro-batches
    ours = step(model, batch, mode, extra={"num_items_in_batch": num_items})
    mean = step(model, batch, mode)
    assert 0 < num_trained < num_targets
    torch.testing.assert_close(ours.loss, mean.loss / 2)
    exact = plain_step(model, batch, extra={"num_items_in_batch": torch.tensor(2 * num_trained)})
    torch.testing.assert_close(ours.loss, exact.loss)


def test_where_the_labels_say_it_all_the_loss_is_that_of_transformers() -> None:
    model, batch = decoder("llama"), make_batch("prompts")
    labels = batch.inputs["labels"].masked_fill(~batch.trained.roll(1, 1), -100)
    marked = Batch(batch.inputs | {"labels": labels}, torch.ones_like(batch.trained), batch.carries)
    extra = {"num_items_in_batch": torch.tensor(40)}
    assert_near(step(model, marked, "exact", extra=extra), plain_step(model, batch, extra=extra), 1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_batch_without_a_trained_position_changes_nothing(mode: Any, engine: str) -> None:
    model, batch = decoder("llama"), make_batch("scattered")
    nothing = Batch(batch.inputs, torch.zeros_like(batch.trained), batch.carries)
    if engine == "reference":  # transformers' own mean of nothing, which is no number
        assert step(model, nothing, mode, execution=engine).loss.isnan()
        return
    outcome = step(model, nothing, mode)
    assert float(outcome.loss) == 0.0
    assert all(gradient is not None and not gradient.any() for gradient in outcome.gradients.values())


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_of_the_users_own_gets_the_logits_of_all_positions(mode: TokenMode) -> None:
    model, batch = decoder("gemma3_text"), make_batch("scattered")
    inputs = {"input_ids": batch.inputs["input_ids"]}
    labels, trained = batch.inputs["labels"], batch.trained & (torch.arange(16) < 15)
    with sbp.attach(model, [Marked(mode=mode)]) as engine:
        engine.columns(labels=labels, trained=batch.trained, carries=batch.carries)
        output = model(**inputs)
        assert output.logits.shape == (3, 16, 64)
        loss = torch.nn.functional.cross_entropy(output.logits[trained], labels.roll(-1, 1)[trained])
        engine.backward(loss)
        gradients = {name: p.grad for name, p in model.named_parameters()}
    expected = step(model, batch, mode)
    torch.testing.assert_close(loss.detach(), expected.loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-5, atol=1e-7)


def test_labels_that_are_missing_are_asked_for() -> None:
    model, batch = decoder("llama"), make_batch("scattered")
    with (
        sbp.attach(model, [Marked()]),
        pytest.raises(UsageError, match="this training forward got no labels: pass labels"),
    ):
        model(input_ids=batch.inputs["input_ids"])


@pytest.mark.parametrize(
    ("trained", "carries", "complaint"),
    [
        (torch.ones(3, 16), torch.ones(3, 16), "must be torch.bool of shape"),
        (torch.ones(3, 15, dtype=torch.bool), torch.ones(3, 16, dtype=torch.bool), r"of shape \(3, 16\)"),
        (torch.ones(3, 16, dtype=torch.bool), torch.ones(3, 16, dtype=torch.bool), "positions without a label, got 3"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(trained: torch.Tensor, carries: torch.Tensor, complaint: str) -> None:
    class Wrong(Marked):  # type: ignore[misc]
        def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
            return TokenChoice(trained, carries)

    batch = make_batch("scattered")
    with sbp.attach(decoder("llama"), [Wrong()]) as engine, pytest.raises(UsageError, match=complaint):
        engine.backward(engine.extensions[0].decoder.model(**batch.arguments).loss)  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_the_loss_comes_first_however_the_output_is_read(mode: Any, engine: Any) -> None:
    model, batch = decoder("llama"), make_batch("scattered")
    with sbp.attach(model, [Marked(mode=mode)], execution=engine):
        output = model(**batch.arguments)
        parts = model(**batch.arguments, return_dict=False)
    assert output.loss.dim() == 0
    for loss in (output[0], output["loss"], next(iter(output.values())), parts[0]):
        assert torch.equal(loss, output.loss)
    for read in (lambda: output.logits, lambda: output["logits"], lambda: output[1], lambda: output.get("logits")):
        if engine == "reference":
            assert read().shape[:2] == batch.arguments["input_ids"].shape
        else:
            with pytest.raises(UnsupportedError, match="read logits in evaluation"):
                read()
    assert not set(CACHE_NAMES) & set(output.keys())
