"""``sparsebp run --until-ci``: add seeds until a margin is decided, or seeds or time run out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from sparsebp_cli.cli.answer import warn
from sparsebp_cli.cli.answer.run_record import MarginAnswer, MarginAnswers
from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.errors import UsageError
from sparsebp_cli.notify import tell
from sparsebp_cli.run import RunFolder, State, list_runs

if TYPE_CHECKING:
    from sparsebp_cli.compare.margin import NotWorse
    from sparsebp_cli.compare.sequential import Looks, Trial
    from sparsebp_cli.plan import Plan

DEFAULT_SEEDS = "0-9"

MakePlans = Callable[[str], list["Plan"]]
Execute = Callable[[Sequence["Plan"]], int]


def run_until(
    condition: str, seeds: str | None, max_minutes: float | None, make_plans: MakePlans, execute: Execute
) -> tuple[MarginAnswers, int]:
    """Run recipes with more and more seeds until ``METRIC=MARGIN`` is decided.

    ``seeds`` are the allowed seeds; None means ten. No further round starts after ``max_minutes``. ``make_plans`` makes
    the plans of all recipes from a list of seeds; ``execute`` runs plans to their end and returns the exit code. Return
    the answers, and 0 if every group is decided or seeds or time are used up, else the exit code of the run that did
    not finish. Raise ``UsageError`` for too few seeds, no recipe besides the baseline, or a metric without a better
    direction.
    """
    from sparsebp_cli.compare import parse_margin
    from sparsebp_cli.compare.sequential import Looks, Trial
    from sparsebp_cli.recipe import parse_seeds

    pool, (metric, margin), began = (
        parse_seeds(seeds or DEFAULT_SEEDS),
        parse_margin(condition, "--until-ci"),
        time.monotonic(),
    )
    metric = metric or "eval/loss"
    first = make_plans(str(pool[0]))
    way = _find_way(metric, first)
    baseline, *groups = _baseline_first(first)
    if not groups:
        raise UsageError("--until-ci needs two recipes or more: the baseline's, and those to compare with it")
    trial = Trial(groups, len(pool), margin, worse_is_up=way == "lower")
    made: tuple[int, ...] = ()
    chosen: list[RunFolder] = []
    names = {plan.group: plan.recipe.name for plan in first}
    stopped, code = "seeds", 0
    for count in trial.looks:
        plans = [plan for seed in pool[:count] for plan in make_plans(str(seed))]
        wanted = [plan for plan in plans if plan.group in {baseline, *trial.open}]
        there = _finished()
        missing = [plan for plan in wanted if (plan.group, plan.recipe.training.seed) not in there]
        if missing and (code := execute(missing)):
            stopped = "failed"
            break
        runs = _finished()
        chosen = [runs[key] for plan in plans if (key := (plan.group, plan.recipe.training.seed)) in runs]
        made = (*made, count)
        looks = Looks(metric, margin, baseline, tuple(groups), tuple(pool), made)
        trial.answers = _compare_at(looks, chosen)
        if not trial.open:
            stopped = "decided"
            break
        if max_minutes is not None and time.monotonic() - began > 60.0 * max_minutes:
            print_line(f"--max-minutes {max_minutes:g} is reached; undecided groups: {len(trial.open)}", stderr=True)
            stopped = "minutes"
            break
    if not code:
        _send_looks(chosen)
    answer = _make_answers(trial, names, metric, stopped, [run.run_id for run in chosen])
    if trial.open and not code:
        tell("budget-spent", asdict(answer))
    return answer, code


def _find_way(metric: str, plans: Sequence[Plan]) -> str:
    """Return the better direction of a metric, which a recipe may declare. Raise UsageError if it is unknown."""
    from sparsebp_cli.compare.question import better
    from sparsebp_cli.recipe.evaluation import declare_generated

    declared = {way.better for plan in plans if (way := declare_generated(plan.recipe).get(metric)) is not None}
    found = declared.pop() if len(declared) == 1 else better(metric)
    if not found:
        raise UsageError(f"--until-ci: cannot tell from the name {metric} if higher is better; name another metric")
    return found


def _baseline_first(plans: Sequence[Plan]) -> list[str]:
    """Return the groups of the plans with the baseline in front. As in ``sparsebp compare``, it is the first dense
    group, else the first whose policies are all exact, else the first."""
    from sparsebp_cli.policy import make_policy

    dense, exact = list[str](), list[str]()
    for plan in plans:
        phases = [plan.recipe.policy, *(phase.policy for phase in plan.recipe.schedule or ())]
        entries = [entry for phase in phases for entry in phase]
        if all(entry.name == "dense" for entry in entries):
            dense.append(plan.group)
        elif all(make_policy(entry.name, **entry.options).exact for entry in entries):
            exact.append(plan.group)
    return list(dict.fromkeys([*dense[:1], *exact[:1], *(plan.group for plan in plans)]))


def _finished() -> dict[tuple[str, int], RunFolder]:
    """Map group and seed to the first finished run, which counts and is not repeated."""
    from sparsebp_cli.errors import RunNotFoundError
    from sparsebp_cli.plan import Plan

    found = {}
    for run in list_runs():  # newest first
        try:
            plan = Plan.load(run.plan_file)
        except RunNotFoundError:
            continue
        if run.state() is State.FINISHED:
            found[plan.group, plan.recipe.training.seed] = run
    return found


def _compare_at(looks: Looks, runs: Sequence[RunFolder]) -> dict[str, NotWorse | None]:
    """Save the looks into the runs and compare them. ``sparsebp compare`` reads them and answers the same."""
    from sparsebp_cli.compare import compare_runs

    for run in runs:
        looks.save(run.path)
    found = compare_runs(runs, baseline=looks.baseline, metric=looks.metric, margin=looks.margin)
    answers = {group.group: group.quality.not_worse for group in found.groups}
    return {group: answers.get(group) for group in looks.groups}


def _send_looks(runs: Sequence[RunFolder]) -> None:
    """Send the looks to the stores that have the runs, so that a comparison there gives the same answer."""
    from sparsebp_cli.tracking import sync
    from sparsebp_cli.tracking.flush import FILE

    for run in runs:
        if (run.path / FILE).exists() and (advice := sync(run).advice(run.run_id)):
            warn(f"{run.run_id}: {advice}")


def _make_answers(trial: Trial, names: dict[str, str], metric: str, stopped: str, runs: Sequence[str]) -> MarginAnswers:
    answers = [
        MarginAnswer(
            name=names[group],
            group=group,
            answer="inconclusive" if found is None else found.answer,
            more_seeds=None if found is None else found.more_seeds,
        )
        for group, found in trial.answers.items()
    ]
    names_in_order = " ".join(dict.fromkeys(names.values()))
    return MarginAnswers(
        metric=metric,
        margin=trial.margin,
        looks=list(trial.looks),
        level=trial.level,
        stopped=stopped,
        answers=answers,
        runs=list(runs),
        next=[f"sparsebp compare {names_in_order} --margin {metric}={trial.margin:g}"],
    )


def print_answers(found: MarginAnswers) -> None:
    """Print the answer of each recipe and its basis; nothing if a run did not finish, which is reported elsewhere."""
    if found.stopped == "failed":
        return
    for one in found.answers:
        more = f"; about {one.more_seeds} seeds more would decide" if one.more_seeds else ""
        print_line(f"{one.name}: {found.metric} not worse by more than {found.margin:g}: {one.answer}{more}")
    shown = ", ".join(map(str, found.looks))
    print_line(
        f"looks after {shown} seeds, each at a level of {found.level:.2g}: any wrong answer has a chance of 5% at most"
    )
    for command in found.next:
        print_line(f"next: {command}")
