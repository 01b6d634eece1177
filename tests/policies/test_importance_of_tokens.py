"""Tokens drawn in proportion to a score: probabilities, weights in the loss, and the gradient in the mean."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from sparsebp_cli.backward import attach
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policies.tokens import SelectedTokens
from sparsebp_cli.policy import Step, TokenChoice, Tokens, TokenSelector
from tests.backward.families import tiny_decoder
from tests.backward.score.test_scorer import batch
from tests.promise import Nothing

GIVEN: list[Tensor] = []  # what the policy below trains, and its weights


class Weighted(Nothing, TokenSelector):
    """Trains and weighs as the test says."""

    @property
    def needs(self) -> frozenset[Any]:
        return frozenset()

    @property
    def budget(self) -> float:
        return 1.0

    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        chosen_BT, weight_BT = GIVEN
        return TokenChoice(chosen_BT, chosen_BT, weight_BT)


def given(num_trained: int = 9) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return a batch, some of its targets, and weights."""
    arguments = batch(4)
    target_BT = torch.zeros(arguments["labels"].shape, dtype=torch.bool)
    target_BT[:, :-1] = arguments["labels"][:, 1:] != -100
    generator = torch.Generator().manual_seed(3)
    index = target_BT.flatten().nonzero().flatten()
    index = index[torch.randperm(len(index), generator=generator)[:num_trained]]
    chosen_BT = torch.zeros_like(target_BT).flatten().index_fill_(0, index, True).view_as(target_BT)
    return arguments, chosen_BT, torch.rand(target_BT.shape, generator=generator) * 3


def losses(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    """Return the loss of each target, (B, T), 0 elsewhere."""
    logits = model(**{name: value for name, value in arguments.items() if name != "labels"}).logits
    loss_BT = torch.zeros(arguments["labels"].shape)
    cut = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), arguments["labels"][:, 1:], ignore_index=-100, reduction="none"
    )
    return torch.cat([cut, loss_BT[:, :1]], 1)


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def train(model: Any, arguments: dict[str, Tensor], policy: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    with attach(model, [policy], **options) as engine:
        loss = model(**arguments).loss
        model.zero_grad(set_to_none=True)
        engine.backward(loss)
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("execution", ["fast", "reference"])
@pytest.mark.parametrize("num_trained", [9, 1000], ids=["some", "all"])
def test_the_loss_is_the_weighted_sum_over_all_targets(num_trained: int, execution: str) -> None:
    model = tiny_decoder("llama")
    arguments, *GIVEN[:] = given(num_trained)
    targets = int((arguments["labels"][:, 1:] != -100).sum())
    factor_BT = GIVEN[0] * GIVEN[1]
    expected = (losses(model, arguments) * factor_BT).sum() / targets
    wanted = gradients(model, expected)
    loss, found = train(model, arguments, Weighted(), execution=execution)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    # with the number of targets of all micro-batches, as a Trainer passes it
    step = arguments | {"num_items_in_batch": torch.tensor(100)}
    whole, _ = train(model, step, Weighted(), execution=execution)
    torch.testing.assert_close(whole, expected.detach() * targets / 100, rtol=1e-5, atol=1e-6)


def test_weights_without_labels_and_of_another_shape_are_refused() -> None:
    model = tiny_decoder("llama")
    arguments, *GIVEN[:] = given()
    with attach(model, [Weighted()]) as engine:
        labels = arguments.pop("labels")
        engine.columns(labels=labels)
        with pytest.raises(UsageError, match="weights the model's own loss of each token"):
            model(**arguments)
        GIVEN[1] = GIVEN[1][:, :-1]
        with pytest.raises(UsageError, match="weight_BT of TokenChoice must have the shape"):
            model(**arguments, labels=labels)


def test_the_gradient_is_that_of_all_targets_in_the_mean_over_draws() -> None:
    """Over many draws: the mean of the sampled gradients is the dense one, within six of its standard errors."""
    model = tiny_decoder("llama").double()
    arguments = batch(2)
    dense = torch.cat([g.flatten() for g in gradients(model, model(**arguments).loss)])
    policy = SelectedTokens(score="gradient_norm", draw="proportional", keep=0.5)
    draws = torch.stack(
        [torch.cat([g.flatten() for g in train(model, arguments, policy, seed=seed)[1]]) for seed in range(150)]
    )
    error = draws.std(0) / len(draws) ** 0.5
    assert bool(((draws.mean(0) - dense).abs() <= 6 * error + 1e-9).all())
    biased = torch.cat([g.flatten() for g in train(model, arguments, SelectedTokens(score="loss", keep=0.5))[1]])
    assert bool(((biased - dense).abs() > 6 * error + 1e-9).any()), "else this test could not fail"


def test_drawn_in_proportion_with_one_over_the_probability() -> None:
    policy = SelectedTokens(score="loss", draw="proportional", keep=0.4)
    score = torch.tensor([[1.0, 2.0, 3.0, 4.0, 10.0, 0.0]])
    target = score > 0
    tokens = Tokens(None, target, torch.ones_like(target), {"loss": score})
    expected, counts = torch.tensor([0.1, 0.2, 0.3, 0.4, 1.0]), torch.zeros(5)
    for draw in range(2000):
        choice = policy.choose(tokens, Step(0, draw=draw))
        assert choice.weight_BT is not None
        assert int(choice.trained_BT.sum()) == 2
        counts += choice.trained_BT[0, :5]
        drawn = choice.trained_BT[0, :5]
        torch.testing.assert_close(choice.weight_BT[0, :5][drawn], 1 / expected[drawn], rtol=1e-5, atol=0.0)
    assert bool(((counts / 2000 - expected).abs() <= 6 * (expected * (1 - expected) / 2000).sqrt()).all())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"score": "random", "keep": 0.5}, "never negative, got score: random"),
        ({"score": "loss", "keep": 0.5, "within": "example"}, "and neither band, mask_column nor within: example"),
        ({"score": "loss", "band": [0.2, 0.7]}, "and neither band, mask_column nor within: example"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_in_proportion_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        SelectedTokens.model_validate_json(json.dumps({**options, "draw": "proportional"}))
    assert SelectedTokens(score="loss", keep=0.5, draw="proportional").unbiased
    assert not SelectedTokens(score="loss", keep=0.5).unbiased
