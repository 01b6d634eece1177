"""Build a comparison from runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparsebp_cli.compare.comparison import ComparedRun, Comparison, Control, Exclusion, Group, Sample
from sparsebp_cli.compare.confound import (
    find_changes,
    find_confounds,
    find_hardware,
    find_sources,
    find_warnings,
)
from sparsebp_cli.compare.control import EQUAL_COST, ControlSearch, find_controls
from sparsebp_cli.compare.equal import compare_at_equal, find_unequal
from sparsebp_cli.compare.example import compare_examples, correct_examples, have_other_examples
from sparsebp_cli.compare.family import CLAIMS, Family, correct_all, correct_family, count_statements
from sparsebp_cli.compare.figure import (
    by_seed,
    find_busy,
    measure_cost,
    measure_layers,
    measure_speed,
    median_time,
    thin,
)
from sparsebp_cli.compare.load import load
from sparsebp_cli.compare.loaded import POLICY_KEY, LoadedRun, Point
from sparsebp_cli.compare.margin import NotWorse, decide_all, withhold
from sparsebp_cli.compare.measured import Quality
from sparsebp_cli.compare.question import (
    Members,
    Question,
    check_logged,
    choose_metric,
    choose_way,
    find_baseline,
    find_course,
    find_declared,
    find_dense,
    label_groups,
)
from sparsebp_cli.compare.statistics import Difference, add_choice, paired_difference, spread, withhold_statement
from sparsebp_cli.compare.validity import withhold_times
from sparsebp_cli.compare.verdict import Doubts, give_verdict, state_baseline
from sparsebp_cli.compare.words import say_all
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run import metric as names
from sparsebp_cli.run.journal import list_samples

# Keys that do not change a result. Keys of policies are compared elsewhere.
NO_CHANGE = ("name", POLICY_KEY, "tracking.", "target.", "checkpoint.", "measure.")
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
    """Compare runs. Runs that differ only in seed form a group, and each group is compared with the baseline. Groups
    appear in the order of the runs. ``baseline``, ``metric`` and ``margin`` replace the fields of :class:`Question`
    with these names. Raise ``UsageError`` if there are no runs, or none has the baseline or the metric."""
    question = question or Question(baseline, metric, margin)
    loaded = load(runs)
    if not loaded:
        raise UsageError("there are no runs to compare")
    members: dict[str, list[LoadedRun]] = {}
    for run in loaded:
        members.setdefault(run.group, []).append(run)
    first = find_baseline(members, question.baseline, label_groups(members))
    usual = find_baseline(members, None, {})
    return _Builder(loaded, {first: members[first]} | members, first, usual, question).build()


class _Builder:
    """The state that all parts of a comparison share."""

    def __init__(self, loaded: list[LoadedRun], members: Members, first: str, usual: str, question: Question) -> None:
        self.loaded, self.members, self.first, self.question = loaded, members, first, question
        self.usual = usual
        self.metric = choose_metric(loaded, question)
        for name in question.curves:
            if name not in names.METRICS:  # if these runs lack a metric of SparseBP, give an empty curve instead
                check_logged(loaded, name, "curves")
        self.known = find_declared(loaded, self.metric)
        self.way = choose_way(question, self.metric, self.known)
        self.labels = label_groups(members)
        # after the last step; NaN or infinity if the run diverged there
        self.values = {run.run_id: next(iter(run.evaluations(self.metric)[-1:]), None) for run in loaded}
        self.excluded = {run.run_id: found for run in loaded if (found := self._exclude(run)) is not None}
        self.counted = {g: [run for run in some if run.run_id not in self.excluded] for g, some in members.items()}
        self.course = find_course(self.metric, {self.metric} if self.known is not None else ())

    def build(self) -> Comparison:
        groups = self._withhold_times([self._measure(group) for group in self.members])
        groups = self._correct(groups)
        controls = self._find_controls()
        groups = [self._compare_at_equal(group, groups[0], controls) for group in groups]
        groups = [self._add_verdict(group, groups[0], controls) for group in groups]
        return Comparison(
            schema=6,
            metric=self.metric,
            course=self.course,
            unit=self.known.unit if self.known is not None else "",
            better=self.way,
            margin=self.question.margin,
            baseline=self.first,
            groups=tuple(groups),
            runs=tuple(self._describe(run, group) for group in groups for run in self.members[group.group]),
            controls=controls,
            confounds=find_confounds({self.labels[group]: some for group, some in self.counted.items()}),
            families=self._count(groups, controls),
            warnings=(
                *self._other_examples(),
                *self._baseline_warnings(),
                *self._repeat_warnings(),
                *find_warnings(self.loaded, groups, self.metric),
            ),
        )

    def _exclude(self, run: LoadedRun) -> Exclusion | None:
        """Return why a run does not count in its group; None if it counts."""
        if not run.finished:
            if run.broke_down and not run.repeats:
                return Exclusion("diverged", f"diverged: {run.broke_down.splitlines()[0]}")
            text = str(run.history.ends[-1].get("text", "")) if run.history.ends and run.state.over else ""
            return Exclusion("unfinished", f"{run.state}: {text.splitlines()[0]}" if text.strip() else str(run.state))
        value = self.values[run.run_id]
        # Written so that NaN is caught too.
        if value is not None and not abs(value) < BROKEN:
            return Exclusion("diverged", f"diverged: {self.metric} is {value} after the last step")
        if not run.repeats:
            return None
        # If the newest run of a seed counted, it could be chosen by its result. See decision 10.
        return Exclusion("repeats", f"repeats seed {run.seed} of run {run.repeats}, which is compared instead")

    def _difference(self, group: str, other: str) -> Difference | None:
        if have_other_examples(self.counted[group], self.counted[other]):
            return None  # not a difference of the models
        here, there = (by_seed(self.counted[g], lambda run: self.values[run.run_id]) for g in (group, other))
        return paired_difference(here, there)

    def _preference(self, group: str, other: str) -> Difference | None:
        """Return the difference by which one of several runs is chosen: by validation if the test split is reported."""
        if self.course == self.metric or have_other_examples(self.counted[group], self.counted[other]):
            return self._difference(group, other)

        def last(run: LoadedRun) -> float | None:
            return next(iter(run.evaluations(self.course)[-1:]), None)

        here, there = (by_seed(self.counted[g], last) for g in (group, other))
        return paired_difference(here, there)

    def _diverged(self, group: str) -> list[LoadedRun]:
        found = [run for run in self.members[group] if not run.repeats and run.run_id in self.excluded]
        return [run for run in found if self.excluded[run.run_id].kind == "diverged"]

    def _diverged_alone(self, group: str) -> list[LoadedRun]:
        """Return the runs that diverged on a seed on which the baseline did not."""
        theirs = {run.seed for run in self._diverged(self.first)}
        return [run for run in self._diverged(group) if run.seed not in theirs]

    def _state(self, group: Group) -> Difference | None:
        """Return a group's difference to the baseline for its statement. :mod:`~sparsebp_cli.compare.verdict` makes
        sure that surviving runs give no statement in their favour."""
        return self._judge(group.quality.difference, group.group, self.first, self.metric)

    def _judge(self, difference: Difference | None, group: str, other: str, metric: str) -> Difference | None:
        """Add the error of tuning choices for both groups; values tuned by a shared variant count once. Until all
        planned runs exist, withhold the statement: a look after every seed finds a false difference in 18 % of studies.
        """
        if difference is None:
            return None
        errors = self.question.choice.get(metric, {})
        names = [self.members[one][-1].name for one in (group, other)]
        here, there = ({*self.question.tuned_by.get(name, (name,))} for name in names)
        sides = [here & there] if here & there else [here, there]
        error = math.hypot(*(max(errors.get(arm, 0.0) for arm in side) for side in sides))
        difference = add_choice(difference, error)
        return difference if self.question.is_complete else withhold_statement(difference)

    def _withhold(self, group: str, decision: NotWorse | None) -> NotWorse | None:
        """Withhold an answer about survivors: divergence is worse than any margin, an unfinished run unknown."""
        if self.question.margin is None or have_other_examples(self.counted[group], self.counted[self.first]):
            return decision
        seeds = {run.seed for run in self.counted[group]}
        diverged = self._diverged_alone(group)
        over = [run for run in self.members[group] if run.state.over and not run.repeats and run.seed not in seeds]
        return withhold(decision, self.question.margin, len(diverged), len(over) - len(diverged))

    def _repeat_warnings(self) -> list[str]:
        """List the values of every repeated seed, to show how much repetition alone changes."""
        lines = []
        for group, runs in self.members.items():
            repeats: dict[str, list[LoadedRun]] = {}
            for run in runs:
                repeats.setdefault(run.repeats, []).append(run)
            for first in (run for run in runs if run.run_id in repeats):
                again = [first, *repeats[first.run_id]]
                values = [value for run in again if (value := self.values[run.run_id]) is not None]
                shown, found = ", ".join(f"{value:.5g}" for value in values), spread(values)
                inside = f", standard deviation {found.sd:.2g}" if found and found.sd is not None else ""
                lines.append(
                    f"{self.labels[group]}: {len(again)} runs have seed {first.seed} "
                    f"({self.metric} {shown}{inside}); the comparison uses the first, {first.run_id}"
                )
        return lines

    def _baseline_warnings(self) -> list[str]:
        if self.usual == self.first:
            dense, name = find_dense(self.members), self.labels[self.first]
            if len(self.members) == 1 or self.question.baseline is not None or len(dense) == 1:
                return []
            if dense and self.question.tuned_by:
                return []  # a study's file says which variant is the baseline
            if dense:
                others = ", ".join(self.labels[group] for group in dense if group != self.first)
                return [f"{len(dense)} groups are dense: the baseline is {name}, not {others}; --baseline sets another"]
            return [f"no run here is dense: the baseline is {name}, so no saving is relative to dense training"]
        return [
            f"--baseline sets {self.labels[self.first]}; the default baseline is {self.labels[self.usual]}. "
            "If you choose a baseline after you saw its result, chance alone can make differences"
        ]

    def _other_examples(self) -> list[str]:
        there = self.counted[self.first]
        return [
            f"{self.labels[group]} was evaluated on other examples than {self.labels[self.first]}, so it is not "
            "compared"
            for group, some in self.counted.items()
            if have_other_examples(some, there)
        ]

    def _measure(self, group: str) -> Group:
        runs, here, newest = self.members[group], self.counted[group], self.members[group][-1]
        there = self.counted[self.first] if group != self.first else []
        quality = Quality(
            final=spread([value for run in here if (value := self.values[run.run_id]) is not None]),
            difference=self._difference(group, self.first) if group != self.first else None,
            unequal=find_unequal(here, there, self.course),
            examples=compare_examples(here, there, self.metric, self.way),
        )
        return Group(
            group=group,
            label=self.labels[group],
            baseline=group == self.first,
            policies=tuple(str(entry["name"]) for entry in newest.policies),
            exact=next((run.exact for run in runs if run.exact is not None), None),
            seeds=tuple(sorted(run.seed for run in here)),
            states=dict(Counter(str(run.state) for run in runs if not run.repeats)),
            changes=find_changes(self.members[self.first][-1], newest),
            recipe=newest.recipe,
            quality=quality,
            speed=measure_speed(here, there),
            cost=measure_cost(here, there),
            layers=measure_layers(here),
            statements=(),
            verdict="",
        )

    def _withhold_times(self, groups: Sequence[Group]) -> list[Group]:
        measured = groups[0].speed
        found = []
        for group in groups:
            base = None if group.baseline else measured
            same = not find_hardware(self.counted[group.group], self.counted[self.first])
            speed = withhold_times(group.speed, group.quality, base, same_hardware=same)
            found.append(replace(group, speed=speed))
        return found

    def _correct(self, groups: Sequence[Group]) -> list[Group]:
        """Correct for multiple tests: several groups against one baseline; quality, step time and memory of each."""
        claims = ([self._state(g) for g in groups], [g.speed.step_ratio for g in groups])
        kinds = (*claims, [group.cost.held_ratio for group in groups])
        quality, step, held = correct_family(kinds, ratios=(False, True, True))
        backward = correct_all([group.speed.backward_ratio for group in groups], ratio=True)
        examples = correct_examples([group.quality.examples for group in groups])
        common = correct_all([self._common(group) for group in groups])
        decisions: list[NotWorse | None] = [None] * len(groups)
        if self.question.margin is not None:
            decisions = decide_all(quality, self.question.margin, worse_is_up=self.way == "lower")
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
                cost=replace(group.cost, held_ratio=held[i]),
            )
            for i, group in enumerate(groups)
        ]

    def _common(self, group: Group) -> Difference | None:
        """Return a group's difference at the last common step, for its statement."""
        unequal = group.quality.unequal
        return None if unequal is None else self._judge(unequal.difference, group.group, self.first, unequal.metric)

    def _control(self, group: str, control: str) -> Difference | None:
        """Return a group's difference to one of its controls, for its statement."""
        return self._judge(self._difference(group, control), group, control, self.metric)

    def _count(self, groups: Sequence[Group], controls: Sequence[Control]) -> tuple[Family, ...]:
        """Return the families with at least one statement."""
        claims = [d for g in groups for d in (g.quality.difference, g.speed.step_ratio, g.cost.held_ratio)]
        margins = sum(g.quality.not_worse is not None and g.quality.not_worse.p is not None for g in groups)
        examples = [e.difference for g in groups for e in g.quality.examples]
        counts = {
            CLAIMS: count_statements(claims),
            "the margin": margins,
            "dense with as many steps": self._count_controls(controls, "dense"),
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
            ControlSearch(self.members, self.counted, self.labels, self._control, self._preference, sign)
        )
        corrected: dict[int, Difference | None] = {}
        # The best dense control at equal cost is chosen from several, so correct its p value for all of them.
        for kinds in (("dense",), ("random",), EQUAL_COST):
            places = [i for i, control in enumerate(controls) if control.kind in kinds]
            corrected |= dict(zip(places, correct_all([controls[i].difference for i in places]), strict=True))
        return tuple(replace(control, difference=corrected[i]) for i, control in enumerate(controls))

    def _compare_at_equal(self, group: Group, baseline: Group, controls: Sequence[Control]) -> Group:
        """Compare pairs of groups, so that a third group changes nothing. Equal-cost controls have their own table."""
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
        diverged, alone = len(self._diverged(group.group)), len(self._diverged_alone(group.group))
        here, there = self.counted[group.group], self.counted[self.first]
        lost = sum(not run.repeats and run.state.over for run in runs) - len(here) - diverged
        same = all(f"{change.key}.".startswith(NO_CHANGE) for change in group.changes)
        doubts = Doubts(
            lost,
            diverged,
            alone,
            find_hardware(here, there),
            have_other_examples(here, there),
            find_sources(here, there),
            rounding=bool(group.exact and baseline.exact and same),
        )
        if group.baseline:
            found = state_baseline(doubts)
        else:
            mine = [control for control in controls if control.group == group.group]
            found = give_verdict(
                group.quality, group.speed, baseline.speed, group.cost, self.metric, self.way, mine, doubts
            )
        return replace(group, statements=found, verdict=say_all(found))

    def _describe(self, run: LoadedRun, group: Group) -> ComparedRun:
        excluded, value = self.excluded.get(run.run_id), self.values[run.run_id]
        is_timed = not (group.speed.withheld and group.speed.step is None)
        wanted = dict.fromkeys([self.metric, self.course, *self.question.curves])
        return ComparedRun(
            run_id=run.run_id,
            group=run.group,
            label=self.labels[run.group],
            seed=run.seed,
            state=str(run.state),
            counts=excluded is None,
            excluded="" if excluded is None else excluded.kind,
            reason="" if excluded is None else excluded.text,
            steps=run.steps,
            attempts=len(run.history.warm),
            created=run.created,
            version=run.version,
            git_sha=run.git_sha,
            dirty=run.dirty,
            environment=run.history.environments[-1] if run.history.environments else {},
            quality=value if value is not None and math.isfinite(value) else None,
            step_seconds=median_time(run, names.STEP_SECONDS) if is_timed else None,
            curves={name: self._thin(run.curve(name), is_timed=is_timed) for name in wanted},
            samples=tuple(Sample(*one) for one in list_samples(run.history)),
        )

    def _thin(self, points: Sequence[Point], *, is_timed: bool) -> tuple[Point, ...]:
        """Thin a curve to what a page can hold, and drop withheld seconds."""
        found = thin(points, MOST_POINTS_IN_ALL // len(self.loaded))
        return found if is_timed else tuple(point._replace(seconds=None) for point in found)
