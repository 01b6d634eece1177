"""A driver that trains in this process with the worker of these tests, so that a question takes a moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sparsebp_cli.plan import Plan, Provenance
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run import State
from sparsebp_lab.judge.budget import QuestionBudget
from sparsebp_lab.judge.ledger import Ledger, LedgerQuestion
from sparsebp_lab.judge.question import Contender, RecipeProposal
from sparsebp_lab.judge.recipe_arms import RecipeArms
from sparsebp_lab.judge.session import JudgeSession, Terms
from sparsebp_lab.study.driver import TrialRun
from sparsebp_lab.study.store import TrialStore, has_plan
from sparsebp_lab.study.trial import StudyTrial

from .judge_worker import train

RECIPE = """\
version: 1
name: base
model: {name: none}
dataset: {name: none, test_fraction: 0.5}
training: {max_steps: 20, learning_rate: 1.0}
tracking: {uri: "sqlite:////dev/null/mlflow.db"}
"""


class HereDriver:
    """Trains trials in turn, as the driver of studies does with processes."""

    def __init__(self, places: object, store: TrialStore, provenance: Provenance) -> None:
        self._store, self.provenance = store, provenance
        self.runs: dict[str, TrialRun] = {}

    def drive(self, trials: Sequence[StudyTrial], pause: Callable[[], None]) -> None:
        for trial in trials:
            pause()
            run = self._store.find(trial)
            if not has_plan(run) or run.state() is not State.FINISHED:
                run.path.mkdir(parents=True, exist_ok=True)
                plan = Plan(run_id=run.run_id, recipe=trial.recipe, provenance=self.provenance)
                plan.save(run.path)
                with run.lock("worker"):
                    train(run, plan.recipe, plan.group)
            self.runs[trial.run_id] = TrialRun(trial, run, TrialRun(trial, run).look())

    def stop(self) -> None:
        """Nothing runs beside this process."""


def write_recipe(folder: Path, name: str = "base") -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(RECIPE.replace("name: base", f"name: {name}"))
    return file


def make_session(
    file: Path,
    *changes: str,
    budget: str = "1e15",
    effect: float | None = None,
    margin: float | None = None,
    gain: int = 2,
    worst: float | None = 0.5,
) -> JudgeSession:
    """Return a judge of the recipe with changes against the recipe, with the ledger of this test's home."""
    candidate, baseline = (Contender.of(load_recipe(file, list(some)), file) for some in (changes, ()))
    arms = RecipeArms(RecipeProposal(candidate, baseline), Provenance())
    arms.driver = HereDriver(None, arms.store, Provenance())  # type: ignore[assignment]
    return JudgeSession(arms, Terms(QuestionBudget.parse(budget), effect, margin, gain, worst), Ledger(), lambda: None)


def tell(question: LedgerQuestion) -> dict[str, list[tuple[int, float | None]]]:
    """Return the looks of a question by stage."""
    return {stage: [(look.number, look.gain) for look in some] for stage, some in question.looks.items()}
