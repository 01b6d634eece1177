"""A loss that reads what a packed forward did not compute is noticed, and no batch outlives its step."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError
from tests.backward.packing.case import make_batch

CONFIG = LlamaConfig(
    vocab_size=60,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.mean(),
    "square, whose gradient is 0 at 0": lambda values: values.square().mean(),
    "absolute value": lambda values: values.abs().mean(),
    "normaliser of logits": lambda values: values.logsumexp(-1).square().mean(),
    "distillation": lambda values: values.log_softmax(-1)[..., 3].mean(),
}


def _count_tensors() -> int:
    gc.collect()
    return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())


def test_no_class_and_no_tensor_outlives_a_step() -> None:
    torch.manual_seed(0)
    model, seen = LlamaForCausalLM(CONFIG).train(), set()
    with sbp.attach(model, "lossless") as engine:
        for step in range(500):
            ids = torch.randint(1, 60, (2, 4 + step % 7))
            output = model(input_ids=ids, labels=ids.masked_fill(torch.arange(ids.shape[1]) < 3, -100))
            engine.backward(output.loss)
            assert output.logits.shape == (*ids.shape, 60)
            model.zero_grad()
            del output
            if step in (20, 250, 499):
                seen.add((_count_tensors(), len(pytree.SUPPORTED_NODES)))
        assert "in 500 of 500 batches" in engine.notes["packing"]
    assert len(seen) == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda output: output.logits,
        lambda output: output["logits"],
        lambda output: output[1],
        lambda output: output.get("logits"),
        lambda output: output.to_tuple()[1],
        lambda output: output[1:][0],
        lambda output: dict(output)["logits"],
    ],
)
def test_logits_beside_a_loss_are_read_in_every_form(read: Callable[[object], Tensor]) -> None:
    model, batch = LlamaForCausalLM(CONFIG).train(), make_batch("right", "completion", "none")
    plain = model(**batch)
    trained = batch["labels"][:, 1:] != -100
    with sbp.attach(model, "lossless"):
        output = model(**batch)
        torch.testing.assert_close(read(output)[:, :-1][trained], plain.logits[:, :-1][trained])
        torch.testing.assert_close(output[0], plain.loss)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", [LlamaForCausalLM, LlamaModel])
def test_a_loss_that_reads_padding_is_refused_by_name(kind: type[torch.nn.Module], name: str) -> None:
    model, batch = kind(CONFIG).train(), make_batch("right", "dense", "none")
    del batch["labels"]
    with sbp.attach(model, "lossless") as engine, pytest.raises(UnsupportedError, match="that the policy skipped"):
        engine.backward(LOSSES[name](model(**batch)[0]))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_leaves_padding_out_gets_the_plain_gradient(name: str) -> None:
    model, batch = LlamaForCausalLM(CONFIG).train(), make_batch("left", "dense", "none")
    del batch["labels"]
    real = batch["attention_mask"].bool()
    LOSSES[name](model(**batch).logits[real]).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with sbp.attach(model, "lossless") as engine:
        engine.backward(LOSSES[name](model(**batch).logits[real]))
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_other_labels_than_those_the_engine_was_given_are_refused() -> None:
    model, batch = LlamaForCausalLM(CONFIG).train(), make_batch("none", "dense", "none")
    with sbp.attach(model, "lossless") as engine:
        engine.columns(labels=batch["labels"].masked_fill(torch.arange(44) < 30, -100))
        logits = model(input_ids=batch["input_ids"]).logits
        with pytest.raises(UnsupportedError, match="that the policy skipped"):
            engine.backward(
                torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            )


@pytest.mark.parametrize("where", ["hole before a trained token", "padding after the text"])
def test_trained_padding_after_a_real_token_is_left_to_the_plain_step(where: str) -> None:
    model, batch = LlamaForCausalLM(CONFIG).train(), make_batch("right", "dense", "none")
    if where == "padding after the text":
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, 0)
    else:
        batch["attention_mask"][:, 5:9] = 0
        batch["labels"][:, 5:9] = -100
    model(**batch).loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with sbp.attach(model, [sbp.make_policy("lossless", verify="never")]) as engine:
        engine.backward(model(**batch).loss)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
