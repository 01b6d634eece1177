"""``sparsebp study``: plan a study, train missing trials, and show its state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.completion import complete_recipe
from sparsebp_cli.cli.exit_code import CHECK_FAILED, NOT_FINISHED
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.option import Format, resolve_one
from sparsebp_cli.cli.screen import Output, console, print_line
from sparsebp_cli.errors import DivergedError, RunFailedError, UsageError
from sparsebp_lab.verb.study_page import make_page, make_plan_table

if TYPE_CHECKING:
    from sparsebp_lab.answer.study_record import RebuiltStudy, StudyState
    from sparsebp_lab.study.course import Course
    from sparsebp_lab.study.driver import Driver, Status, TrialRun
    from sparsebp_lab.study.loader import LoadedStudy
    from sparsebp_lab.study.place import TrialPlace
    from sparsebp_lab.study.store import TrialStore
    from sparsebp_lab.study.summary import ArmLine
    from sparsebp_lab.study.trial import StudyTrial, TrialMaker

POLL_SECONDS, LONGEST_SECONDS = 0.2, 5.0  # limits of the pause between two looks at the trials
LOOK_SHARE = 0.02  # fraction of the time that looks may take: each reads hundreds of waiting trials again
FILE = "The study: a YAML file, or the name of a study that `sparsebp recipes` lists."
SCALED = "Run a smaller version of the study, which the study's key `scale` describes."
TARGET = "Train everything on this target (see `sparsebp targets`). It replaces the study's key `where`."
FROM = (
    "Train nothing. Choose the hyperparameter values again, from the trials in this archive, and compare them with "
    "the values that the study chose."
)
STOPPING = (
    "stopping: running trials first save a checkpoint; run the same command again to continue; press Ctrl-C "
    "again to end them at once"
)
KILLING = "ending the trials at once"


def study(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help=FILE, callback=resolve_one, autocompletion=complete_recipe)
    ],
    scaled: Annotated[bool, typer.Option("--scaled", help=SCALED)] = False,
    target: Annotated[str | None, typer.Option(metavar="NAME", help=TARGET)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be trained, and start nothing.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Train all trials again, also the finished ones.")] = False,
    archive: Annotated[Path | None, typer.Option("--from", metavar="ARCHIVE", help=FROM)] = None,
    output: Format = Output.TABLE,
) -> None:
    """Tune several methods, train them with fresh seeds and the same budget, and add control runs.

    The same command continues an interrupted study, and trains nothing twice. With --from, the command trains
    nothing. It chooses hyperparameter values again from the archived trials, and exits with 1 if a value differs from
    the one that the study chose.
    """
    if archive is not None:
        if dry_run or again or target is not None:
            raise UsageError("--from trains nothing: leave out --dry-run, --again and --target")
        raise typer.Exit(_rebuild(file, archive, output, scaled=scaled))
    session = _open(file, again=again, asks=not dry_run, scaled=scaled, target=target)
    if dry_run:
        state = session.describe(f"sparsebp study {session.loaded.words}")
        tell(state, output, lambda found: console().print(make_plan_table(session.loaded, found.arms, session.places)))
        return
    with Interrupts() as interrupts:
        session.run(interrupts)
    raise typer.Exit(_report(session, interrupts, output))


def _rebuild(file: Path, archive: Path, output: Output, *, scaled: bool) -> int:
    """Print what a study's archived trials choose, and return the exit code."""
    from sparsebp_cli.compare.archive import open_archive
    from sparsebp_lab.answer.study_record import RebuiltStudy
    from sparsebp_lab.study.loader import load_study
    from sparsebp_lab.study.rebuild import rebuild

    loaded = load_study(file, scaled=scaled)
    if not archive.is_file():
        raise UsageError(f"--from must be an archive of `sparsebp archive @{loaded.study.study}`, got {str(archive)!r}")
    rebuilt = rebuild(loaded, open_archive(archive))
    found = RebuiltStudy(
        study=loaded.study.study,
        archive=str(archive),
        num_trials=rebuilt.num_trials,
        is_as_chosen=rebuilt.is_as_chosen,
        arms=list(rebuilt.arms),
        notes=list(rebuilt.edges),
        faults=list(rebuilt.faults),
    )
    tell(found, output, _print_rebuilt)
    return 0 if found.is_as_chosen else CHECK_FAILED


