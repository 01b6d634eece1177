"""Token selectors keep the contract with every combination of options, and the suite catches each broken promise."""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from sparsebp_cli.policies.tokens import SelectedTokens
from sparsebp_cli.policy import Score, ScoredTokenSelector, Step, TokenChoice, Tokens
from sparsebp_cli.testing import check_policy

SCORES: list[dict[str, Any]] = [
    {"score": "mask"},
    {"score": "random", "keep": 0.3},
    {"score": "random", "keep": 0.5, "within": "example"},
    {"score": "loss", "keep": 0.5},
    {"score": "loss", "keep": 0.1, "within": "example"},
    {"score": "entropy", "keep": 0.5},
    {"score": "entropy", "keep": 1.0},
    {"score": "excess", "keep": 0.6, "reference": "austen-llama"},
    {"score": "excess", "keep": 0.5, "reference": "austen-llama", "reference_scores": "fly"},
]
FLOWS: list[dict[str, Any]] = [
    {},
    {"mode": "detach"},
    {"mask_column": "loss_mask"},
    {"mode": "detach", "mask_column": "loss_mask"},
]


@pytest.mark.parametrize(("score", "flow"), list(itertools.product(SCORES, FLOWS)), ids=str)
def test_every_combination_keeps_the_contract(score, flow) -> None:
    check_policy("tokens", **score, **flow)


def shown(score_BT: Tensor | None = None, target_BT: Tensor | None = None, **columns: Tensor) -> Tokens:
    shape = (2, 8)
    real_BT = torch.ones(shape, dtype=torch.bool)
    real_BT[1, 6:] = False
    if target_BT is None:
        target_BT = real_BT.clone()
        target_BT[0, 7] = target_BT[1, 5] = False
    scores: dict[Score, Tensor] = {} if score_BT is None else {"loss": score_BT, "entropy": -score_BT}
    return Tokens(torch.zeros(shape, dtype=torch.int64), target_BT, real_BT, scores, columns)


def chosen(tokens: Tokens, step: Step | None = None, **options: Any) -> TokenChoice:
    return SelectedTokens.model_validate_json(json.dumps(options)).choose(tokens, step or Step(0))


SCORE_BT = torch.tensor([[3.0, 1, 2, 9, 4, 8, 5, 99], [7.0, 0, 6, 0.5, 2.5, 99, 99, 99]])  # 99: no target


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"keep": 0.25}, [[3, 5], [0]]),  # 3 of 12
        ({"keep": 0.5}, [[3, 4, 5, 6], [0, 2]]),
        ({"keep": 0.01}, [[3], []]),
        ({"keep": 0.4, "within": "example"}, [[3, 5, 6], [0, 2]]),  # 3 of 7, 2 of 5
        ({"keep": 1.0}, [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4]]),
    ],
    ids=str,
)
def test_the_targets_of_largest_loss_are_trained_by_count(options, wanted) -> None:
    choice = chosen(shown(SCORE_BT), score="loss", **options)
    assert [row.nonzero()[:, 0].tolist() for row in choice.trained_BT] == [sorted(row) for row in wanted]


def test_entropy_and_excess_choose_by_their_own_score() -> None:
    lowest = chosen(shown(SCORE_BT), score="entropy", keep=0.25).trained_BT
    assert [row.nonzero()[:, 0].tolist() for row in lowest] == [[1], [1, 3]]  # the score is minus the loss
    tokens = shown(SCORE_BT)
    tokens = Tokens(
        None, tokens.target_BT, tokens.real_BT, {"loss": SCORE_BT, "reference_loss": SCORE_BT * 2 - SCORE_BT.sqrt()}
    )  # excess: sqrt(loss) - loss, largest where the loss is 0.25
    choice = chosen(tokens, score="excess", keep=0.1, reference="austen-llama")
    assert choice.trained_BT.nonzero().tolist() == [[1, 3]]


def test_the_mask_speaks_of_tokens_and_is_heeded_where_they_are_predicted() -> None:
    column_BT = torch.zeros(2, 8, dtype=torch.int64)
    column_BT[0, 3] = column_BT[1, 0] = column_BT[1, 6] = 1  # the first token has no predictor, 6 is padding
    choice = chosen(shown(mask=column_BT), score="mask", mask_column="mask")
    assert choice.trained_BT.nonzero().tolist() == [[0, 2]]
    assert torch.equal(choice.carries_BT, choice.trained_BT)
    column_BT = torch.ones(2, 8)
    column_BT[0, :4] = 0
    choice = chosen(shown(SCORE_BT, mask=column_BT), score="loss", keep=0.25, mask_column="mask")
    assert int(choice.trained_BT.sum()) == 2  # a quarter of the 9 that may be trained
    assert not choice.trained_BT[0, :3].any()
    nothing = chosen(shown(SCORE_BT, mask=column_BT * 0), score="loss", keep=0.25, mask_column="mask")
    assert not nothing.trained_BT.any()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"score": "loss"}, "'score: loss' needs keep"),
        ({"score": "mask", "keep": 0.5}, "'score: mask' trains all marked tokens: leave out keep"),
        ({"score": "mask", "within": "example"}, "leave out within"),
        ({"score": "excess", "keep": 0.5}, "score: excess. needs the option reference"),
        ({"score": "loss", "keep": 0.5, "reference": "austen-llama"}, "the other options do not use reference"),
        ({"score": "loss", "band": [0.1, 0.2]}, "Extra inputs are not permitted"),
        ({"score": "loss", "keep": 0.5, "draw": "proportional"}, "Extra inputs are not permitted"),
        ({"score": "loss", "keep": 0.0}, "greater than 0"),
        ({"score": "mask", "mode": "stop"}, "Input should be 'exact' or 'detach'"),
        ({"score": "mask", "carry": "real"}, "Extra inputs are not permitted"),
        (
            {"score": "los", "keep": 0.5},
            "Input should be 'mask', 'random', 'loss', 'excess', ",
        ),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, text) -> None:
    with pytest.raises(ValidationError, match=text):
        SelectedTokens.model_validate_json(json.dumps(options))


