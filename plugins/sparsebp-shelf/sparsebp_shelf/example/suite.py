"""Check that an example selector keeps its contract; each violation raises an ``AssertionError`` of one sentence.

Shape letters: B examples, K kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sparsebp_cli.policy import Observed, ReferenceReader, Step
from sparsebp_cli.testing import (
    check_draws,
    check_repeatable,
    check_state,
    enough,
    find_share,
    first_state,
    name_of,
    require,
)
from sparsebp_shelf.example.examples import Examples, ReadExamples
from sparsebp_shelf.example.kind import ExampleSelector, WeightedExamples

_NUM_STEPS = 24
_NUM_DRAWS = 1000
_MOST = 16  # most examples in a batch


def check_example_selector(policy: ExampleSelector) -> None:
    """Check an example selector against every promise of the contract."""
    check_state(policy, (), _show)
    _check_choice(policy)
    _check_budget(policy)
    _check_repeatable(policy)
    _check_draws(policy)
    _check_exact(policy)
    _check_mean_weight(policy)


def _show(seed: int) -> list[Observed]:
    """Return what an example selector observes in a step, with random values."""
    generator = torch.Generator().manual_seed(seed)
    loss_B, norm_B = (torch.rand(6, generator=generator) for _ in range(2))
    return [ReadExamples("0", Examples(6, loss_B, norm_B))]


def _check_choice(policy: ExampleSelector) -> None:
    name = name_of(policy)
    require(0.0 < policy.scored_share <= 1.0, f"{name}: scored_share must be in (0, 1], got {policy.scored_share}")
    for examples, step in _cases(policy):
        choice = policy.choose(examples, step)
        if choice is None:
            continue
        index_K = _index(choice)
        _check_weights(policy, choice)
        good = index_K.dtype == torch.int64 and index_K.ndim == 1 and index_K.numel() > 0
        require(good, f"{name}: chosen examples must be one dimension of int64, at least one")
        numbers = index_K.tolist()
        good = numbers == sorted(set(numbers)) and numbers[0] >= 0 and numbers[-1] < examples.number
        require(good, f"{name}: must choose numbers in [0, {examples.number}), ascending, each once, got {numbers}")


def _check_weights(policy: ExampleSelector, choice: Tensor | WeightedExamples) -> None:
    if isinstance(choice, Tensor):
        return
    require(policy.weighs, f"{name_of(policy)}: returns weights, but weighs is False")
    weight_K = choice.weight_K
    good = weight_K.is_floating_point() and weight_K.shape == choice.index_K.shape
    require(good, f"{name_of(policy)}: must return one weight for each example, of a floating-point dtype")
    good = bool(weight_K.isfinite().all()) and bool((weight_K >= 0).all())
    require(good, f"{name_of(policy)}: weights must be finite and at least 0, got {weight_K.tolist()}")


def _check_budget(policy: ExampleSelector) -> None:
    name, budget = name_of(policy), policy.budget
    require(0.0 < budget <= 1.0, f"{name}: budget must be in (0, 1], got {budget}")
    for examples, step in _cases(policy):
        choice = policy.choose(examples, step)
        most = max(1, math.ceil(budget * examples.number - 1e-9))
        kept = examples.number if choice is None else _index(choice).numel()
        good = choice is None or kept <= most
        require(good, f"{name}: chooses {kept} of {examples.number} examples, but its budget {budget} allows {most}")


def _check_repeatable(policy: ExampleSelector) -> None:
    for examples, step in _cases(policy):
        check_repeatable(policy, _choose, examples, step)


def _check_draws(policy: ExampleSelector) -> None:
    asked = [(partial(policy.choose, examples), step) for examples, step in _cases(policy)]
    if not check_draws(policy, asked, ("micro_batch", "seed", "rank")):
        return
    for number in {examples.number for examples, _ in _cases(policy) if examples.number > 2}:
        first = next((s for e, s in _cases(policy) if e.number == number and policy.choose(e, s) is not None), None)
        if first is None or policy.budget * number < 1:
            continue  # too few examples: draws seldom differ
        share = find_share(_differing(policy, number, first, [replace(first, draw=draw) for draw in range(1, 4097)]))
        if share is None:
            continue
        num_steps = first.index + 1 + max(_NUM_STEPS, enough(share))
        later = [_step(policy, index, num_steps) for index in range(first.index + 1, num_steps)]
        text = f"{name_of(policy)}: is random but draws the same for every index of the step"
        require(any(_differing(policy, number, first, later)), text)


def _differing(policy: ExampleSelector, number: int, first: Step, others: Sequence[Step]) -> Iterator[bool]:
    """Yield for each other step whether it chooses different examples than the first; choosing all is no choice."""
    expected = policy.choose(_examples(policy, number, first), first)
    assert expected is not None
    for step in others:
        choice = policy.choose(_examples(policy, number, step), step)
        yield choice is not None and not torch.equal(_index(choice), _index(expected))


def _check_exact(policy: ExampleSelector) -> None:
    good = policy.exact or policy.weighs or not policy.unbiased
    require(good, f"{name_of(policy)}: declares unbiased, but a mean over targets of chosen examples is biased")
    for examples, step in _cases(policy):
        dense = not policy.exact or policy.choose(examples, step) is None
        require(dense, f"{name_of(policy)}: declares exact, but chooses examples at step {step.index}")


def _check_mean_weight(policy: ExampleSelector) -> None:
    """Check that an unbiased policy gives each example the mean weight 1 over draws; left-out examples weigh 0."""
    if policy.exact or not policy.unbiased:
        return
    name = name_of(policy)
    for examples, step in _cases(policy):
        if examples.number not in (1, 7) or step.index not in (0, _NUM_STEPS // 2):
            continue
        total_B, square_B = torch.zeros(examples.number).double(), torch.zeros(examples.number).double()
        for draw in range(1, _NUM_DRAWS + 1):
            choice, weight_B = policy.choose(examples, replace(step, draw=draw)), torch.ones(examples.number).double()
            if choice is not None:
                require(isinstance(choice, WeightedExamples), f"{name}: declares unbiased, but chooses without weights")
                assert isinstance(choice, WeightedExamples)
                weight_B = torch.zeros_like(weight_B).index_copy_(0, choice.index_K, choice.weight_K.double())
            total_B += weight_B
            square_B += weight_B.square()
        mean_B = total_B / _NUM_DRAWS
        error_B = ((square_B / _NUM_DRAWS - mean_B.square()).clamp(min=0.0) / _NUM_DRAWS).sqrt()
        good = bool(((mean_B - 1.0).abs() <= 6.0 * error_B + 1e-6).all())
        require(good, f"{name}: the weights of examples must be 1 in the mean over draws, got {mean_B.tolist()}")


def _choose(policy: ExampleSelector, examples: Examples, step: Step) -> Tensor | WeightedExamples | None:
    return policy.choose(examples, step)


def _cases(policy: ExampleSelector) -> Iterator[tuple[Examples, Step]]:
    """Yield batches of several sizes at several steps, with losses only if the policy needs them."""
    for index in range(_NUM_STEPS):
        step = _step(policy, index, _NUM_STEPS)
        for number in (1, 2, 7, _MOST):
            yield _examples(policy, number, step), step


def _step(policy: ExampleSelector, index: int, num_steps: int) -> Step:
    known = num_steps if policy.needs_num_steps else None
    return Step(index, seed=1, num_steps=known, state=first_state(policy))


def _examples(policy: ExampleSelector, number: int, step: Step) -> Examples:
    """Return a batch with the scores that the policy reads, some of them equal."""
    if not policy.needs_loss(step):
        return Examples(number)
    score_B = torch.rand(number, generator=torch.Generator().manual_seed(number)).mul(8).round()
    compares = isinstance(policy, ReferenceReader) and policy.reads_reference
    norm_B = score_B + 0.5 if policy.reads_gradient_norm else None
    return Examples(number, score_B, norm_B, score_B.flip(0) / 2 if compares else None)


def _index(choice: Tensor | WeightedExamples) -> Tensor:
    return choice if isinstance(choice, Tensor) else choice.index_K