def _print_rebuilt(found: RebuiltStudy) -> None:
    print_line(f"{found.study}: choices rebuilt from {found.num_trials} trials of {found.archive}")
    for arm in found.arms:
        print_line(arm.describe())
    for line in found.notes:
        print_line(f"note: {line}")
    for fault in found.faults:
        print_line(f"fault: {fault}")


def _open(file: Path, *, again: bool, asks: bool, scaled: bool, target: str | None) -> StudySession:
    from sparsebp_cli.cli.validate import check_sources
    from sparsebp_cli.tracking import resolve_uri
    from sparsebp_lab.study.loader import load_study
    from sparsebp_lab.study.place import find_places, move
    from sparsebp_lab.study.record import StudyRecord
    from sparsebp_lab.study.store import TrialStore
    from sparsebp_lab.study.trial import TrialMaker

    loaded = load_study(file, scaled=scaled)
    if target is not None:
        loaded = move(loaded, target)
    for arm in loaded.study.arms:
        resolve_uri(loaded.firsts[arm].placed.recipe.tracking.uri)
        check_sources(loaded.firsts[arm].placed, loaded.folders)
    places = find_places(loaded)
    record = StudyRecord.load(loaded.study.study)
    generation = (record.generation if record else 0) + again
    maker = TrialMaker(loaded.study.study, loaded.folders, generation)
    return StudySession(loaded, places, maker, TrialStore(maker), asks)


def find_pause(look: float) -> float:
    """Return how long to wait after a look at the trials that took ``look`` CPU seconds."""
    return min(max(POLL_SECONDS, look / LOOK_SHARE), LONGEST_SECONDS)


@dataclass
class StudySession:
    """One command on one study."""

    loaded: LoadedStudy
    places: list[TrialPlace]
    maker: TrialMaker
    store: TrialStore
    asks: bool = True  # a search may propose more

    def __post_init__(self) -> None:
        from sparsebp_cli.plan import find_provenance
        from sparsebp_lab.study.driver import Driver

        self.driver: Driver = Driver(self.places, self.store, find_provenance(self.loaded.file))
        self.course: Course
        self.controls: list[StudyTrial] = []
        self.edges: list[str] = []  # choices at an edge of a grid that is not extended further
        self.plan()

    def plan(self) -> None:
        """Derive the trials to train, from the file and the stored runs."""
        from sparsebp_lab.study.control import plan_controls
        from sparsebp_lab.study.course import plan_course
        from sparsebp_lab.study.extension import plan_extended

        self.loaded, self.course, self.edges = plan_extended(self.loaded, self.maker, self.store)
        if self.loaded.study.search.is_sampled:
            from sparsebp_lab.study.search import Search

            search = Search(self.loaded, self.maker, sum(place.slots for place in self.places))
            while True:  # a killed client may have left results that the search has not received
                known = self.loaded.variants
                self.loaded = search.advance(self.course.tuned, asks=self.asks)
                self.course = plan_course(self.loaded, self.maker, self.store)
                if known == self.loaded.variants:
                    break
        self.controls = plan_controls(self.loaded, self.course, self.maker, self.store)
        self.driver.add(self.trials)

    @property
    def trials(self) -> list[StudyTrial]:
        """Every trial that is known so far."""
        return [*self.course.trials, *self.controls]

    def summarise(self) -> list[ArmLine]:
        """Return one line for each arm."""
        from sparsebp_lab.study.summary import summarise

        statuses: dict[str, Status] = {run_id: entry.status for run_id, entry in self.driver.runs.items()}
        return summarise(self.loaded, self.course, self.controls, statuses, self.store)

    def run(self, interrupts: Interrupts) -> None:
        """Train stage after stage until no trial remains that can be trained."""
        self.save()
        with make_page(self.loaded, sum(place.slots for place in self.places)) as page:
            handled, begun = 0, time.process_time()

            def pause() -> None:
                nonlocal handled, begun
                page.show(self.summarise(), self.entries())
                interrupts.wait(find_pause(time.process_time() - begun))
                begun = time.process_time()
                for _ in interrupts.received[handled:]:
                    page.print_text(STOPPING if handled == 0 else KILLING)
                    self.driver.stop() if handled == 0 else self.driver.kill()
                    handled += 1

            while not interrupts.received and (todo := self._next_stage()):
                self.driver.drive(todo, pause)
                self.plan()
                self.save()
            page.show(self.summarise(), self.entries())

    def _next_stage(self) -> Sequence[StudyTrial]:
        """Return the trials of the first stage with unfinished ones."""
        for stage in (self.course.rehearsals, self.course.tuning, self.course.report, self.controls):
            if any(not self.driver.runs[trial.run_id].status.over for trial in stage):
                return stage
        return ()

    def describe(self, *following: str) -> StudyState:
        """Return the study's state, with the commands to run next."""
        from sparsebp_lab.answer.study_record import StudyState, TrialLine

        arms = self.summarise()
        trials = [
            TrialLine(
                run_id=entry.run.run_id,
                role=entry.trial.role,
                arm=entry.trial.arm,
                combination=entry.trial.combination,
                seed=entry.trial.seed,
                status=str(entry.status),
                problem=entry.problem,
            )
            for entry in self.entries()
        ]
        return StudyState(
            study=self.loaded.study.study,
            file=str(self.loaded.file),
            num_trials=sum(arm.num_trials for arm in arms),
            num_done=sum(arm.num_done for arm in arms),
            arms=arms,
            trials=trials,
            notes=list(self.edges),
            next=list(following),
        )

    def entries(self) -> list[TrialRun]:
        """Return the entries of all known trials, in their order."""
        return [self.driver.runs[trial.run_id] for trial in self.trials]

    def save(self) -> None:
        """Write the list of trials, by which other commands find them."""
        from sparsebp_lab.study.record import Listed, StudyRecord

        # Another command may have made the run with the result.
        listed = [
            Listed(self.store.find(t).run_id, t.role, t.arm, t.combination, t.seed, t.is_cut)
            for t in (*self.course.rehearsals, *self.course.tuning, *self.course.report, *self.controls)
        ]
        name, file = self.loaded.study.study, str(self.loaded.file.resolve())
        paper, options = self.loaded.paper, self.loaded.options
        StudyRecord(name, file, self.maker.generation, tuple(listed), paper=paper, options=options).save()


