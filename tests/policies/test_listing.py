"""What ``sparsebp policies`` says of every installed policy, whatever its kind and its options."""

from __future__ import annotations

import pytest

from sparsebp_cli.cli.policies import describe_policy
from sparsebp_cli.policy import find_policies


@pytest.mark.parametrize("name", find_policies())
def test_every_installed_policy_is_described(name) -> None:
    line = describe_policy(find_policies()[name])
    assert line["summary"]
    assert all(option["description"] for option in line["options"])


def test_claims_that_depend_on_options_without_a_default_are_left_open() -> None:
    assert [describe_policy(find_policies()["tokens"])[claim] for claim in ("exact", "unbiased")] == [None, None]
    assert [describe_policy(find_policies()["uniform"])[claim] for claim in ("exact", "unbiased")] == [False, False]
    assert describe_policy(find_policies()["dense"])["exact"] is True


def test_options_of_the_kind_stand_apart_from_the_policys_own() -> None:
    options = describe_policy(find_policies()["tokens"])["options"]
    assert {option["name"] for option in options if option["common"]} == {"mode", "reference", "reference_scores"}
