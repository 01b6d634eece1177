"""Show the state of ``sparsebp study``: the plan as a table, a live page in a terminal, lines elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, final

from sparsebp_cli.cli.quantity import show_clock, show_count
from sparsebp_cli.cli.screen import console, make_table, print_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from sparsebp_lab.study.driver import TrialRun
    from sparsebp_lab.study.loader import LoadedStudy
    from sparsebp_lab.study.place import TrialPlace
    from sparsebp_lab.study.schema import RangeSection
    from sparsebp_lab.study.summary import ArmLine

UNKNOWN = "?"


def make_plan_table(loaded: LoadedStudy, lines: Sequence[ArmLine], places: Sequence[TrialPlace]) -> RenderableType:
    """Return the plan of a study: arms and trials by stage, each as done/all, and their cost."""
    from rich.console import Group
    from rich.text import Text

    study = loaded.study
    stages = [stage for stage in ("rehearse", "tune", "report", "control") if any(line.total[stage] for line in lines)]
    numbers = ("steps", *stages, "to do", "time left", "disk")
    table = make_table("arm", *numbers, numbers=numbers)
    for line in lines:
        counts = [f"{line.done[stage]}/{line.total[stage]}" if line.total[stage] else "" for stage in stages]
        left = line.num_trials - line.num_done
        table.add_row(
            line.arm,
            line.steps or UNKNOWN,
            *counts,
            str(left),
            _show_left(line.seconds_left),
            _show_disk(line.bytes_left),
        )
    total, done = sum(line.num_trials for line in lines), sum(line.num_done for line in lines)
    slots = sum(place.slots for place in places)
    notes = [
        f"{study.study}: {total} trials, {done} done, {total - done} to do{_show_time(lines, slots)}"
        f"{_show_whole_disk(lines)}",
        f"seeds: tune {_show_list(study.seeds.tune)}, report {_show_list(study.seeds.report)}; "
        f"trials at once: {', '.join(f'{place.name} {place.slots}' for place in places)}",
    ]
    if study.vary:
        shown = "; ".join(f"{key}: {_show_choice(values)}" for key, values in study.vary.items())
        search = study.search
        how = f" ({search.kind}, {search.trials} of each arm)" if search.is_sampled else ""
        notes.append(f"tuned on validation over {shown}{how}")
        notes += [f"best of {line.arm} so far: {line.best}" for line in lines if line.best]
        notes += _warn(loaded)
    if study.controls == "auto" and "control" not in stages:
        notes.append("control runs: the study adds them after the report runs; each costs as much as a run of its arm")
    return Group(table, *(Text(note) for note in notes))


def _warn(loaded: LoadedStudy) -> list[str]:
    dataset = next(iter(loaded.firsts.values())).recipe.dataset
    if dataset.test_split is None and dataset.test_fraction is None:
        return [
            "warning: without a test split, the report runs are evaluated on the data that tuning used: set "
            "dataset.test_fraction or test_split"
        ]
    return []


def _show_list(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


def _show_choice(values: Sequence[object] | RangeSection) -> str:
    if isinstance(values, Sequence):
        return _show_list(values)
    return f"{values.start:g} to {values.to:g}{' by log' if values.by == 'log' else ''}"


def _show_left(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else show_clock(seconds) if seconds else ""


def _show_disk(num_bytes: float | None) -> str:
    return UNKNOWN if num_bytes is None else show_count(num_bytes, "B") if num_bytes else ""


def _show_whole_disk(lines: Sequence[ArmLine]) -> str:
    """Return the disk that all missing runs will need, if one of every arm was measured."""
    known = [line.bytes_left for line in lines if line.bytes_left is not None]
    total = sum(known)
    return f", {show_count(total, 'B')} of disk" if len(known) == len(lines) and total else ""


def _show_time(lines: Sequence[ArmLine], slots: int) -> str:
    """Return the time left for the whole study, if every arm was timed."""
    known = [line.seconds_left for line in lines if line.seconds_left is not None]
    if len(known) < len(lines) or not sum(known):
        return ""
    return (
        f", about {show_clock(sum(known) / slots)} at {slots} at once"
        if slots > 1
        else f", about {show_clock(sum(known))}"
    )


class Page(ABC):
    """Shows a study while it runs."""

    slots: int

    def __init__(self, loaded: LoadedStudy, slots: int) -> None:
        self.loaded, self.slots = loaded, slots

    @abstractmethod
    def show(self, lines: Sequence[ArmLine], entries: Sequence[TrialRun]) -> None:
        """Show the current state."""

    @abstractmethod
    def print_text(self, text: str) -> None:
        """Print a permanent line."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...


@final
class LivePage(Page):
    """One table at the bottom of the terminal that is redrawn."""

    def __enter__(self) -> Self:
        from rich.live import Live

        self._told: set[str] = set()
        self._live = Live(console=console(), auto_refresh=False)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, lines: Sequence[ArmLine], entries: Sequence[TrialRun]) -> None:
        for entry in entries:
            if entry.problem and entry.trial.run_id not in self._told:
                self._told.add(entry.trial.run_id)
                self.print_text(f"{_describe(entry)}: {entry.status}: {entry.problem}")
        self._live.update(make_live_table(self.loaded, lines, self.slots), refresh=True)

    def print_text(self, text: str) -> None:
        self._live.console.print(text)


@final
class PlainPage(Page):
    """A line for each trial that starts or ends."""

    def __enter__(self) -> Self:
        self._known: dict[str, str] = {}
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, lines: Sequence[ArmLine], entries: Sequence[TrialRun]) -> None:
        total, done = sum(line.num_trials for line in lines), sum(line.num_done for line in lines)
        is_first = not self._known
        for entry in entries:
            before = self._known.get(entry.trial.run_id, "waiting")
            self._known[entry.trial.run_id] = str(entry.status)
            if entry.status != before and not (is_first and entry.status.over):
                self.print_text(f"{done}/{total}  {_describe(entry)}: {entry.status}{_show_time(lines, self.slots)}")
        if is_first and done:
            self.print_text(f"{done}/{total}  done before")

    def print_text(self, text: str) -> None:
        print_line(text)


def make_page(loaded: LoadedStudy, slots: int) -> Page:
    """Return a live page for a terminal, plain lines otherwise."""
    return LivePage(loaded, slots) if console().is_terminal else PlainPage(loaded, slots)


def make_live_table(loaded: LoadedStudy, lines: Sequence[ArmLine], slots: int) -> Table:
    """Return the page of a running study: trials by arm and state, the best so far, the time left."""
    total, done = sum(line.num_trials for line in lines), sum(line.num_done for line in lines)
    title = f"{loaded.study.study}: {done} of {total} trials{_show_time(lines, slots)}"
    counts = ("done", "running", "waiting", "failed", "time left")
    table = make_table("arm", *counts, "best so far", numbers=counts, title=title)
    for line in lines:
        states = {str(status): count for status, count in line.statuses.items()}
        failed = sum(states.get(word, 0) for word in ("failed", "interrupted", "cancelled", "unreachable"))
        numbers = (line.num_done, states.get("running", 0), states.get("waiting", 0), failed)
        table.add_row(line.arm, *map(str, numbers), _show_left(line.seconds_left), line.best)
    return table


def _describe(entry: TrialRun) -> str:
    trial = entry.trial
    return " ".join(filter(None, [trial.role, trial.arm, trial.combination, f"seed {trial.seed}", entry.run.run_id]))