def _report(session: StudySession, interrupts: Interrupts, output: Output) -> int:
    """Print unfinished trials and the next command, write the answer, and return the exit code."""
    from sparsebp_lab.study.driver import Status

    tuning = {trial.run_id for trial in session.course.tuning} - {trial.run_id for trial in session.course.report}
    left = [
        entry
        for entry in session.entries()
        if entry.status not in {Status.FINISHED, Status.PRUNED}
        and not (entry.status is Status.DIVERGED and entry.trial.run_id in tuning)
    ]
    for entry in left:
        if entry.status.over:
            what = " ".join(filter(None, [entry.trial.arm, entry.trial.combination, f"seed {entry.trial.seed}"]))
            problem = f": {entry.problem}" if entry.problem else ""
            print_line(f"error: {what} (run {entry.run.run_id}) {entry.status}{problem}", stderr=True)
    done = len(session.entries()) - len(left)
    unknown = sum(sum(of.values()) for of in session.course.missing_of(session.loaded).values())
    name = session.loaded.study.study
    for line in session.edges:
        print_line(f"note: {line}")
    print_line(f"{name}: {done} of {len(session.entries()) + unknown} trials have finished")
    again, compare = f"sparsebp study {session.loaded.words}", f"sparsebp compare --study {name}"
    command = again if interrupts.received or left or unknown else compare
    is_retry = command is again and not interrupts.received
    print_line(f"next: `{again}` repeats failed trials and continues" if is_retry else f"next: {command}")
    tell(session.describe(command), output, lambda _: None)
    if interrupts.received:
        return interrupts.exit_code
    if left or unknown:
        statuses = {entry.status for entry in left}
        if statuses == {Status.DIVERGED}:
            return DivergedError.exit_code
        return RunFailedError.exit_code if Status.FAILED in statuses or not left else NOT_FINISHED
    return 0
