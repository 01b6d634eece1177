"""Packed rows have the masks of LoRA's dropout that their positions have in the plain step."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.backward.families import tiny_decoder

from .case import LIMIT, error, gradients, make_batch

# peft 0.21 asks transformers 5.23 by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def _adapted(rate: float = 0.1, *, checkpointing: bool = False) -> nn.Module:
    model = tiny_decoder("llama", vocab_size=64)
    config = peft.LoraConfig(
        r=4, lora_dropout=rate, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    if checkpointing:
        checkpoint_activations(model)
        model.enable_input_require_grads()
    return adapted.train()


def _step(model: nn.Module, engine: Any, batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = sum(model(**batch).loss for batch in batches)
    assert isinstance(loss, Tensor)
    loss.backward() if engine is None else engine.backward(loss)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], torch.get_rng_state()


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("pad", "labels", "prefix"), [("right", "completion", "groups"), ("left", "dense", "none")])
def test_a_packed_step_is_the_plain_one_with_the_same_masks(
    pad: str, labels: str, prefix: str, checkpointing: bool, verify: str
) -> None:
    model, batch = _adapted(checkpointing=checkpointing), make_batch(pad, labels, prefix)
    expected, random = _step(model, None, [batch])
    dropped, _ = _step(_adapted(0.0), None, [batch])
    assert error(expected, dropped) > 1e-2, "dropout matters"
    with sbp.attach(model, {"name": "lossless", "verify": verify}) as engine:
        for _ in range(2):
            got, after = _step(model, engine, [batch])
            assert error(expected, got) < LIMIT
            assert torch.equal(random, after), "the generator is where the plain step leaves it"
        assert "lossless is off" not in engine.notes["packing"]


def test_two_forwards_before_a_backward() -> None:
    batches = [make_batch("right", "completion", "none"), make_batch("left", "dense", "none")]
    model = _adapted()
    expected, _ = _step(model, None, batches)
    with sbp.attach(model, {"name": "lossless", "verify": "never"}) as engine:
        got, _ = _step(model, engine, batches)
    assert error(expected, got) < LIMIT


def test_other_dropout_stays_refused() -> None:
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["lm_head"])
    at_head = peft.get_peft_model(tiny_decoder("llama", vocab_size=64), config)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"lm_head.*has dropout 0.1"):
        sbp.attach(at_head.train(), ["lossless"])
    sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    bert = BertForSequenceClassification(BertConfig(**sizes, num_attention_heads=2))
    with pytest.raises(UnsupportedError, match=r"has dropout 0.1"):
        sbp.attach(bert.train(), ["lossless"])


def test_dropout_that_comes_after_attach_is_refused_before_a_step() -> None:
    """Later batches of a kind are not compared, so nothing else would notice it."""
    model, batch = _adapted(0.0), make_batch("right", "completion", "groups")
    with sbp.attach(model, ["lossless"]) as engine:
        _step(model, engine, [batch])
        model.add_adapter("plain", peft.LoraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[operator]
        _step(model, engine, [batch])
        for layer in model.get_base_model().model.layers:  # type: ignore[operator]
            layer.self_attn.attention_dropout = 0.2
        with pytest.raises(UsageError, match=r"self_attn' got dropout 0.2 after the model was attached"):
            _step(model, engine, [batch])
        for layer in model.get_base_model().model.layers:  # type: ignore[operator]
            layer.self_attn.attention_dropout = 0.0
        config = peft.LoraConfig(r=2, lora_dropout=0.3, target_modules=["k_proj"])
        model.add_adapter("dropped", config)  # type: ignore[operator]
        with pytest.raises(UsageError, match=r"dropped' got dropout 0.3 after the model was attached"):
            _step(model, engine, [batch])


def test_examples_without_an_advantage_leave_the_masks_of_the_others() -> None:
    from trl.trainer.utils import add_fused_lm_head

    weights = torch.tensor([1.0, 0.0, -0.5, 0.0])
    grads = []
    for own in (False, True):
        model = _adapted()
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy"))  # type: ignore[operator]
        batch = make_batch("right", "completion", "groups")
        batch = {name: value[:4] for name, value in batch.items()}
        engine = sbp.attach(model, [sbp.make_policy("lossless", verify="never")]) if own else None
        for _ in range(3):  # whether a gradient arrives at them is known from the first step on
            torch.manual_seed(7)
            model.zero_grad()
            if engine is not None:
                engine.columns(example_weight=weights)
            output = model(**batch, fused_lm_head=True)
            loss = -(output.log_probs * weights[:, None]).sum() / 100
            loss.backward() if engine is None else engine.backward(loss)
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        if engine is not None:
            engine.detach()
    for plain, packed in zip(grads[:3], grads[3:], strict=True):
        assert error(plain, packed) < LIMIT


@pytest.mark.parametrize("order", ["packed first", "plain first"])
def test_a_plain_forward_of_as_many_rows_is_told_from_a_packed_one(order: str) -> None:
    two = {"input_ids": torch.tensor([[42, 15], [7, 15]]), "labels": torch.tensor([[42, 15], [7, 15]])}
    one = {name: value[:1] for name, value in two.items()}
    one["labels"] = torch.tensor([[-100, -100]])  # of two rows, as the first has when it is packed
    model = _adapted(0.3, checkpointing=True)
    with sbp.attach(model, [sbp.make_policy("lossless", verify="never", labels=True)]) as engine:
        batches = [two, one] if order == "packed first" else [one, two]
        torch.manual_seed(7)
        outputs = [
            model(input_ids=b["input_ids"], labels=b["labels"]) if b is two else model(b["input_ids"]) for b in batches
        ]
        loss = sum(o.loss if o.loss is not None else o.logits.square().mean() for o in outputs)
        assert isinstance(loss, Tensor)
        with pytest.raises(UnsupportedError, match="before the next forward"):
            engine.backward(loss)


@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_a_comparison_leaves_what_waits_for_its_backward(verify: str) -> None:
    model = _adapted(0.3, checkpointing=True)
    batches = [make_batch("right", "completion", "none"), make_batch("left", "dense", "none")]
    batches[1] = {name: value[:2] for name, value in batches[1].items()}
    expected, _ = _step(model, None, batches)
    with sbp.attach(model, {"name": "lossless", "verify": verify}) as engine:
        got, _ = _step(model, engine, batches)
    assert error(expected, got) < LIMIT


@pytest.mark.parametrize("verify", ["first", "never"])
def test_trial_passes_leave_buffers_as_a_plain_step_does(verify: str) -> None:
    model = tiny_decoder("llama").train()
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)][:4]:
        nn.utils.parametrizations.spectral_norm(module)
    plain = copy.deepcopy(model)
    engine = sbp.attach(model, [sbp.make_policy("lossless", verify=verify)])
    for arrangement in (("right", "completion", "none"), ("right", "last", "groups")):
        batch = make_batch(*arrangement)
        expected, got = gradients(plain, None, batch), gradients(model, engine, batch)
        assert error(expected[1], got[1]) < LIMIT
        assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))
    assert engine.notes["packing"]
