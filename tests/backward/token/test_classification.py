"""A decoder that classifies: the position that the loss reads is trained, and others carry gradient or do not."""

from __future__ import annotations

from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedModel,
)

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import Score, Step, TokenChoice, Tokens, TokenSelector
from sparsebp_cli.policy.token import TokenMode
from tests.backward.families import DECODERS
from tests.promise import Nothing

from .case import Outcome, assert_near, make_batch
from .definition import constant_inputs, constant_keys

MODES: tuple[TokenMode, ...] = ("exact", "detach", "stop")
LABELS = torch.tensor([0, 2, 1])


@final
class Carrying(Nothing, TokenSelector):
    """Trains every target, or none, and carries what a column of the batch says."""

    trains: bool = True

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset()

    @property
    def budget(self) -> float | None:
        return 1.0

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"carries"})

    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        trained_BT = tokens.target_BT & self.trains
        return TokenChoice(trained_BT, tokens.columns["carries"] | trained_BT)


def classifier(family: str = "llama", **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = DECODERS[family] | {"vocab_size": 64, "num_labels": 3, "pad_token_id": 0, "num_hidden_layers": 3} | options
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **sizes))
    model.train()
    return model


def inputs(padding: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return what the model takes, the positions that carry gradient, and the one of each example that is read."""
    batch = make_batch("scattered", padding)
    ids = batch.inputs["input_ids"]
    mask = batch.inputs.get("attention_mask", torch.ones_like(ids))
    last_B = (mask * torch.arange(ids.shape[1])).argmax(1)
    read_BT = torch.arange(ids.shape[1]) == last_B[:, None]
    given = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": LABELS}
    return given, batch.carries | read_BT, read_BT


def plain(model: PreTrainedModel, given: dict[str, Tensor]) -> Outcome:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return Outcome(loss.detach(), {name: p.grad for name, p in model.named_parameters()})


def attached(model: PreTrainedModel, given: dict[str, Any], policy: TokenSelector, execution: str = "fast") -> Outcome:
    model.zero_grad()
    with sbp.attach(model, [policy], execution=execution) as engine:
        loss = model(**given).loss
        engine.backward(loss)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return Outcome(loss.detach(), gradients)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_cut_is_what_is_detached_by_hand(mode: TokenMode, family: str, padding: str) -> None:
    model = classifier(family)
    given, carries, _ = inputs(padding)
    if mode == "exact":
        expected = plain(model, given)
    else:
        with (constant_keys if mode == "detach" else constant_inputs)(model, carries):
            expected = plain(model, given)
    for execution in ("fast", "reference"):
        assert_near(attached(model, given | {"carries": carries}, Carrying(mode=mode), execution), expected)


@pytest.mark.parametrize("options", [{"carry": "real"}, {"carry": "random", "carry_keep": 1.0}])
@pytest.mark.parametrize("mode", MODES[1:])
def test_with_all_positions_carried_the_gradient_is_dense(mode: TokenMode, options: dict[str, Any]) -> None:
    model, (given, _, _) = classifier(), inputs("right")
    policy: Any = sbp.make_policy("tokens", score="mask", mode=mode, **options)
    assert policy.exact
    assert_near(attached(model, given, policy), plain(model, given))


def test_random_positions_carry_gradient_and_the_one_that_is_read_always_does() -> None:
    policy: Any = sbp.make_policy("tokens", score="mask", mode="detach", carry="random", carry_keep=0.25)
    given, _, read_BT = inputs("right")
    tokens = Tokens(given["input_ids"], read_BT, given["attention_mask"] != 0)
    first, second = (policy.choose(tokens, Step(index)).carries_BT for index in (0, 1))
    for carries_BT in (first, second):
        assert carries_BT.sum(1).tolist() == [4, 4, 3]  # a quarter of 16, 14 and 12, half to even
        assert bool((carries_BT | ~read_BT).all())
        assert not bool((carries_BT & ~tokens.real_BT).any())
    assert not torch.equal(first, second)
    model = classifier()
    with sbp.attach(model, [policy]) as engine:
        engine.backward(model(**given).loss)
        report = engine.report()
    assert report.chosen is not None
    assert report.chosen.carried_share == pytest.approx(11 / 42)


def test_the_fewer_positions_carry_gradient_the_less_is_multiplied() -> None:
    model, (given, _, _) = classifier(), inputs("none")
    flops = {}
    for share in (0.25, 0.5, 1.0):
        policy = sbp.make_policy("tokens", score="mask", mode="detach", carry="random", carry_keep=share)
        with sbp.attach(model, [policy]) as engine:
            loss = model(**given).loss
            with FlopCounterMode(display=False) as counter:
                engine.backward(loss)
            flops[share] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        model(**given).loss.backward()
    assert flops[0.25] < flops[0.5] < flops[1.0] < 0.9 * counter.get_total_flops()  # the last layer reads one query


def test_without_labels_the_loss_is_the_callers() -> None:
    model, (given, carries, _) = classifier(), inputs("left")
    labels = given.pop("labels")
    with constant_keys(model, carries):
        torch.nn.functional.cross_entropy(model(**given).logits, labels).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with sbp.attach(model, [Carrying(mode="detach")]) as engine:
        engine.columns(carries=carries)
        loss = torch.nn.functional.cross_entropy(model(**given).logits, labels)
        engine.backward(loss)
        ours = Outcome(loss.detach(), {name: p.grad for name, p in model.named_parameters()})
    assert_near(ours, Outcome(loss.detach(), expected))


def test_what_cannot_be_chosen_in_a_classification_is_refused_by_name() -> None:
    model, (given, carries, _) = classifier(), inputs("none")
    for options in ({"score": "loss", "keep": 0.5}, {"score": "random", "keep": 0.5}):
        with pytest.raises(UnsupportedError, match="among labels of tokens, but LlamaForSequenceClassification"):
            sbp.attach(model, [sbp.make_policy("tokens", **options)])
    with sbp.attach(model, [Carrying(trains=False)]), pytest.raises(UsageError, match="the classification loss reads"):
        model(**given, carries=carries)


@pytest.mark.parametrize(
    "model",
    [
        lambda: GPT2ForSequenceClassification(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)),
        lambda: BertForSequenceClassification(
            BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
        ),
    ],
)
def test_an_encoder_and_a_classifier_with_code_of_its_own_are_refused_by_name(model: Any) -> None:
    policy = sbp.make_policy("tokens", score="mask", mode="detach", carry="random", carry_keep=0.5)
    with pytest.raises(UnsupportedError, match=r"needs a transformers decoder.*ForSequenceClassification"):
        sbp.attach(model(), [policy])