class _Half(ScoredTokenSelector):
    """Keeps the contract: the first half of the targets. Each policy below breaks one promise."""

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset()

    def score_tokens(self, tokens: Tokens, step: Step) -> Tensor | None:
        return -torch.arange(tokens.target_BT.numel(), dtype=torch.float32).view(tokens.target_BT.shape)


class _Given(_Half):
    @abstractmethod
    def change(self, choice: TokenChoice, tokens: Tokens, step: Step) -> TokenChoice:
        """Return another choice, which breaks a promise."""

    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        return self.change(super().choose(tokens, step), tokens, step)


class _TrainsPadding(_Given):
    def change(self, choice: TokenChoice, tokens: Tokens, step: Step) -> TokenChoice:
        return TokenChoice(tokens.real_BT, tokens.real_BT)


class _CarriesPadding(_Given):
    def change(self, choice: TokenChoice, tokens: Tokens, step: Step) -> TokenChoice:
        return TokenChoice(choice.trained_BT, torch.ones_like(choice.trained_BT))


class _CarriesNothing(_Given):
    def change(self, choice: TokenChoice, tokens: Tokens, step: Step) -> TokenChoice:
        return TokenChoice(choice.trained_BT, torch.zeros_like(choice.trained_BT))


class _TrainsAll(_Given):
    def change(self, choice: TokenChoice, tokens: Tokens, step: Step) -> TokenChoice:
        return TokenChoice(tokens.target_BT, tokens.target_BT)


class _TrainsTooFew(_Given):
    def change(self, choice: TokenChoice, tokens: Tokens, step: Step) -> TokenChoice:
        few_BT = choice.trained_BT & (choice.trained_BT.flatten().cumsum(0).view(choice.trained_BT.shape) <= 1)
        return TokenChoice(few_BT, few_BT)


class _GivesNumbers(_Given):
    def change(self, choice: TokenChoice, tokens: Tokens, step: Step) -> TokenChoice:
        return TokenChoice(choice.trained_BT.float(), choice.carries_BT)


class _UsesGlobalGenerator(_Half):
    def score_tokens(self, tokens: Tokens, step: Step) -> Tensor | None:
        return torch.rand(tokens.target_BT.shape)


class _SameAtEveryStep(_Half):
    def score_tokens(self, tokens: Tokens, step: Step) -> Tensor | None:
        return torch.rand(tokens.target_BT.shape, generator=torch.Generator().manual_seed(step.draw))


class _ChangesTargets(_Half):
    def score_tokens(self, tokens: Tokens, step: Step) -> Tensor | None:
        tokens.target_BT[:, 0] = False
        return super().score_tokens(tokens, step)


class _SaysExact(_Half):
    @property
    def exact(self) -> bool:
        return True


class _SaysUnbiased(_Half):
    @property
    def unbiased(self) -> bool:
        return True


class _DetachedAndUnbiased(_SaysUnbiased):
    def score_tokens(self, tokens: Tokens, step: Step) -> Tensor | None:
        return torch.rand(tokens.target_BT.shape, generator=step.generator(tokens))


def test_half_keeps_the_contract() -> None:
    check_policy(_Half, keep=0.5)
    check_policy(_DetachedAndUnbiased, keep=0.5)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (_TrainsPadding, "trains a position that is no target"),
        (_CarriesPadding, "carries_BT marks padding"),
        (_CarriesNothing, "carries_BT lacks a trained position"),
        (_TrainsAll, "budget 0.5 allows"),
        (_TrainsTooFew, "budget 0.5 allows"),
        (_GivesNumbers, "trained_BT must be boolean"),
        (_UsesGlobalGenerator, "global random generator"),
        (_SameAtEveryStep, "draws the same for every index"),
        (_ChangesTargets, "changes what it receives"),
        (_SaysExact, "declares exact"),
        (_SaysUnbiased, "trains some targets more often"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_broken_promise_is_caught(policy, text) -> None:
    with pytest.raises(AssertionError, match=text):
        check_policy(policy, keep=0.5)


def test_a_biased_mode_is_caught() -> None:
    with pytest.raises(AssertionError, match="carries_BT lacks positions"):
        check_policy(_DetachedAndUnbiased, keep=0.5, mode="detach")
