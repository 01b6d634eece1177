"""What the conformance suites of all kinds share: when two decisions are the same, and what is promised of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebp_cli.policy import Step, make_policy
from sparsebp_cli.testing.suite import check_draws, check_repeatable, same


@dataclass(frozen=True)
class Decision:
    index_K: Tensor
    weight_K: Tensor | None = None


ROWS = torch.tensor([0, 2])
UNEQUAL: list[tuple[Any, Any]] = [
    (ROWS, torch.tensor([0, 3])),
    (ROWS, ROWS.int()),
    (ROWS, torch.tensor([[0, 2]])),
    (torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 1.0])),
    (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 0.0])),
    (torch.tensor([True, False]), torch.tensor([True, True])),
    (Decision(ROWS), Decision(ROWS, torch.ones(2))),
    (Decision(ROWS), Decision(ROWS + 1)),
    ({"a": ROWS}, {"b": ROWS}),
    ({"a": ROWS}, {"a": ROWS + 1}),
    ([ROWS], [ROWS, ROWS]),
    (frozenset({"a"}), frozenset({"b"})),
    (1, 2),
    ((Decision, [0]), (Decision, [1])),
    (Decision, Step),
    (None, ROWS),
]


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_decisions_that_differ_are_told_apart_and_a_copy_is_the_same(one: Any, other: Any) -> None:
    assert not same(one, other)
    assert not same(other, one)
    for each in (one, other):
        copied = replace(each) if isinstance(each, Decision) else each
        copied = copied.clone() if isinstance(copied, Tensor) else copied
        assert same(each, copied)


@pytest.mark.parametrize("changes", ["state", "place"])
def test_whatever_a_policy_is_shown_is_compared_with_a_copy(changes: str) -> None:
    def ask(policy: object, shown: Decision, *, state: dict[str, Tensor]) -> int:
        (state["sum"] if changes == "state" else shown.index_K).add_(1)
        return 0

    with pytest.raises(AssertionError, match="changes what it receives"):
        check_repeatable(make_policy("dense"), ask, Decision(ROWS.clone()), state={"sum": torch.zeros(2)})


def test_a_draw_is_looked_for_at_every_place() -> None:
    def ask_of(place: int) -> Any:
        return lambda step: (place, step.draw, step.seed if place else 0)

    policy, asked = make_policy("dense"), [(ask_of(place), Step(0)) for place in (0, 1)]
    assert check_draws(policy, asked, ("seed",))
    with pytest.raises(AssertionError, match="draws the same for every index of the step"):
        check_draws(policy, asked, ("seed", "index"))
    assert not check_draws(policy, [(lambda step: step.index, Step(0))], ("seed",)), "no random policy"


def test_a_generator_of_ones_own_is_found_by_the_seed_of_the_step() -> None:
    asked = [(lambda step: (step.seed, step.index), Step(0))]
    with pytest.raises(AssertionError, match="depends on the step's seed, but draws the same for every draw"):
        check_draws(make_policy("dense"), asked, ("micro_batch",))
