"""What ``sparsebp policies`` says of every installed policy, whatever its kind and its options."""

from __future__ import annotations

import pytest

from sparsebp_cli.backward.linear.function import kernel_share
from sparsebp_cli.cli.policies import describe_policy
from sparsebp_cli.policy import Budget, GradientSelector, InformedSelector, find_policies
from tests.plugin import find_ours, find_packaged


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
    card = policy_class.card
    assert card is not None
    policy = policy_class(**({"keep": keep} if "keep" in policy_class.model_fields else {}))
    budget = Budget.of(policy.budget)
    split = policy.split if isinstance(policy, InformedSelector) else None
    kinds = (policy.selection, policy.selection) if split is None else split
    shares = [kernel_share(kind, share) for kind, share in zip(kinds, (budget.dgrad, budget.wgrad), strict=True)]
    assert eval(card.work, {"__builtins__": {}}, policy.model_dump()) == pytest.approx((1 + sum(shares)) / 3)


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
