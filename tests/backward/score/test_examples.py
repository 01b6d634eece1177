"""Chosen examples are trained as if the batch held no others, and what choosing costs is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from sparsebp_cli.backward import attach, count_flops
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policies.max_child import MaxChild
from sparsebp_cli.policies.topk import TopK
from sparsebp_cli.policy import Step
from sparsebp_shelf.example import Examples, ExampleSelector, Uniform
from sparsebp_shelf.policies.selective_backprop import SelectiveBackprop
from tests.backward.conftest import FAMILIES
from tests.backward.families import tiny_decoder
from tests.backward.score.test_scorer import batch
from tests.promise import Nothing

ALWAYS = {"start": 0.0, "end": 1.0, "interrupt": 0}


class Given(Nothing, ExampleSelector):
    """Chooses what the test says, and keeps what it was shown."""

    index: Any = None
    scores: bool = False
    share: float = 1.0
    seen: list[Any] = Field(default_factory=list)

    @property
    def budget(self) -> float:
        return 1.0

    @property
    def scored_share(self) -> float:
        return self.share

    def needs_loss(self, step: Step) -> bool:
        return self.scores

    def choose(self, examples: Examples, step: Step) -> Tensor | None:
        self.seen.append(examples)
        return None if self.index is None else torch.tensor(self.index)


def gradients(model) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train(model, arguments, *policies, **options) -> tuple[float, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    if not policies:
        loss = model(**arguments).loss
        loss.backward()
    else:
        with attach(model, list(policies), **options) as engine:
            loss = model(**arguments).loss
            engine.backward(loss)
    return float(loss.detach()), gradients(model)


def same(one, other) -> bool:
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def classifier():
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **(FAMILIES["llama"] | {"num_labels": 4, "pad_token_id": 0}))
    return AutoModelForSequenceClassification.from_config(config).train()


def rows(arguments, index):
    return {name: value[index] for name, value in arguments.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_chosen_examples_are_trained_as_a_batch_of_their_own(family) -> None:
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    model, arguments = tiny_decoder(family, **options), batch(4)
    assert same(train(model, arguments, Given(index=[1, 3])), train(model, rows(arguments, [1, 3])))


def test_examples_of_a_classification_are_chosen() -> None:
    model = classifier()
    arguments = {"input_ids": batch(4)["input_ids"], "labels": torch.tensor([0, 3, 1, 2])}
    assert same(train(model, arguments, Given(index=[0, 2])), train(model, rows(arguments, [0, 2])))


def test_choosing_nothing_is_dense_bitwise() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    dense = train(model, arguments)
    for policy in (Given(), Uniform(**ALWAYS, keep=1.0), Uniform(start=0.0, end=1.0, interrupt=1)):
        assert same(train(model, arguments, policy), dense)
    assert same(train(model, arguments, Uniform(**ALWAYS, keep=0.25), exclude=[]), train(model, arguments)) is False


def test_the_loss_is_still_one_of_the_targets_of_the_whole_step() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    count = torch.tensor(100)
    targets_B = (arguments["labels"][:, 1:] != -100).sum(1)
    assert len(set(targets_B.tolist())) > 1, "examples of equal length would hide a mean over examples"
    loss, _ = train(model, arguments | {"num_items_in_batch": count}, Given(index=[1, 3]))
    alone, _ = train(model, rows(arguments, [1, 3]))
    assert loss == pytest.approx(alone * float(targets_B.sum()) / 100, rel=1e-6)


def test_positional_arguments_and_the_rest_of_the_batch_go_along() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    arguments["position_ids"] = torch.arange(12).expand(4, 12) + 3
    expected = train(model, rows(arguments, [0, 3]))
    model.zero_grad(set_to_none=True)
    with attach(model, [Given(index=[0, 3])]) as engine:
        ids, mask = arguments.pop("input_ids"), arguments.pop("attention_mask")
        loss = model(ids, mask, **arguments).loss
        engine.backward(loss)
    assert same((float(loss.detach()), gradients(model)), expected)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_policy_is_shown_each_examples_mean_loss_in_the_part_that_is_read(share) -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    arguments["labels"][2, :6] = -100  # nothing to train in the first half
    policy = Given(index=[0], scores=True, share=share, seen=[])
    train(model, arguments, policy)
    read = 12 if share == 1.0 else 6
    with torch.no_grad():
        expected = [
            model.eval()(**{name: value[row : row + 1, :read] for name, value in arguments.items()}).loss
            for row in range(4)
        ]
    if share < 1.0:
        expected[2] = torch.stack([expected[row] for row in (0, 1, 3)]).mean()
    torch.testing.assert_close(policy.seen[0].loss_B, torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_a_classifications_losses_are_those_of_its_examples() -> None:
    model = classifier()
    arguments = {"input_ids": batch(4)["input_ids"], "labels": torch.tensor([0, 3, 1, 2])}
    policy = Given(index=[0], scores=True, seen=[])
    train(model, arguments, policy)
    with torch.no_grad():
        logits = model.eval()(input_ids=arguments["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits, arguments["labels"], reduction="none")
    torch.testing.assert_close(policy.seen[0].loss_B, expected)


def test_the_cost_of_choosing_is_counted_and_that_of_not_choosing_is_nothing() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    with torch.no_grad(), count_flops() as half:
        model(**{name: value[:, :6] for name, value in arguments.items()})
    policy = SelectiveBackprop(**ALWAYS, keep=0.5, scale_factor=0.5)
    with attach(model, [policy]) as engine:
        with count_flops():
            engine.backward(model(**arguments).loss)
        chosen = engine.take_chosen()
        assert 0 < chosen.scoring_flops <= half.total, "the head is multiplied for targets only"
        assert chosen.scoring_seconds > 0.0
        assert (chosen.examples, chosen.chosen_examples) == (4, 2)
        assert 0.0 < chosen.trained_share < 1.0
        assert engine.take_chosen() is None
        assert engine.report().chosen == chosen
    with attach(model, [Uniform(**ALWAYS)]) as engine:
        with count_flops():
            engine.backward(model(**arguments).loss)
        assert engine.take_chosen().scoring_flops == 0


def test_schedule_needs_the_number_of_steps_and_keeps_it() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    with pytest.raises(
        UsageError, match=r"Uniform: start and end are fractions of the training's steps: pass attach\(num_steps"
    ):
        attach(model, [Uniform()])
    assert "forward" not in model.__dict__
    assert not any("forward" in module.__dict__ for module in model.modules())
    chosen = []
    with attach(model, [Uniform(start=0.25, end=0.75, interrupt=4)], num_steps=8) as engine:
        for _ in range(8):
            engine.backward(model(**arguments).loss)
            chosen.append(engine.take_chosen().chosen_examples)
    assert chosen == [4, 4, 2, 4, 2, 2, 4, 4]  # from step 2 to 5, the fourth is dense


def test_evaluation_disabled_and_probing_leave_everything_as_it_was() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    dense = train(model, arguments)
    model.zero_grad(set_to_none=True)
    with attach(model, [Uniform(**ALWAYS, keep=0.25)]) as engine:
        with engine.disabled():
            loss = model(**arguments).loss
            loss.backward()
        assert same((float(loss.detach()), gradients(model)), dense)
        assert model.eval()(**arguments).logits.shape[0] == 4
        with torch.no_grad():
            assert model.train()(**arguments).logits.shape[0] == 4
        with engine.probing():
            engine.backward(model(**arguments).loss)
            assert engine.report().chosen.chosen_examples == 1
        assert engine.take_chosen() is None
    assert "forward" not in model.__dict__
    assert same(train(model, arguments), dense)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sites": "nodes"},
        {"segments": 2},
        {"execution": "reference"},
    ],
    ids=str,
)
def test_it_goes_with_a_gradient_policy_everywhere(options) -> None:
    model, arguments, policy = tiny_decoder("llama"), batch(4), TopK(keep=0.5)
    both = train(model, arguments, Given(index=[1, 2], scores=True), policy, **options)
    assert same(both, train(model, rows(arguments, [1, 2]), policy, **options))


def test_it_goes_with_a_router() -> None:
    model, arguments, options = tiny_decoder("llama"), batch(4), {"sites": "nodes"}
    both = train(model, arguments, Given(index=[1, 2]), MaxChild(), **options)
    assert same(both, train(model, rows(arguments, [1, 2]), MaxChild(), **options))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_adapters_are_reached() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_decoder("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    arguments = batch(4)
    policy = Given(index=[1, 3], scores=True)
    assert same(train(model, arguments, policy), train(model, rows(arguments, [1, 3])))


def test_checkpointed_layers_run_again_on_the_chosen_examples() -> None:
    model, arguments = tiny_decoder("llama", checkpointing=True), batch(4)
    assert same(train(model, arguments, Given(index=[1, 3], scores=True)), train(model, rows(arguments, [1, 3])))


def test_what_cannot_be_is_refused_by_name() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    with pytest.raises(UnsupportedError, match="Uniform chooses examples in the forward of a transformers model"):
        attach(torch.nn.Linear(2, 2), [Uniform(**ALWAYS)])
    del arguments["labels"]
    with attach(model, [Uniform(**ALWAYS)]), pytest.raises(UsageError, match="Uniform needs labels"):
        model(**arguments)
    with pytest.raises(UnsupportedError, match="make the same decision"):
        attach(model, [Uniform(**ALWAYS), SelectiveBackprop(**ALWAYS)])
    assert not any("forward" in module.__dict__ for module in model.modules())
