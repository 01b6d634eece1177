"""Track the progress of a run from the records of its event log, and show it as one line or as a live picture."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sparsebp_cli.cli.quantity import show_clock, show_seconds, show_share
from sparsebp_cli.run.metric import (
    BACKWARD_SECONDS,
    EVAL_LOSS,
    FORWARD_SECONDS,
    KEPT_SHARE,
    OPTIMIZER_SECONDS,
    STEP_SECONDS,
    TOKENS_PER_SECOND,
    TRAIN_LOSS,
)
from sparsebp_cli.run.record_type import Record

if TYPE_CHECKING:
    from rich.console import RenderableType

RECENT_STEPS = 50
EACH_STEP = {TRAIN_LOSS.name, STEP_SECONDS.name}  # a step whose peak memory is measured has no step time
PHASES = ((FORWARD_SECONDS, "forward"), (BACKWARD_SECONDS, "backward"), (OPTIMIZER_SECONDS, "optimizer"))


class Progress:
    """The latest value of every metric, and the expected time to the end."""

    name: str
    run_id: str
    max_steps: int
    step: int
    phase: str

    def __init__(self, name: str, run_id: str, max_steps: int) -> None:
        """Start without any record. ``max_steps`` is the planned number of optimizer steps."""
        self.name, self.run_id, self.max_steps = name, run_id, max_steps
        self.step = 0
        self.phase = "starting"
        self.latest: dict[str, float] = {}
        self.first_eval: float | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)

    def add(self, record: Record) -> None:
        """Add one record of the event log."""
        match record["kind"]:
            case "attempt":
                self._recent.clear()
                self.step, self.phase = record["from_step"], "loading model and data"
            case "metrics":
                self.latest |= record["values"]
                if EVAL_LOSS.name in record["values"] and self.first_eval is None:
                    self.first_eval = record["values"][EVAL_LOSS.name]
                if not record["values"].keys().isdisjoint(EACH_STEP):
                    self.step, self.phase = record["step"], ""
                    self._recent.append((record["time"], record["step"]))
                elif not self._recent:
                    self.phase = "before the first step"
            case "end":
                self.phase = ""

    def seconds_left(self) -> float | None:
        """Return the time to the end at the pace of the last steps, evaluations included; None if unknown."""
        if len(self._recent) < 2:
            return None
        (begin, first), (end, last) = self._recent[0], self._recent[-1]
        return (self.max_steps - last) * (end - begin) / max(1, last - first)

    def numbers(self) -> list[str]:
        """Return loss, evaluation, fraction kept and throughput, each as ``name value``, if known."""
        shown = []
        if TRAIN_LOSS.name in self.latest:
            shown.append(f"loss {self.latest[TRAIN_LOSS.name]:.4f}")
        if EVAL_LOSS.name in self.latest:
            shown.append(f"eval loss {self.latest[EVAL_LOSS.name]:.4f} (start {self.first_eval:.4f})")
        if KEPT_SHARE.name in self.latest:
            shown.append(f"kept {show_share(self.latest[KEPT_SHARE.name])}")
        if TOKENS_PER_SECOND.name in self.latest:
            shown.append(f"{self.latest[TOKENS_PER_SECOND.name]:,.0f} tokens/s")
        return shown

    def step_split(self) -> str:
        """Return the last step's time and its phases; empty before the first step."""
        if STEP_SECONDS.name not in self.latest:
            return ""
        parts = [f"{word} {show_seconds(self.latest[key.name])}" for key, word in PHASES if key.name in self.latest]
        return f"step {show_seconds(self.latest[STEP_SECONDS.name])}: {', '.join(parts)}"

    def line(self) -> str:
        """Return everything in one plain line of at most 100 columns, without the names of a step's phases."""
        left, numbers = self.seconds_left(), self.numbers()
        parts = [
            f"step {self.step}/{self.max_steps}",
            *(part.partition(" (start")[0].replace("eval loss", "eval") for part in numbers),
        ]
        if STEP_SECONDS.name in self.latest:
            split = "/".join(_show_milliseconds(self.latest.get(key.name, 0.0)) for key, _ in PHASES)
            parts.append(f"{show_seconds(self.latest[STEP_SECONDS.name])} ({split})")
        if self.phase:
            parts.insert(1, self.phase)
        elif left is not None:
            parts.append(f"{show_clock(left)} left")
        return "  ".join(parts)

    def picture(self, spinner: RenderableType) -> RenderableType:
        """Return a bar and two lines of numbers for rich. The spinner turns while there is no number."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        left = self.seconds_left()
        head = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, None, 1, None, None):
            head.add_column(ratio=ratio, no_wrap=True)
        head.add_row(
            spinner,
            Text.assemble((self.name, "bold"), f" {self.run_id}"),
            ProgressBar(self.max_steps, self.step, pulse=False),
            f"step {self.step}/{self.max_steps}",
            f"{show_clock(left)} left" if left is not None and not self.phase else "",
        )
        lines = ["   ".join(self.numbers()), self.step_split(), f"{self.phase} ..." if self.phase else ""]
        return Group(
            head, *(Text(f"  {line}", style="dim", no_wrap=True, overflow="ellipsis") for line in lines if line)
        )


def _show_milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 0.9995 else f"{1000 * seconds:.0f}"
