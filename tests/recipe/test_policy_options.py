"""Options are checked by the policy's own class, built in or installed, at their place in the recipe."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import find_policies, make_policy
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.recipe.description import describe_policies
from tests.recipe.conftest import INSTALLED, SMALL

Refuse = Callable[..., str]
Read = Callable[..., Recipe]
Install = Callable[..., None]

POLICY = SMALL + "policy:\n  - name: "


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("topk\n    keep: 1.5", "7:11: policy.0.keep: must be in (0, 1], got 1.5"),
        ("topk\n    keep: 0", "7:11: policy.0.keep: must be in (0, 1], got 0"),
        ("topk\n    keep: '0.5'", "7:11: policy.0.keep: must be a number, got '0.5' (text); write it without quotes"),
        ("topk\n    keep: true", "7:11: policy.0.keep: must be a number, got true"),
        ("topk\n    keep:", "7:10: policy.0.keep: must be a number, got nothing"),
        ("topk", "6:5: policy.0.keep: missing (Fraction of the gradient to keep; 1.0 is dense)"),
        (
            "topk\n    kepe: 1",
            "7:5: policy.0.kepe: unknown key 'kepe'; allowed: where, layers, keep, along, within, block, "
            "by; did you mean keep?",
        ),
        (
            "dense\n    keep: 1",
            "7:5: policy.0.keep: unknown key 'keep'; allowed: where, layers",
        ),
        (
            "dense\n    error_feedback: true",
            "7:5: policy.0.error_feedback: unknown key 'error_feedback'; allowed: where, layers",
        ),
        (
            "topk\n    keep: 1\n    along: row",
            "8:12: policy.0.along: got 'row', allowed: 'rows', 'columns', 'blocks', 'elements', '2:4'; "
            "did you mean rows?",
        ),
        (
            "tokp\n    keep: 1",
            f"6:11: policy.0.name: unknown policy 'tokp'; installed: {INSTALLED}; did you mean topk?",
        ),
        ("3", "6:11: policy.0.name: must be text, got 3 (a number); put it in quotes"),
        (
            "dense\n  - name: topk\n    keep: 0.5",
            "7:11: policy.1.name: 'dense' (policy.0) and 'topk' make the same decision (GradientSelector)"
            " at the same place: give only one of them, or limit each to its own sites by where or layers",
        ),
    ],
)
def test_wrong_options_are_named_at_their_place(refuse: Refuse, entry: str, expected: str) -> None:
    assert refuse(POLICY + entry) == f"r.yaml:{expected}"


def test_an_entry_without_a_name_is_refused(refuse: Refuse) -> None:
    assert refuse(SMALL + "policy:\n  - keep: 1\n").startswith(
        "r.yaml:6:5: policy.0.name: missing (Name of a policy that"
    )


def test_defaults_are_filled_in_and_a_whole_number_does_for_a_share(read: Read) -> None:
    options = read(POLICY + "topk\n    keep: 1").policy[0].options
    assert (options["keep"], options["along"], options["layers"]) == (1.0, "rows", None)
    assert isinstance(options["keep"], float)


@pytest.mark.parametrize("policy", ["", "policy: []", "policy: dense", "policy: [dense]", "policy: {name: dense}"])
def test_no_policy_and_the_short_forms_are_dense(read: Read, policy: str) -> None:
    assert read(SMALL + policy) == read(SMALL + "policy: [{name: dense}]")


def test_a_forgotten_dash_is_understood(read: Read) -> None:
    assert read(SMALL + "policy:\n  name: topk\n  keep: 0.5") == read(POLICY + "topk\n    keep: 0.5")


def test_an_installed_policy_is_checked_by_its_own_class(install: Install, read: Read, refuse: Refuse) -> None:
    install("half-plugin", {"half": "Half"})
    options = read(SMALL + "policy: half").policy[0].options
    assert {key: options[key] for key in ("keep", "span", "mode")} == {"keep": 0.25, "span": [0, 4], "mode": "near"}
    start = SMALL + "policy: [{name: half, "
    assert refuse(start + "keep: 0.5}]") == "r.yaml:5:29: policy.0.keep: must be in (0, 0.5), got 0.5"
    assert refuse(start + "span: [1, x]}]") == "r.yaml:5:33: policy.0.span.1: must be a whole number, got 'x' (text)"
    assert refuse(start + "span: [1]}]").startswith("r.yaml:5:23: policy.0.span.1: missing")
    assert refuse(start + "span: [4, 1]}]") == "r.yaml:5:23: policy.0.span: span must rise"
    assert (
        refuse(start + "mode: fra}]")
        == "r.yaml:5:29: policy.0.mode: got 'fra', allowed: 'near', 'far'; did you mean far?"
    )
    assert refuse(start + "span: [13, 14]}]") == (
        "r.yaml:5:17: policy.0.name: policy 'half' of half-plugin 2.0 is broken: ZeroDivisionError: unlucky"
    )


def test_what_a_plan_carries_makes_the_same_policy(install: Install, read: Read) -> None:
    install("half-plugin", {"half": "Half"})
    entry = json.loads(read(SMALL + "policy: {name: half, span: [1, 2]}").model_dump_json())["policy"][0]
    name = entry.pop("name")
    assert make_policy(name, **entry) == make_policy("half", span=(1, 2))


def test_the_same_question_is_refused_across_plugins_and_others_go_together(
    install: Install, read: Read, refuse: Refuse
) -> None:
    install("half-plugin", {"half": "Half", "never": "Never"})
    line = refuse(SMALL + "policy: [{name: topk, keep: 1}, half]")
    assert line.startswith("r.yaml:5:33: policy.1.name: 'topk' (policy.0) and 'half' make the same decision")
    assert [entry.name for entry in read(SMALL + "policy: [uniform, half]").policy] == ["uniform", "half"]


def test_a_kind_that_the_engine_does_not_carry_out_is_refused(install: Install, refuse: Refuse) -> None:
    install("half-plugin", {"half": "Half", "never": "Never"})
    assert find_policies()["never"].kind == "Dropper"
    line = refuse(SMALL + "policy: [half, never]")
    assert line.startswith(
        "r.yaml:5:16: policy.1.name: 'never' must derive from an installed kind of policy; a package adds kinds "
    )


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("Absent", "AttributeError: module 'bad_plugin' has no attribute 'Absent'"),
        ("NOT_A_POLICY", "bad_plugin:NOT_A_POLICY is not a Policy class"),
        ("Unfinished", "bad_plugin:Unfinished does not implement: budget, exact, select, selection, unbiased"),
        ("Kindless", "derives from Policy directly: derive it from a kind, such as GradientSelector"),
        (
            "Named",
            "bad_plugin:Named has an option called name, but recipes use this key for the policy's name: rename "
            "the option",
        ),
    ],
)
def test_a_broken_plugin_is_named_with_its_problem(install: Install, refuse: Refuse, target: str, problem: str) -> None:
    install("bad-plugin", {"bad": target})
    line = refuse(SMALL + "policy: bad")
    assert line.startswith("r.yaml:5:9: policy.0.name: policy 'bad' of bad-plugin 2.0 is broken: ")
    assert line.endswith(problem)
    assert find_policies()["bad"].kind == "broken"


@pytest.mark.parametrize(
    "statement", ["raise SystemExit(3)", "raise ValueError('a\\nb')", "import no_such_thing", "1 +"]
)
def test_a_plugin_that_cannot_be_imported_harms_only_recipes_that_name_it(
    install: Install, read: Read, refuse: Refuse, statement: str
) -> None:
    install("bad-plugin", {"bad": "Bad"}, statement)
    assert read(SMALL).policy[0].name == "dense"
    assert "policy 'bad' of bad-plugin 2.0 is broken: " in refuse(SMALL + "policy: bad")
    assert find_policies()["topk"].problem == ""


def test_a_name_that_two_distributions_offer_is_broken_and_both_are_named(install: Install, refuse: Refuse) -> None:
    install("one-plugin", {"half": "Half"})
    install("two-plugin", {"half": "Half"})
    line = refuse(SMALL + "policy: half")
    assert "several packages register this name: " in line
    assert "one-plugin 2.0" in line
    assert "two-plugin 2.0" in line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": 1.5}, "policy 'topk': keep: must be in (0, 1], got 1.5"),
        ({"keep": float("nan")}, "policy 'topk': keep: must be a finite number, got nan (a number)"),
        ({"keep": 10**5000}, "policy 'topk': keep: must be a number, got a huge number"),
        ({"keep": object}, "policy 'topk': keep: must be a number, got <class 'object'>"),
        ({}, "policy 'topk': keep: missing (Fraction of the gradient to keep; 1.0 is dense)"),
    ],
)
def test_the_library_says_the_same_words(options: dict[str, object], expected: str) -> None:
    with pytest.raises(PolicyError) as caught:
        make_policy("topk", **options)
    assert str(caught.value) == expected


def test_a_policy_that_is_not_installed_is_described_without_options_that_are_gone() -> None:
    stored = {"name": "no-such", "keep_warmup_steps": 0, "error_feedback": False, "where": None, "keep": 0.1}
    assert describe_policies({"policy": [stored]}) == "no-such keep=0.1"
    assert "error_feedback=True" in describe_policies({"policy": [stored | {"error_feedback": True}]})
