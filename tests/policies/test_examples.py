"""Example selectors: who is drawn, how often and when; and the suite catches each broken promise."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from sparsebp_cli.policy import Step
from sparsebp_cli.testing import check_policy
from sparsebp_shelf.example import Examples, ExampleSelector, Uniform
from sparsebp_shelf.policies.selective_backprop import SelectiveBackprop, rank
from tests.promise import Nothing

ALWAYS: dict[str, Any] = {"start": 0.0, "end": 1.0, "interrupt": 0}
OPTIONS: list[dict[str, Any]] = [{}, ALWAYS, ALWAYS | {"keep": 0.1}, {"keep": 1.0}, {"interrupt": 1}, {"interrupt": 3}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["selective-backprop", "uniform"])
def test_every_combination_keeps_the_contract(name, options) -> None:
    check_policy(name, **options)


def draw(policy: ExampleSelector, loss_B: Tensor, times: int = 2000) -> Counter[int]:
    examples = Examples(len(loss_B), loss_B)
    chosen: Counter[int] = Counter()
    for index in range(times):
        index_K = policy.choose(examples, Step(index))
        assert index_K is not None
        chosen.update(index_K.tolist())
    return chosen


def test_the_chance_grows_with_the_rank_of_the_loss_as_composers_does() -> None:
    """One is chosen of four: with keep 1/4 the chance is (rank - 1/2) ** 3, over the sum of all."""
    loss_B = torch.tensor([0.4, 9.0, 0.1, 3.0])
    chosen = draw(SelectiveBackprop(**ALWAYS, keep=0.25), loss_B)
    weight = {2: 0.5**3, 0: 1.5**3, 3: 2.5**3, 1: 3.5**3}
    for example, expected in weight.items():
        share = expected / sum(weight.values())
        assert abs(chosen[example] / 2000 - share) < 6 * (share * (1 - share) / 2000) ** 0.5, example


def test_only_the_rank_counts_and_equal_losses_are_equal() -> None:
    policy = SelectiveBackprop(**ALWAYS, keep=0.5)
    near, far = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.001, 7.0, 7.5, 1e9])
    assert draw(policy, near, 100) == draw(policy, far, 100)
    same = draw(policy, torch.ones(4))
    assert all(abs(count / 2000 - 0.5) < 6 * (0.25 / 2000) ** 0.5 for count in same.values())


def test_a_loss_that_is_no_number_ranks_above_all_others() -> None:
    before_R = torch.tensor([torch.inf, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert rank(torch.tensor([torch.nan, 2.5]), before_R).tolist() == [1.0, 0.2]
    assert bool(rank(torch.tensor([torch.nan, torch.nan]), before_R[:1]).isfinite().all())


def test_uniform_draws_each_example_as_often_and_looks_at_nothing() -> None:
    policy = Uniform(**ALWAYS, keep=0.25)
    assert not policy.needs_loss(Step(0))
    chosen = draw(policy, torch.arange(8.0))
    assert all(abs(chosen[i] / 2000 - 0.25) < 6 * (0.1875 / 2000) ** 0.5 for i in range(8))


@pytest.mark.parametrize("policy_class", [Uniform, SelectiveBackprop])
def test_the_schedule_is_composers(policy_class) -> None:
    policy = policy_class()
    for index in range(100):
        step = Step(index, num_steps=100)
        expected = 50 <= index < 90 and (index + 1) % 2 != 0
        assert policy.is_choosing(step) == expected
        assert policy.needs_loss(step) == (expected and policy_class is SelectiveBackprop)
        assert (policy.choose(Examples(4, torch.rand(4)), step) is not None) == expected


def test_the_length_of_the_training_is_needed_only_for_a_part_of_it() -> None:
    assert Uniform().needs_num_steps
    assert Uniform(start=0.0, interrupt=0).needs_num_steps
    assert not Uniform(**ALWAYS).needs_num_steps
    assert not Uniform(keep=1.0).needs_num_steps


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start": 0.9, "end": 0.5}, "start must be below end, got start 0.9 and end 0.5"),
        ({"keep": 0.0}, "greater than 0"),
        ({"scale_factor": 1.5}, "less than or equal to 1"),
        ({"interrupt": -1}, "greater than or equal to 0"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, text) -> None:
    with pytest.raises(ValidationError, match=text):
        SelectiveBackprop.model_validate_json(json.dumps(options))


class _Half(Nothing, ExampleSelector):
    """Keeps the contract: the first half. Each policy below breaks one promise."""

    @property
    def budget(self) -> float:
        return 0.5

    def needs_loss(self, step: Step) -> bool:
        return False

    def index(self, examples: Examples, step: Step) -> Tensor:
        return torch.arange(max(1, examples.number // 2))

    def choose(self, examples: Examples, step: Step) -> Tensor | None:
        return self.index(examples, step)


class _Nobody(_Half):
    def index(self, examples: Examples, step: Step) -> Tensor:
        return torch.arange(0)


class _OutOfRange(_Half):
    def index(self, examples: Examples, step: Step) -> Tensor:
        return torch.tensor([examples.number])


class _NotInOrder(_Half):
    def index(self, examples: Examples, step: Step) -> Tensor:
        return super().index(examples, step).flip(0)


class _TooMany(_Half):
    def index(self, examples: Examples, step: Step) -> Tensor:
        return torch.arange(examples.number)


class _UsesGlobalGenerator(_Half):
    def index(self, examples: Examples, step: Step) -> Tensor:
        return torch.randint(examples.number, (1,))


class _SameAtEveryStep(_Half):
    def index(self, examples: Examples, step: Step) -> Tensor:
        generator = torch.Generator().manual_seed(step.draw + step.seed * 7 + step.rank * 77 + step.micro_batch * 777)
        return torch.randperm(examples.number, generator=generator)[: max(1, examples.number // 2)].sort().values


class _SaysExact(_Half):
    @property
    def exact(self) -> bool:
        return True


class _SaysUnbiased(_Half):
    @property
    def unbiased(self) -> bool:
        return True


class _NeedsWhatItDoesNotSay(_Half):
    def index(self, examples: Examples, step: Step) -> Tensor:
        assert examples.loss_B is not None, "no losses"
        return super().index(examples, step)


class _ChangesLosses(_Half):
    def needs_loss(self, step: Step) -> bool:
        return True

    def index(self, examples: Examples, step: Step) -> Tensor:
        assert examples.loss_B is not None
        examples.loss_B.zero_()
        return super().index(examples, step)


def test_half_keeps_the_contract() -> None:
    check_policy(_Half)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (_Nobody, "at least one"),
        (_OutOfRange, r"must choose numbers in \[0, "),
        (_NotInOrder, "ascending"),
        (_TooMany, "its budget 0.5 allows"),
        (_UsesGlobalGenerator, "global random generator"),
        (_SameAtEveryStep, "draws the same for every index"),
        (_SaysExact, "declares exact"),
        (_SaysUnbiased, "is biased"),
        (_NeedsWhatItDoesNotSay, "no losses"),
        (_ChangesLosses, "changes what it receives"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_broken_promise_is_caught(policy, text) -> None:
    with pytest.raises(AssertionError, match=text):
        check_policy(policy)
