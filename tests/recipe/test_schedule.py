"""The key schedule: phases of policies, checked like the recipe's own policies, and what cannot change midway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.plan import content_hash, group_content
from sparsebp_cli.recipe import Recipe, load_stored
from sparsebp_cli.recipe.description import describe_policies
from tests.recipe.conftest import INSTALLED, SMALL

Read = Callable[..., Recipe]
Refuse = Callable[..., str]

HEAD = SMALL + "training: {max_steps: 10}\n"
FIRST = "schedule:\n  - {until: 0.4, policy: [{name: topk, keep: 0.25}]}\n"
TWO = HEAD + FIRST + "  - {policy: dense}\n"


def names(recipe: Recipe) -> list[tuple[list[str], int, int]]:
    return [([entry.name for entry in phase.policies], phase.first, phase.end) for phase in recipe.phases]


def test_a_schedule_has_phases_whose_policies_are_resolved_like_the_recipes_own(read: Read) -> None:
    recipe = read(TWO)
    assert names(recipe) == [(["topk"], 0, 4), (["dense"], 4, 10)]
    assert recipe.phases[0].policies == read(HEAD + "policy: {name: topk, keep: 0.25}").policy
    assert not recipe.policy, "no reader takes the default for the whole"
    assert names(read(HEAD + "policy: topk", "policy.0.keep=0.5")) == [(["topk"], 0, 10)]


def test_a_recipe_is_written_with_policy_or_schedule_and_read_again(read: Read) -> None:
    for text, key in ((TWO, "schedule"), (HEAD, "policy")):
        recipe = read(text)
        written = recipe.model_dump(mode="json")
        assert {"policy", "schedule"} & written.keys() == {key}
        again = Plan.model_validate_json(Plan(recipe=recipe).model_dump_json()).recipe
        assert again == recipe == load_stored(written, "plan.json").recipe


def test_the_group_of_a_run_is_that_of_its_whole_schedule(read: Read) -> None:
    others = (TWO.replace("0.4", "0.5"), TWO.replace("0.25", "0.5"), TWO.replace("dense", "uniform"), HEAD)
    groups = [content_hash(group_content(read(text))) for text in (TWO, *others)]
    assert len(set(groups)) == len(groups)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("until: 0.4, policy: topk", "dense until 0.4, dense"),
        ("until: 0.4, policy: {name: topk, keep: 0.25}", "topk keep=0.25 until 0.4, dense"),
        ("until: 0.4, policy: [uniform, {name: topk, keep: 0.5}]", "uniform + topk keep=0.5 until 0.4, dense"),
    ],
)
def test_a_schedule_is_described_in_one_line(read: Read, text: str, line: str) -> None:
    text = text.replace("policy: topk", "policy: dense")
    recipe = read(HEAD + "schedule:\n  - {" + text + "}\n  - policy: dense")
    assert describe_policies(recipe.model_dump(mode="json")) == line


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0.4", "1.5", "7:13: schedule.0.until: must be in (0, 1), got 1.5"),
        ("0.4", "0", "7:13: schedule.0.until: must be in (0, 1), got 0"),
        ("0.4", "1", "7:13: schedule.0.until: must be in (0, 1), got 1"),
        (
            "until: 0.4, ",
            "",
            "7:5: schedule.0: until is missing: give the fraction of the training at which this phase ends, in (0, 1)",
        ),
        (
            "{policy: dense}",
            "{until: 0.9, policy: dense}",
            "8:13: schedule.1.until: the last phase lasts to the end of the training: leave its until out, got 0.9",
        ),
        (
            "- {policy: dense}",
            "- {until: 0.3, policy: dense}\n  - policy: dense",
            "8:13: schedule.1.until: must be above 0.4, the end of the previous phase, got 0.3",
        ),
        (
            "  - {policy: dense}\n",
            "",
            "6:1: schedule: a schedule needs at least 2 phases, got 1; for one phase, use the key policy instead",
        ),
        ("schedule:", "policy: dense\nschedule:", "7:1: schedule: give only one of policy and schedule, got both"),
        (
            "{policy: dense}",
            "{policy: dens}",
            f"8:14: schedule.1.policy.0.name: unknown policy 'dens'; installed: {INSTALLED}; did you mean dense?",
        ),
        ("0.25", "2", "7:46: schedule.0.policy.0.keep: must be in (0, 1], got 2"),
        (
            "{policy: dense}",
            "{policy: dense, util: 1}",
            "8:21: schedule.1.util: unknown key 'util'; allowed: until, policy; did you mean until?",
        ),
        ("0.4", "0.01", "7:13: schedule.0.until: 0.01 leaves phase 0 without a step, because training.max_steps is 10"),
        ("0.4", "0.99", "7:13: schedule.0.until: 0.99 leaves phase 1 without a step, because training.max_steps is 10"),
        (
            "policy: dense",
            "policy: max-child",
            "8:14: schedule.1.policy.0.name: 'max-child' decides at nodes of the autograd graph: it needs "
            "backward.sites: nodes, got "
            "linears",
        ),
        (
            "policy: dense",
            "policy: [uniform, uniform]",
            "8:24: schedule.1.policy.1.name: 'uniform' (schedule.1.policy.0) and 'uniform' make the same decision "
            "(ExampleSelector) at the same place: give one of them",
        ),
    ],
)
def test_what_is_wrong_in_a_phase_is_one_line_with_its_place(refuse: Refuse, old: str, new: str, expected: str) -> None:
    assert refuse(TWO.replace(old, new, 1)) == f"r.yaml:{expected}"


@pytest.mark.parametrize(
    ("second", "change", "expected"),
    [
        (
            "{name: frozen, freeze: [lm_head]}",
            "target.processes=2",
            "schedule.1.policy.0.name: 'frozen' in a schedule works in one process, got target.processes: 2",
        ),
        (
            "{name: tokens, score: random, keep: 0.5}",
            "training.mixed_precision=bf16",
            "schedule.1.policy.0.name: 'tokens' in a phase after the first needs training.mixed_precision: no, got "
            "bf16",
        ),
        (
            "dense",
            "target={processes: 2, sharding: fsdp2}",
            "target.sharding: a schedule of phases needs target.sharding: none, got fsdp2",
        ),
        (
            "{name: infobatch}",
            "training.seed=0",
            "schedule.1.policy.0.name: 'infobatch' chooses the examples of a whole epoch, but "
            "phases can end within one: leave out the schedule",
        ),
        (
            "{name: dropbp, keep: 0.5, sensitivity_at: 0.5}",
            "training.seed=0",
            "schedule.1.policy.0.name: 'dropbp' needs trial passes, which a "
            "schedule of phases does not support: leave the schedule out, or give another policy",
        ),
    ],
    ids=["frozen parameters under DDP", "a wrapped forward", "sharded weights", "epochs", "trial passes"],
)
def test_what_cannot_change_in_the_middle_is_refused_by_name(
    refuse: Refuse, second: str, change: str, expected: str
) -> None:
    assert refuse(HEAD + FIRST + f"  - policy: {second}\n", change).endswith(f": {expected}")


def test_two_phases_compare_with_one_reference(read: Read, refuse: Refuse) -> None:
    one = "{name: tokens, score: excess, keep: 0.5, reference: austen-llama}"
    text = HEAD + f"schedule:\n  - {{until: 0.5, policy: {one}}}\n  - policy: {one}\n"
    assert len(read(text).phases) == 2
    line = refuse(text.replace("  - policy: {name: tokens", "  - policy: {name: tokens, reference_scores: fly"))
    assert "'tokens' has a different reference than another phase" in line


def test_a_later_file_or_change_replaces_policy_by_schedule_and_the_reverse(read: Read, refuse: Refuse) -> None:
    Path("base.yaml").write_text(SMALL + "policy: uniform\n")
    over = "version: 1\nbase: base.yaml\ntraining: {max_steps: 10}\n"
    assert names(read(over + FIRST + "  - policy: dense")) == [(["topk"], 0, 4), (["dense"], 4, 10)]
    Path("base.yaml").write_text(TWO)
    assert names(read(over + "policy: uniform")) == [(["uniform"], 0, 10)]
    assert names(read(TWO, "policy=uniform")) == [(["uniform"], 0, 10)]
    assert names(read(TWO, "schedule.0.until=0.7", "schedule.1.policy=uniform")) == [
        (["topk"], 0, 7),
        (["uniform"], 7, 10),
    ]
    assert read(TWO, "schedule.0.policy.0.keep=0.3").phases[0].policies[0].options["keep"] == 0.3
    line = refuse(TWO, "policy.0.keep=0.3")
    assert line.endswith(
        "the recipe has a schedule, and each phase has its own policy; did you mean schedule.0.policy.0.keep?"
    )
