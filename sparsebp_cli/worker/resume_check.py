"""Compare recipe, code and data with those of the checkpoint from which a run resumes, before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsebp_cli.errors import ChangedError
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.identity import find_code
from sparsebp_cli.plan.seal import SECTIONS_OF_DATA, Seal, SealChange, is_free, read_seal
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter, RunFolder, metric, read
from sparsebp_cli.run.record_type import AcceptedChange
from sparsebp_cli.worker.checkpoint import Snapshot
from sparsebp_cli.worker.process import Ranks


class ResumeCheck:
    """Compares a run with its checkpoint. A difference is refused, allowed by the user, or changes no number."""

    seal: Seal

    def __init__(
        self, plan: Plan, run: RunFolder, journal: JournalWriter, ranks: Ranks, snapshot: Snapshot | None
    ) -> None:
        """Compare recipe and code with those of the checkpoint or, without one, of the event log. The first rank
        decides for all ranks. Raise ChangedError for a difference that the user has not allowed."""
        self.seal = Seal(plan.recipe.model_dump(mode="json"), find_code(plan.recipe))
        self._run, self._journal, self._ranks = run, journal, ranks
        facts = History.load(run.path).facts
        self._accepted: list[AcceptedChange] = list(facts.get("changes", []))
        self._allowed = _read_allowed(run)
        self._reported: set[str] = set()
        self._step = snapshot.step if snapshot else 0
        start = f"run {facts['repeats']}, which it repeats" if "repeats" in facts else "the start of the run"
        self._where = f"the checkpoint of step {self._step}" if snapshot else start
        self._before = Seal.from_json(snapshot.seal or {}) if snapshot else read_seal(run.path)
        if snapshot and self._before is None:
            self._note("info", f"{self._where} has no record of recipe, code and data: changes since then are unknown")
        self._check()

    def check_data(self, digest: str) -> None:
        """Compare the digest of all examples, and record this attempt's config fingerprint in the event log. Raise
        ChangedError if the data changed and the user has not allowed it."""
        self.seal = replace(self.seal, data=digest)
        self._check()
        if read_seal(self._run.path) != self.seal:
            self._journal.write("seal", values=self.seal.to_json())

    def _check(self) -> None:
        refused: list[SealChange] = []
        if self._ranks.is_first and self._before is not None:
            changes = [change for change in self._before.changes(self.seal) if change.field not in self._reported]
            refused = [change for change in changes if not self._accept(change)]
        # All ranks raise, because ranks that continue would wait for the first.
        refused = self._ranks.broadcast(refused)
        if refused:
            raise ChangedError(self._run.run_id, self._where, refused)

    def _accept(self, change: SealChange) -> bool:
        known = change._asdict()
        was_accepted = any(known.items() <= entry.items() for entry in self._accepted)
        if is_free(change):
            self._note("info", f"changed since {self._where}, without effect on any result: {change}")
        elif not was_accepted:
            # Allowing another dataset also allows its data.
            if not (change.is_under(self._allowed) or (change.field == "data" and self._has_other_source())):
                return False
            self._accepted.append(AcceptedChange(field=change.field, then=change.then, now=change.now, step=self._step))
            self._journal.write("facts", values={"changes": self._accepted})
            self._note("warning", f"changed since {self._where}, and allowed: {change}")
        self._reported.add(change.field)
        return True

    def _has_other_source(self) -> bool:
        entries = (SealChange(str(entry["field"]), "", "") for entry in self._accepted)
        return any(change.is_under(SECTIONS_OF_DATA) for change in entries)

    def _note(self, level: str, text: str) -> None:
        self._journal.write("note", level=level, text=text)


def _read_allowed(run: RunFolder) -> set[str]:
    """Return the fields that the user allowed to change since the last attempt."""
    allowed: set[str] = set()
    for record, _ in read(run.path):
        if record["kind"] == "attempt":
            allowed = set()
        elif record["kind"] == "allow":
            allowed |= set(record["fields"])
    return allowed


MOST_NAMES = 5


def find_journal_gaps(history: History, step: int, recipe: Recipe) -> list[str]:
    """Return one line for each kind of missing metric before a checkpoint's step."""
    at_steps = set(history.metrics.get(metric.TRAIN_LOSS.name, {})) & set(range(1, step + 1))
    # A metric that all remaining steps have was written at every step.
    names = [name for name, points in history.metrics.items() if at_steps and at_steps <= set(points)]
    evaluated = range(0, step + 1, recipe.measure.eval_every)
    due = {
        _list(names) if names else "all metrics": [n for n in range(1, step + 1) if n not in at_steps],
        metric.EVAL_LOSS.name: [n for n in evaluated if n not in history.metrics.get(metric.EVAL_LOSS.name, {})],
    }
    return [
        f"the event log lacks {what} of {_ranges(missing)}, although the checkpoint of step {step} is later"
        for what, missing in due.items()
        if missing
    ]


def _list(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _ranges(steps: Sequence[int]) -> str:
    """Return the steps as text: ``step 3`` or ``steps 1 to 4, 7``."""
    found: list[list[int]] = []
    for step in steps:
        if found and found[-1][1] == step - 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    shown = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in found)
    return f"step{'s' * (len(steps) > 1)} {shown}"
