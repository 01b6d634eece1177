"""What a comparison claims: one family, one spread, margins, rounding, and runs that broke down."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.compare import Comparison, Group, Question, check, compare_runs, write_report
from sparsebp_cli.compare.family import correct_family, standard_error
from sparsebp_cli.compare.margin import decide_all
from sparsebp_cli.compare.statistics import Difference, holm, paired_difference
from sparsebp_cli.run import RunFolder

MakeRun = Callable[..., RunFolder]
NAN = float("nan")


def policy(number: int) -> list[dict[str, object]]:
    return [{"name": "topk", "keep": 0.01 * (number + 1), "along": "rows"}]


def groups(make_run: MakeRun, effects: list[float], num_seeds: int, noise: float = 0.01) -> list[RunFolder]:
    """Dense, and one policy an effect; every run has noise of its own."""
    draw = random.Random(7)
    runs = [make_run("dense", seed, loss=3.0 + draw.gauss(0, noise)) for seed in range(num_seeds)]
    for k, effect in enumerate(effects):
        some = {"policy": policy(k), "exact": False}
        for seed in range(num_seeds):
            loss, seconds = 3.0 + effect + draw.gauss(0, noise), 0.2 + draw.gauss(0, 0.01)
            runs.append(make_run(f"p{k}", seed, loss=loss, seconds=seconds, **some))
    return runs


def of(found: Comparison, label: str) -> Group:
    return next(group for group in found.groups if group.label == label)


def random_pairs(draw: random.Random, effect: float, seeds: int, baseline: dict[int, float]) -> Difference:
    found = paired_difference({s: effect + draw.gauss(0, 1) for s in range(seeds)}, baseline)
    assert found is not None
    return found


# One family, one spread


def test_quality_step_time_and_memory_are_one_family_and_counted(make_run: MakeRun) -> None:
    found = compare_runs(groups(make_run, [0.0, 0.1], 3))
    assert (found.families[0].name, found.families[0].statements) == ("quality, step time and memory", 4)
    p = [d.p for g in found.groups[1:] for d in (g.quality.difference, g.speed.step_ratio) if d]
    assert [d.p_holm is not None for g in found.groups[1:] for d in [g.quality.difference] if d] == [True, True]
    assert len(p) == 4


def test_ten_groups_of_three_seeds_find_an_effect_of_three_deviations() -> None:
    found = {"own": 0, "shared": 0}
    for study in range(200):
        draw = random.Random(study)
        baseline = {seed: draw.gauss(0, 1) for seed in range(3)}
        some = [random_pairs(draw, 3 * 2**0.5 * (k == 0), 3, baseline) for k in range(10)]
        first = correct_family([some], ratios=[False])[0][0]
        assert first is not None
        found["shared"] += (first.p_holm or 1.0) < 0.05
        found["own"] += (holm([d.p for d in some])[0] or 1.0) < 0.05
    assert found["own"] < 60
    assert found["shared"] > 90


def test_a_group_that_varies_more_than_the_others_keeps_its_own_spread() -> None:
    draw = random.Random(3)
    baseline = dict.fromkeys(range(6), 0.0)
    some = [random_pairs(draw, 0.0, 6, baseline) for _ in range(4)]
    wild = paired_difference({s: 50 * draw.gauss(0, 1) for s in range(6)}, baseline)
    assert wild is not None
    found = standard_error(correct_family([[*some, wild]], ratios=[False])[0][4] or wild)
    assert found is not None
    assert found[0] == pytest.approx((wild.sd or 0) / 6**0.5)


def test_one_statement_alone_is_not_corrected() -> None:
    alone = random_pairs(random.Random(0), 1.0, 5, dict.fromkeys(range(5), 0.0))
    assert correct_family([[None, alone]], ratios=[False]) == [[None, alone]]


def test_simultaneous_intervals_leave_zero_out_exactly_where_a_difference_is_shown() -> None:
    for study in range(100):
        draw = random.Random(study)
        baseline = {seed: draw.gauss(0, 1) for seed in range(5)}
        some = [random_pairs(draw, k, 5, baseline) for k in range(4)]
        for d in correct_family([some], ratios=[False])[0]:
            assert d is not None
            assert d.family_low is not None
            assert d.family_high is not None
            assert ((d.p_holm or 1.0) >= 0.05) == (d.family_low < 0.0 < d.family_high)


def test_the_forest_plot_shows_simultaneous_intervals_and_every_pair(make_run: MakeRun, tmp_path: Path) -> None:
    found = compare_runs(groups(make_run, [0.0, 0.1], 3))
    text = write_report(found, tmp_path / "report.html", "x").read_text()
    assert "The 4 intervals are simultaneous: the chance that any of them misses the truth is at most 5%." in text
    assert "[low, high] = d.family_low === null" in text
    assert '"pairs"' in text
    difference = found.groups[1].quality.difference
    assert difference is not None
    assert len(difference.pairs) == 3
    assert difference.shown == (difference.family_low, difference.family_high)


# Margins


def test_equal_within_the_margin_stands_beside_not_worse(make_run: MakeRun) -> None:
    found = compare_runs(groups(make_run, [0.001, -0.5, 0.5], 6, noise=0.002), Question(margin=0.05))
    answers = {g.label: (g.quality.not_worse.answer, g.quality.not_worse.equivalent) for g in found.groups[1:]}  # type: ignore[union-attr]
    assert answers == {"p0": ("yes", "yes"), "p1": ("yes", "no"), "p2": ("no", "no")}
    assert "eval/loss is equal within the margin of 0.05" in of(found, "p0").verdict
    assert "is better by 0.499" in of(found, "p1").verdict
    assert check(found, "p0:margin.equivalent != yes") == []
    assert len(check(found, "margin.equivalent != yes")) == 2


def test_a_difference_that_is_shown_but_not_beyond_the_margin_says_so(make_run: MakeRun) -> None:
    found = compare_runs(groups(make_run, [0.05], 8, noise=0.01), Question(margin=0.05))
    assert "not shown to be more than the margin of 0.05" in of(found, "p0").verdict


def test_an_answer_of_one_look_names_what_holds_at_any_look(make_run: MakeRun) -> None:
    group = of(compare_runs(groups(make_run, [0.0], 3, noise=0.0005), Question(margin=0.05)), "p0")
    assert group.quality.not_worse is not None
    assert (group.quality.not_worse.answer, group.quality.not_worse.anytime) == ("yes", "inconclusive")
    assert "yes (if this is your only look; after earlier looks: inconclusive)" in group.verdict


@pytest.mark.slow
def test_looking_after_every_seed_errs_too_often_but_not_at_any_look() -> None:
    wrong = {"answer": 0, "anytime": 0}
    for study in range(150):
        draw = random.Random(study)
        values: dict[int, float] = {}
        said = {"answer": False, "anytime": False}
        for seed in range(25):
            values[seed] = draw.gauss(0.5, 1.0)  # on the margin: any answer is wrong
            difference = paired_difference(values, dict.fromkeys(values, 0.0))
            decision = decide_all([difference], 0.5, worse_is_up=True)[0]
            for kind in said:
                said[kind] |= getattr(decision, kind) != "inconclusive"
        for kind, ever in said.items():
            wrong[kind] += ever
    assert wrong["answer"] > 22  # 15%
    assert wrong["anytime"] <= 10


# Runs that broke down


def test_the_gate_does_not_open_where_runs_diverged(make_run: MakeRun) -> None:
    runs = [make_run("dense", seed, loss=3.0 + 0.01 * seed) for seed in range(8)]
    losses = [2.9, 2.91, 2.92, NAN, NAN, NAN, NAN, NAN]
    runs += [make_run("p", s, loss=x + 0.001 * (s % 2), policy=policy(0), exact=False) for s, x in enumerate(losses)]
    found = compare_runs(runs, Question(margin=0.01))
    assert len(check(found, "margin.answer != yes")) == 1
    assert "no (5 runs diverged, which counts as worse than any margin)" in of(found, "p").verdict
    quality = of(found, "p").find("quality")
    assert quality is not None
    assert quality.outcome == "no statement"  # better, of the seeds that are left because they did not diverge
    assert of(found, "p").verdict.startswith("for the seeds whose runs did not diverge, eval/loss differs by -0.0997")


def test_a_run_that_ended_because_its_loss_was_no_number_diverged(make_run: MakeRun) -> None:
    runs = groups(make_run, [-0.5], 3)
    text = "the loss is nan at step 7; nothing was updated"
    runs.append(make_run("p0", 9, policy=policy(0), exact=False, end="failed", steps=7, text=text))
    group = of(compare_runs(runs, Question(margin=0.01)), "p0")
    assert group.quality.not_worse is not None
    assert group.quality.not_worse.answer == "no"


def test_a_run_that_did_not_finish_withholds_a_yes_until_its_seed_is_run(make_run: MakeRun) -> None:
    runs = groups(make_run, [-0.5], 5)
    runs += [make_run("dense", 9), make_run("p0", 9, policy=policy(0), exact=False, end="failed", text="no room")]
    group = of(compare_runs(runs, Question(margin=0.01)), "p0")
    assert "inconclusive (1 run gave no result)" in group.verdict
    runs.append(make_run("p0", 9, policy=policy(0), exact=False, loss=2.5))
    group = of(compare_runs(runs, Question(margin=0.01)), "p0")
    assert "margin of 0.01: yes" in group.verdict


def test_where_the_baseline_diverged_too_nothing_is_known_of_that_seed(make_run: MakeRun) -> None:
    runs = groups(make_run, [-0.5], 5)
    runs += [make_run("dense", 9, loss=NAN), make_run("p0", 9, loss=NAN, policy=policy(0), exact=False)]
    group = of(compare_runs(runs, Question(margin=0.01)), "p0")
    assert "inconclusive (1 run gave no result)" in group.verdict


def test_repeating_a_seed_until_it_is_good_changes_nothing(make_run: MakeRun) -> None:
    runs = [make_run("dense", seed, loss=3.0 + 0.01 * seed) for seed in range(4)]
    for extra in (0.1, 0.1, -0.05):
        runs += [make_run("p", s, loss=3.0 + 0.011 * s + extra, policy=policy(0), exact=False) for s in range(4)]
    found = compare_runs(runs)
    assert "is worse by 0.10" in of(found, "p").verdict
    assert sum(": 3 runs have seed" in warning for warning in found.warnings) == 4


def test_a_seed_that_diverged_first_is_not_made_good_by_running_it_again(make_run: MakeRun) -> None:
    runs = groups(make_run, [-0.5], 4)
    text = "the gradient norm is inf at step 7, first in a; nothing was updated"
    runs += [make_run("p0", 9, policy=policy(0), exact=False, end="failed", steps=7, text=text), make_run("dense", 9)]
    runs.append(make_run("p0", 9, policy=policy(0), exact=False, loss=2.0))
    group = of(compare_runs(runs, Question(margin=0.01)), "p0")
    assert group.seeds == (0, 1, 2, 3)
    assert "1 run diverged" in group.verdict


def test_a_baseline_chosen_instead_of_the_usual_one_is_named(make_run: MakeRun) -> None:
    runs = groups(make_run, [0.0, 0.1], 3)
    assert not any("default baseline is" in line for line in compare_runs(runs, baseline="dense").warnings)
    found = compare_runs(runs, baseline="p1")
    assert found.warnings[0].startswith("--baseline sets p1; the default baseline is dense")


# Exact policies


EXACT = [{"name": "tokens", "mode": "exact", "score": "mask"}]


def test_an_exact_policy_differs_by_rounding_and_is_never_better(make_run: MakeRun) -> None:
    runs = [make_run("dense", s, loss=1.0 + 0.1 * s) for s in range(3)]
    runs += [make_run("x", s, loss=1.0 + 0.1 * s - 0.0004 - 0.00001 * s, policy=EXACT) for s in range(3)]
    text = of(compare_runs(runs), "x").verdict
    assert text.startswith("exact: what differs is rounding (-0.00041 in eval/loss); ")
    assert "better" not in text


def test_one_seed_of_an_exact_policy_that_differs_by_much_is_a_fault(make_run: MakeRun) -> None:
    def verdict(loss: float) -> str:
        return of(
            compare_runs([make_run("dense", 0, loss=1.0), make_run("x", 0, loss=loss, policy=EXACT)]), "x"
        ).verdict

    assert verdict(1.5).startswith(
        "declared exact, but +0.5 in eval/loss (one seed) is far more than rounding: an error in the policy or in "
    )
    assert verdict(1.000001).startswith("exact: what differs is rounding (+1e-06 in eval/loss); ")


def test_an_exact_policy_that_differs_by_more_than_rounding_is_a_fault(make_run: MakeRun) -> None:
    runs = [make_run("dense", s, loss=1.0 + 0.1 * s) for s in range(3)]
    runs += [make_run("x", s, loss=1.0 + 0.1 * s + 0.2 + 0.001 * s, policy=EXACT) for s in range(3)]
    assert "declared exact, but +0.2 in eval/loss" in of(compare_runs(runs), "x").verdict


def test_dense_with_other_steps_is_no_matter_of_rounding(make_run: MakeRun) -> None:
    runs = [make_run("dense", s, loss=1.0 + 0.1 * s) for s in range(3)]
    runs += [
        make_run("half", s, loss=1.3 + 0.1 * s + 0.001 * s * s, training={"max_steps": 20, "warmup_steps": 2})
        for s in range(3)
    ]
    assert "rounding" not in of(compare_runs(runs), "half").verdict
