"""Builds a comparison from runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparsebp_cli.compare.comparison import Comparison, Control, Group, RunLine
from sparsebp_cli.compare.confound import find_changes, find_confounds, find_hardware, find_sources, find_warnings
from sparsebp_cli.compare.control import EQUAL_COST, ControlSearch, find_controls
from sparsebp_cli.compare.equal import compare_at_equal, find_unequal
from sparsebp_cli.compare.example import compare_examples, correct_examples, have_other_examples
from sparsebp_cli.compare.family import CLAIMS, Family, correct_family, count_statements
from sparsebp_cli.compare.figure import (
    by_seed,
    find_busy,
    find_curve,
    measure_cost,
    measure_layers,
    measure_speed,
    median_time,
    thin,
)
from sparsebp_cli.compare.load import load
from sparsebp_cli.compare.loaded import POLICY_KEYS, LoadedRun
from sparsebp_cli.compare.margin import NotWorse, decide_all, withhold
from sparsebp_cli.compare.measured import Quality, Reach
from sparsebp_cli.compare.question import (
    Members,
    Question,
    check_logged,
    choose_metric,
    choose_way,
    find_baseline,
    find_course,
    label_groups,
)
from sparsebp_cli.compare.reach import Goal, find_common_steps, measure_reach
from sparsebp_cli.compare.statistics import Difference, correct_all, paired_difference, spread
from sparsebp_cli.compare.verdict import Doubts, describe_lost, give_verdict
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run import metric as names

DIVERGED = "diverged"
# Keys that do not change a result; those of policies are seen elsewhere.
NO_CHANGE = ("name", *POLICY_KEYS, "tracking.", "target.", "checkpoint.", "measure.")
BROKEN = 1e150  # its square overflows, so a run that reached it counts as diverged
MOST_POINTS_IN_ALL = 40_000  # points of one metric over all runs that a page can hold


def compare_runs(
    runs: Iterable[RunFolder | LoadedRun],
    question: Question | None = None,
    *,
    baseline: str | None = None,
    metric: str | None = None,
    margin: float | None = None,
) -> Comparison:
    """Compare runs: those that differ only in seed form a group, and each group is compared with the baseline. Groups
    are shown in the order of the runs. ``baseline``, ``metric`` and ``margin`` replace the fields of :class:`Question`
    with these names. Raises ``UsageError`` if there are no runs, or none has the baseline or the metric."""
    question = question or Question(baseline, metric, margin)
    loaded = load(runs, question.grouping)
    if not loaded:
        raise UsageError("there are no runs to compare")
    members: dict[str, list[LoadedRun]] = {}
    for run in loaded:
        members.setdefault(run.group, []).append(run)
    first = find_baseline(members, question.baseline, label_groups(members))
    usual = find_baseline(members, None, {})
    return _Builder(loaded, {first: members[first]} | members, first, usual, question).build()


class _Builder:
    """The state that the parts of a comparison share."""

    def __init__(self, loaded: list[LoadedRun], members: Members, first: str, usual: str, question: Question) -> None:
        self.loaded, self.members, self.first, self.question = loaded, members, first, question
        self.usual = usual
        self.metric = choose_metric(loaded, question)
        for name in question.curves:
            if name not in names.METRICS:  # a metric of SparseBP that these runs lack gives an empty curve instead
                check_logged(loaded, name, "--curves")
        self.way = choose_way(question, self.metric)
        self.labels = label_groups(members)
        self.values = {run.run_id: self._reduce(run) for run in loaded}
        self.reasons = {run.run_id: self._exclusion_reason(run) for run in loaded}
        self.counted = {g: [run for run in some if not self.reasons[run.run_id]] for g, some in members.items()}
        self.course = find_course(self.metric)

    def build(self) -> Comparison:
        groups = [self._measure(group) for group in self.members]
        groups = self._correct(groups)
        controls = self._find_controls()
        groups = [self._compare_at_equal(group, groups[0], controls) for group in groups]
        groups = [self._add_verdict(group, groups[0], controls) for group in groups]
        return Comparison(
            schema=3,
            metric=self.metric,
            unit=names.METRICS[self.metric].unit if self.metric in names.METRICS else "",
            better=self.way,
            reducer=self.question.reducer.name,
            margin=self.question.margin,
            target=self.question.target,
            baseline=self.first,
            groups=tuple(groups),
            runs=tuple(self._describe(run) for some in self.members.values() for run in some),
            controls=controls,
            confounds=find_confounds({self.labels[group]: some for group, some in self.counted.items()}),
            families=self._count(groups, controls),
            warnings=(
                *self._other_examples(),
                *self._mixed(),
                *self._baseline_warnings(),
                *self._repeat_warnings(),
                *find_warnings(self.loaded, groups, self.metric),
            ),
        )

    def _reduce(self, run: LoadedRun, steps: set[int] | None = None) -> float | None:
        values = run.evaluations(self.metric)
        if steps is not None and values:
            values = [value for step, value in run.series(self.metric).items() if step in steps]
        return self.question.reducer.reduce(values, higher_is_better=self.way == "higher")

    def _exclusion_reason(self, run: LoadedRun) -> str:
        """Why a run is not in its group's numbers; empty when it is."""
        if run.missing_steps:
            return f"half sent: the store has {run.steps} of {run.steps_planned} steps; `sparsebp sync` sends the rest"
        if not run.finished:
            if run.broke_down and not run.repeats:
                return f"{DIVERGED}: {run.broke_down.splitlines()[0]}"
            text = str(run.history.ends[-1].get("text", "")) if run.history.ends and run.state.over else ""
            return f"{run.state}: {text.splitlines()[0]}" if text.strip() else str(run.state)
        value = self.values[run.run_id]
        if value is not None and not abs(value) < BROKEN:
            where = (
                "after the last step" if self.question.reducer.kind == "final" else f"({self.question.reducer.name})"
            )
            return f"{DIVERGED}: {self.metric} is {value} {where}"
        return f"repeats seed {run.seed}, of which the first run counts: {run.repeats}" if run.repeats else ""

    def _difference(self, group: str, other: str) -> Difference | None:
        if have_other_examples(self.counted[group], self.counted[other]):
            return None  # means over different examples: their difference is not one of the models
        common = self._common_steps(group, other)

        def value(run: LoadedRun) -> float | None:
            return self.values[run.run_id] if common is None else self._reduce(run, common)

        here, there = (by_seed(self.counted[g], value) for g in (group, other))
        return paired_difference(here, there)

    def _preference(self, group: str, other: str) -> Difference | None:
        """The difference by which one of several runs is chosen: on the validation split, where the test split is
        reported."""
        if self.course == self.metric or have_other_examples(self.counted[group], self.counted[other]):
            return self._difference(group, other)

        def last(run: LoadedRun) -> float | None:
            return next(iter(run.evaluations(self.course)[-1:]), None)

        here, there = (by_seed(self.counted[g], last) for g in (group, other))
        return paired_difference(here, there)

    def _common_steps(self, group: str, other: str) -> set[int] | None:
        """The steps at which all runs of both groups were evaluated, if several are needed and the groups' differ."""
        if self.question.reducer.kind == "final":
            return None
        steps = [set(run.series(self.metric)) for g in (group, other) for run in self.counted[g]]
        return set.intersection(*steps) if len({frozenset(some) for some in steps}) > 1 else None

    def _coarsened(self, group: str) -> str:
        if group == self.first or (common := self._common_steps(group, self.first)) is None:
            return ""
        return f"evaluated at other steps than the baseline, so the difference is over the {len(common)} that both have"

    def _diverged(self, group: str) -> list[LoadedRun]:
        runs = self.members[group]
        return [run for run in runs if self.reasons[run.run_id].startswith(DIVERGED) and not run.repeats]

    def _withhold(self, group: str, decision: NotWorse | None) -> NotWorse | None:
        """Withhold an answer about survivors: a diverged run is worse than any margin, an unfinished one is unknown."""
        if self.question.margin is None or have_other_examples(self.counted[group], self.counted[self.first]):
            return decision
        seeds = {run.seed for run in self.counted[group]}
        theirs = {run.seed for run in self._diverged(self.first)}
        diverged = [run for run in self._diverged(group) if run.seed not in theirs]
        over = [run for run in self.members[group] if run.state.over and not run.repeats and run.seed not in seeds]
        return withhold(decision, self.question.margin, len(diverged), len(over) - len(diverged))

    def _repeat_warnings(self) -> list[str]:
        """List every value of a seed that was run more than once, to show how much repeating alone changes."""
        lines = []
        for group, runs in self.members.items():
            for first in (run for run in runs if any(other.repeats == run.run_id for other in runs)):
                again = [first, *(run for run in runs if run.repeats == first.run_id)]
                values = [value for run in again if (value := self.values[run.run_id]) is not None]
                shown, found = ", ".join(f"{value:.5g}" for value in values), spread(values)
                inside = f", standard deviation {found.sd:.2g}" if found and found.sd is not None else ""
                lines.append(
                    f"{self.labels[group]}: seed {first.seed} was run {len(again)} times "
                    f"({self.metric} {shown}{inside}); the first counts, run {first.run_id}"
                )
        return lines

    def _baseline_warnings(self) -> list[str]:
        if self.usual == self.first:
            return []
        return [
            f"the baseline was chosen: {self.labels[self.first]}; without --baseline it is {self.labels[self.usual]}. "
            "A baseline chosen after its result was seen makes differences that chance alone explains"
        ]

    def _other_examples(self) -> list[str]:
        there = self.counted[self.first]
        return [
            f"{self.labels[group]} was evaluated on other examples than {self.labels[self.first]}: not compared"
            for group, some in self.counted.items()
            if have_other_examples(some, there)
        ]

    def _reach(self, group: str, target: float | None) -> Reach | None:
        if target is None:
            return None
        steps = find_common_steps([run for some in self.counted.values() for run in some], self.metric)
        goal = Goal(self.metric, target, self.way == "higher", steps)
        lost = [
            sum(not run.repeats and run.state.over for run in self.members[g]) - len(self.counted[g])
            for g in (group, self.first)
        ]
        there = self.counted[self.first] if group != self.first else []
        return measure_reach(goal, self.counted[group], there, lost[0], lost[1] if group != self.first else 0)

    def _mixed(self) -> list[str]:
        return self.question.grouping.find_mixed({self.labels[group]: some for group, some in self.counted.items()})

    def _measure(self, group: str) -> Group:
        runs, here, newest = self.members[group], self.counted[group], self.members[group][-1]
        there, target = self.counted[self.first] if group != self.first else [], self.question.target
        quality = Quality(
            final=spread([value for run in here if (value := self.values[run.run_id]) is not None]),
            difference=self._difference(group, self.first) if group != self.first else None,
            coarsened=self._coarsened(group),
            unequal=find_unequal(here, there, self.course),
            examples=compare_examples(here, there),
            reach=self._reach(group, target),
        )
        return Group(
            group=group,
            label=self.labels[group],
            baseline=group == self.first,
            policies=tuple(str(entry["name"]) for entry in newest.policies),
            exact=next((run.exact for run in runs if run.exact is not None), None),
            seeds=tuple(sorted(run.seed for run in here if run.seed is not None)),
            states=dict(Counter(str(run.state) for run in runs if not run.repeats)),
            changes=find_changes(self.members[self.first][-1], newest, self.question.grouping),
            recipe=newest.recipe,
            quality=quality,
            speed=measure_speed(here, there),
            cost=measure_cost(here, there),
            layers=measure_layers(here),
            memory=find_curve(here),
            verdict="",
        )

    def _correct(self, groups: Sequence[Group]) -> list[Group]:
        """Correct for several chances: several groups against one baseline; quality, step time, memory of each."""
        claims = ([g.quality.difference for g in groups], [g.speed.step_ratio for g in groups])
        kinds = (*claims, [group.cost.peak_ratio for group in groups])
        quality, step, peak = correct_family(kinds, ratios=(False, True, True))
        backward = correct_all([group.speed.backward_ratio for group in groups])
        examples = correct_examples([group.quality.examples for group in groups])
        common = correct_all([group.quality.unequal.difference if group.quality.unequal else None for group in groups])
        decisions: list[NotWorse | None] = [None] * len(groups)
        if self.question.margin is not None:
            decisions = decide_all(quality, self.question.margin, worse_is_up=self.way == "lower")
            answers = self._trial_answers()
            decisions = [answers.get(g.group, d) if d else d for g, d in zip(groups, decisions, strict=True)]
        decisions[1:] = [self._withhold(g.group, d) for g, d in zip(groups[1:], decisions[1:], strict=True)]
        return [
            replace(
                group,
                quality=replace(
                    group.quality,
                    difference=quality[i],
                    not_worse=decisions[i],
                    examples=examples[i],
                    unequal=replace(group.quality.unequal, difference=common[i]) if group.quality.unequal else None,
                ),
                speed=replace(group.speed, step_ratio=step[i], backward_ratio=backward[i]),
                cost=replace(group.cost, peak_ratio=peak[i]),
            )
            for i, group in enumerate(groups)
        ]

    def _trial_answers(self) -> dict[str, NotWorse | None]:
        """The answers of a trial with this question, after whose looks one more test at 5% would be wrong."""
        trials = {run.looks for run in self.loaded if run.looks is not None and not self.reasons[run.run_id]}
        wanted = (self.metric, self.question.margin, self.first)
        same = [looks for looks in trials if (looks.metric, looks.margin, looks.baseline) == wanted]
        if self.question.reducer.kind != "final":
            return {}
        values = {g: by_seed(some, lambda run: self.values[run.run_id]) for g, some in self.counted.items()}
        found: dict[str, NotWorse | None] = {}
        for looks in sorted(same, key=lambda looks: len(looks.made)):
            found |= looks.answer(values, worse_is_up=self.way == "lower")
        return {group: answer for group, answer in found.items() if answer is not None}

    def _count(self, groups: Sequence[Group], controls: Sequence[Control]) -> tuple[Family, ...]:
        """Families with at least one statement."""
        claims = [d for g in groups for d in (g.quality.difference, g.speed.step_ratio, g.cost.peak_ratio)]
        margins = sum(g.quality.not_worse is not None and g.quality.not_worse.p is not None for g in groups)
        examples = [e.difference for g in groups for e in g.quality.examples]
        counts = {
            CLAIMS: count_statements(claims),
            "the margin": margins,
            "dense at as many steps": self._count_controls(controls, "dense"),
            "random at the same budget": self._count_controls(controls, "random"),
            "dense at equal cost": self._count_controls(controls, *EQUAL_COST),
            "the last common step": count_statements(
                [g.quality.unequal.difference for g in groups if g.quality.unequal is not None]
            ),
            "held-out examples": count_statements(examples),
        }
        return tuple(Family(name, count) for name, count in counts.items() if count)

    @staticmethod
    def _count_controls(controls: Sequence[Control], *kinds: str) -> int:
        return count_statements([control.difference for control in controls if control.kind in kinds])

    def _find_controls(self) -> tuple[Control, ...]:
        sign = {"lower": 1.0, "higher": -1.0}.get(self.way, 0.0)
        controls = find_controls(
            ControlSearch(self.members, self.counted, self.labels, self._difference, self._preference, sign)
        )
        corrected: dict[int, Difference | None] = {}
        # The best dense control at equal cost is chosen from several, so its p value is corrected for all of them.
        for kinds in (("dense",), ("random",), EQUAL_COST):
            places = [i for i, control in enumerate(controls) if control.kind in kinds]
            corrected |= dict(zip(places, correct_all([controls[i].difference for i in places]), strict=True))
        return tuple(replace(control, difference=corrected[i]) for i, control in enumerate(controls))

    def _compare_at_equal(self, group: Group, baseline: Group, controls: Sequence[Control]) -> Group:
        """Compare pairs of groups, so that a third group changes nothing. Controls of equal cost have a table of their
        own."""
        held = [baseline.label] if not group.baseline else []
        held += [c.found for c in controls if c.group == group.group and c.found and c.kind not in EQUAL_COST]
        names = {label: g for g, label in self.labels.items()}
        found = []
        for label in dict.fromkeys(held):
            here, there = self.counted[group.group], self.counted[names[label]]
            is_timed = not (find_busy(here) or find_busy(there))
            if not have_other_examples(here, there) and (
                entry := compare_at_equal(here, there, label, self.course, is_timed=is_timed)
            ):
                found.append(entry)
        return replace(group, quality=replace(group.quality, at_equal=tuple(found)))

    def _add_verdict(self, group: Group, baseline: Group, controls: Sequence[Control]) -> Group:
        runs = self.members[group.group]
        diverged = len(self._diverged(group.group))
        here, there = self.counted[group.group], self.counted[self.first]
        lost = sum(not run.repeats and run.state.over for run in runs) - len(here) - diverged
        same = all(f"{change.key}.".startswith(NO_CHANGE) for change in group.changes)
        rounding = bool(group.exact and baseline.exact and same)
        sources = find_sources(here, there)
        other_examples = have_other_examples(here, there)
        doubts = Doubts(lost, diverged, find_hardware(here, there), other_examples, sources, rounding)
        if group.baseline:
            return replace(group, verdict="; ".join(filter(None, ("baseline", describe_lost(doubts)))) + ".")
        mine = [control for control in controls if control.group == group.group]
        verdict = give_verdict(group.quality, group.speed, baseline.speed, self.metric, self.way, mine, doubts)
        return replace(group, verdict=verdict)

    def _describe(self, run: LoadedRun) -> RunLine:
        reason, value = self.reasons[run.run_id], self.values[run.run_id]
        wanted = dict.fromkeys([self.metric, self.course, *self.question.curves])
        return RunLine(
            run_id=run.run_id,
            group=run.group,
            label=self.labels[run.group],
            seed=run.seed,
            state=str(run.state),
            counts=not reason,
            reason=reason,
            steps=run.steps,
            attempts=len(run.history.warm),
            created=run.created,
            source=run.source,
            version=run.version,
            git_sha=run.git_sha,
            dirty=run.dirty,
            environment=run.history.environments[-1] if run.history.environments else {},
            quality=value if value is not None and math.isfinite(value) else None,
            step_seconds=median_time(run, names.STEP_SECONDS),
            curves={name: thin(run.curve(name), MOST_POINTS_IN_ALL // len(self.loaded)) for name in wanted},
        )
