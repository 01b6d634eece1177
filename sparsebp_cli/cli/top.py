"""``sparsebp top``: one live page of the runs that are not over."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.answer.run_record import LiveLine, LiveRuns
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.progress import Progress
from sparsebp_cli.cli.quantity import show_clock
from sparsebp_cli.cli.screen import Output, console, make_table, print_line
from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.run import RunFolder, list_runs, read
from sparsebp_cli.run.metric import TRAIN_LOSS

if TYPE_CHECKING:
    from rich.table import Table

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 16
POLL_SECONDS = 1.0


class LiveRun:
    """One run that is not over, read on from where its journal was left."""

    def __init__(self, run: RunFolder) -> None:
        """Raises ``RunNotFoundError`` for a run without a readable plan."""
        recipe = run.read_plan()["recipe"]
        self.run, self.target = run, str((recipe.get("target") or {}).get("kind", "local"))
        self.progress = Progress(recipe["name"], run.run_id, recipe["training"]["max_steps"])
        self.losses: deque[float] = deque(maxlen=256)
        self.gpu = ""  # of the machine that runs it, once it has started there
        self._offset = 0

    @property
    def place(self) -> str:
        """The target, and the GPU where there is one."""
        return ", ".join(part for part in (self.target, self.gpu) if part)

    def update(self) -> None:
        """Read what was appended."""
        for record, end in read(self.run.path, self._offset):
            self.progress.add(record)
            self._offset = end
            if record["kind"] == "attempt":
                self.gpu = shorten_gpus(str(record["environment"].get("gpu") or ""))
            if record["kind"] == "metrics" and TRAIN_LOSS.name in record["values"]:
                self.losses.append(record["values"][TRAIN_LOSS.name])

    def line(self) -> LiveLine:
        """Return what the page shows of the run."""
        return LiveLine(
            run_id=self.run.run_id,
            name=self.progress.name,
            place=self.place,
            state=str(self.run.state()),
            step=self.progress.step,
            max_steps=self.progress.max_steps,
            train_loss=self.progress.latest.get(TRAIN_LOSS.name),
            seconds_left=self.progress.seconds_left(),
        )


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the page once and end, as in a pipe.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Show what is running, live: targets, steps, losses, time left. Ctrl-C ends the page, not the runs."""
    screen = console()
    known: dict[str, LiveRun] = {}
    if once or output is Output.JSON or not screen.is_terminal:
        found = find_live(known)
        tell(LiveRuns(runs=[live.line() for live in found]), output, lambda _: _print(found))
        return
    from rich.live import Live

    with Interrupts() as interrupts, Live(console=screen, auto_refresh=False) as live:
        while not interrupts.received:
            live.update(make_page(find_live(known)), refresh=True)
            interrupts.wait(POLL_SECONDS)


def _print(found: Sequence[LiveRun]) -> None:
    if found:
        console().print(make_page(found))
    else:
        print_line("nothing is running; `sparsebp runs` lists what is over")


def find_live(known: dict[str, LiveRun]) -> list[LiveRun]:
    """Return the runs that are not over, the oldest first, read up to now. ``known`` keeps them between calls; a run
    whose plan cannot be read is left out."""
    found = []
    for run in reversed(list_runs()):
        if run.state().over:
            known.pop(run.run_id, None)
            continue
        try:
            live = known.get(run.run_id) or LiveRun(run)
        except (SparseBPError, KeyError, TypeError, ValueError):
            continue
        live.update()
        known[run.run_id] = live
        found.append(live)
    return found


def make_page(found: Sequence[LiveRun]) -> Table:
    """Return the page: a row for each run."""
    from rich.text import Text

    title = f"{len(found)} not over, {time.strftime('%H:%M:%S')}"
    numbers = ("step", "train loss", "left")
    table = make_table(
        "run", "name", "where", "state", *numbers[:2], "course", numbers[2], numbers=numbers, title=title
    )
    for live in found:
        line = live.line()
        table.add_row(
            line.run_id,
            Text(line.name),
            Text(line.place),
            line.state,
            f"{line.step}/{line.max_steps}",
            "" if line.train_loss is None else f"{line.train_loss:.4f}",
            draw_spark(list(live.losses)),
            "" if line.seconds_left is None else show_clock(line.seconds_left),
        )
    return table


def shorten_gpus(names: str) -> str:
    """Return names with commas between them as each name once, behind its number, without the maker."""
    counts = Counter(name.removeprefix("NVIDIA ").partition(" ")[0] for name in names.split(", ") if name)
    return ", ".join(f"{number} x {name}" if number > 1 else name for name, number in counts.items())


def draw_spark(values: Sequence[float]) -> str:
    """Return values as at most 16 bars, each the mean of an equal part, from the smallest to the largest."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    parts = min(SPARK_WIDTH, len(finite))
    edges = [len(finite) * part // parts for part in range(parts + 1)]
    # Halves, because the difference of the largest numbers is infinite.
    means = [sum(value / (2 * (b - a)) for value in finite[a:b]) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1)) if span else 0] for mean in means)
