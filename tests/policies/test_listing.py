"""What ``sparsebp policies`` says of every installed policy, whatever its kind and its options."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from sparsebp_cli.backward.linear.function import kernel_share
from sparsebp_cli.cli.policies import describe_policy
from sparsebp_cli.policy import (
    Budget,
    GradientSelector,
    InformedSelector,
    MethodCard,
    Rows,
    Selection,
    Site,
    Stateful,
    Step,
    find_policies,
)
from sparsebp_cli.testing import check_policy
from tests.guess import guess_required
from tests.plugin import find_ours, find_packaged
from tests.selector import Promises

NUM_STEPS, NUM_LAYERS = 240, 4  # periods of many lengths divide them


@pytest.mark.parametrize("name", find_packaged())
def test_every_installed_policy_of_this_repository_is_described(name) -> None:
    line = describe_policy(find_policies()[name])
    assert line.summary
    assert all(option.description for option in line.options)


@pytest.mark.parametrize(
    ("name", "claims"),
    [
        ("dense", [True, True]),
        ("uniform", [False, False]),
        ("topk", [False, False]),
        ("tokens", [None, None]),  # mode
        ("random", [False, None]),  # weighted
        ("wta-crs", [False, True]),
    ],
)
def test_claims_that_depend_on_words_and_switches_are_left_open(name, claims) -> None:
    line = describe_policy(find_policies()[name])
    assert [line.exact, line.unbiased] == claims


def test_options_of_the_kind_stand_apart_from_the_policys_own() -> None:
    options = describe_policy(find_policies()["tokens"]).options
    assert {option.name for option in options if option.common} == {"mode", "reference", "reference_scores"}


def test_every_policy_of_the_package_has_a_card() -> None:
    found = find_ours()
    assert len(found) > 20
    for policy in found.values():
        assert policy.policy_class is not None
        card = policy.policy_class.card
        assert card is not None, f"{policy.name} has no card: what it saves, what its paper claims, when to use it"
        assert card.use.endswith("."), policy.name


SELECTORS = [
    name
    for name, found in find_packaged().items()
    if found.policy_class and issubclass(found.policy_class, GradientSelector)
    if found.policy_class.card and found.policy_class.card.work
]


@pytest.mark.parametrize("keep", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("name", SELECTORS)
def test_the_work_of_a_card_is_that_which_the_policy_claims(name, keep) -> None:
    """The conformance suite compares the claims with what is executed."""
    policy_class = find_policies()[name].policy_class
    assert policy_class is not None
    assert issubclass(policy_class, GradientSelector)
    given = {"keep": keep} if "keep" in policy_class.model_fields else {}
    check_work(policy_class(**guess_required(policy_class) | given))


def check_work(policy: GradientSelector) -> None:
    """Compare the work that a card states with what is claimed: at any place, or on average where places differ."""
    assert policy.card is not None
    split = policy.split if isinstance(policy, InformedSelector) else None
    kinds = (policy.selection, policy.selection) if split is None else split
    works = []
    for budget in _list_budgets(policy):
        shares = zip(kinds, (budget.dgrad, budget.wgrad), strict=True)
        works.append((1 + sum(kernel_share(kind, share) for kind, share in shares)) / 3)
    said = eval(policy.card.work, {"__builtins__": {}}, policy.model_dump())
    assert said == pytest.approx(fmean(works), rel=1e-6 if len(works) == 1 else 1e-2)  # which rounds to whole rows


def _list_budgets(policy: GradientSelector) -> list[Budget]:
    """Return the budget, or those of all steps and layers of a training: its state is that of the beginning."""
    if type(policy).budget_at is GradientSelector.budget_at:
        return [Budget.of(policy.budget)]
    sites = [Site(f"layers.{layer}.up_proj", 64, (8, 64), layer) for layer in range(NUM_LAYERS)]
    state = policy.init(sites) if isinstance(policy, Stateful) else {}
    steps = [Step(index, seed=3, num_steps=NUM_STEPS, state=state) for index in range(NUM_STEPS)]
    return [Budget.of(policy.budget_at(site, step)) for site in sites for step in steps]


class _Sometimes(Promises):
    """Keeps a quarter of the rows, at every third step all of them."""

    card = MethodCard(use="In a test.", work="(1 + 2 * (1 + 2 * 0.25) / 3) / 3")
    selection = property(lambda _: Rows)
    budget = property(lambda _: 1.0)

    def budget_at(self, site: Site, step: Step) -> float:
        return 0.25 if step.index % 3 else 1.0

    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        return Rows(torch.arange(len(grad_NO) // 4)) if step.index % 3 else None


class _AsIfAlways(_Sometimes):
    card = MethodCard(use="In a test.", work="1.0")


def test_the_work_of_a_budget_that_differs_by_step_is_the_mean() -> None:
    check_work(_Sometimes())
    check_policy(_Sometimes)
    with pytest.raises(AssertionError):
        check_work(_AsIfAlways())


def test_a_work_formula_reads_options_and_the_named_shares_alone() -> None:
    shares = {"N": 512, "D": 64, "O": 128, "trained": 0.5, "carried": 0.5, "computed": 0.5}
    for policy in find_packaged().values():
        assert policy.policy_class is not None
        card = policy.policy_class.card
        if card is None or not card.work:
            continue
        fields = policy.policy_class.model_fields
        options = {name: field.default for name, field in fields.items()} | ({"keep": 0.25} if "keep" in fields else {})
        assert 0 < eval(card.work, {"__builtins__": {}}, options | shares) < 4, policy.name
