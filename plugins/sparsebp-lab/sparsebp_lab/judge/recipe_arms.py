"""Train two recipes as arms of a study: measure their steps' costs, and train each trial once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sparsebp_cli.compare.cost import sum_flops
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import LedgerMark, Provenance
from sparsebp_cli.recipe import PlacedRecipe
from sparsebp_cli.recipe.document import Node, Place
from sparsebp_cli.run import RunFolder, read
from sparsebp_lab.judge.ledger import SIDES
from sparsebp_lab.judge.question import Contender, RecipeProposal, with_test
from sparsebp_lab.study.budget import find_flops, find_steps, make_rehearsals
from sparsebp_lab.study.course import lengthen, read_value
from sparsebp_lab.study.driver import Driver, Status
from sparsebp_lab.study.loader import ArmVariant, LoadedStudy
from sparsebp_lab.study.place import TrialPlace
from sparsebp_lab.study.schema import Study
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.trial import StudyTrial, TrialMaker


class RecipeArms:
    """Trials of both sides at equal cost: the baseline's steps define what each may spend."""

    def __init__(self, proposal: RecipeProposal, provenance: Provenance) -> None:
        """Prepare the two recipes; nothing is trained."""
        self.proposal = proposal
        self.mark: LedgerMark | None = None
        self._loaded = _make_study(proposal)
        self._maker = TrialMaker(self._loaded.study.study, [Path.cwd()])
        self.store: TrialStore = TrialStore(self._maker)
        target = proposal.baseline.recipe.target
        self.driver: Driver = Driver([TrialPlace(target.kind, None)], self.store, provenance)

    def find_rehearsals(self) -> list[StudyTrial]:
        """Return the rehearsals known so far; once all have finished there may be longer ones."""
        found = make_rehearsals(self._loaded, self._maker, self.store)
        return list({trial.run_id: trial for some in found.values() for trial in some}.values())

    def make_trial(self, side: str, seed: int, *, test: bool = False) -> StudyTrial:
        """Return a trial of a side, once the costs are known. Raise UsageError if the baseline's cost pays for too few
        steps of the candidate."""
        rehearsals = make_rehearsals(self._loaded, self._maker, self.store)
        try:
            steps = find_steps(self._loaded, rehearsals, self.store)
        except UsageError as error:
            raise UsageError(
                f"candidate and baseline cannot train at equal cost: {error}; with --equal steps, each trains "
                "the steps in its recipe"
            ) from None
        variant, flops = self._loaded.variants[SIDES.index(side)], find_flops(self._loaded, rehearsals, self.store)
        recipe = with_test(lengthen(variant, steps[SIDES.index(side)], flops), asked=test)
        return self._maker.make("report", side, "", recipe, [seed])[0]

    def read(self, trial: StudyTrial, metric: str = "") -> float | None:
        """Return a finished trial's value after its last step, of the validation metric unless another is named."""
        run = self.store.load(trial)
        if metric and run is not None and run.finished:
            return next(iter(run.evaluations(metric)[-1:]), None)
        return read_value(run, self.proposal.metric)

    def find_cost(self, trial: StudyTrial) -> dict[str, float]:
        """Return the cost of a trial: FLOPs of its steps, 0.0 if unknown, and seconds of its attempts."""
        run: LoadedRun | None = self.store.load(trial)
        flops = None if run is None else sum_flops(run)
        return {"flops": flops or 0.0, "seconds": sum(_find_seconds(self.store.find(trial)))}

    def is_done(self, trial: StudyTrial) -> bool:
        """Return whether a trial's run has finished."""
        return self.store.is_done(trial)

    def train(self, trials: Sequence[StudyTrial], pause: Callable[[], None]) -> None:
        """Train trials on the target of the baseline's recipe."""
        self.driver.provenance = self.driver.provenance.model_copy(update={"ledger": self.mark})
        self.driver.drive(trials, pause)

    def stop(self) -> None:
        """Start no further runs; running ones end with a checkpoint."""
        self.driver.stop()

    def kill(self) -> None:
        """End running trials at once."""
        self.driver.kill()

    def find_unfinished(self, trials: Sequence[StudyTrial]) -> list[str]:
        """Return a line on each trial that has no result."""
        entries = [self.driver.runs[trial.run_id] for trial in trials]
        return [
            f"run {one.run.run_id} of the {one.trial.arm} (seed {one.trial.seed}) is {one.status}"
            + (one.problem and f": {one.problem}")
            for one in entries
            if one.status not in {Status.FINISHED, Status.DIVERGED}
        ]

    def has_diverged(self, trial: StudyTrial) -> bool:
        """Return whether a loss, gradient or weight of a trial's run was not finite."""
        return self.driver.runs[trial.run_id].status is Status.DIVERGED

    def find_run(self, trial: StudyTrial) -> str:
        """Return the id of a trial's run, which another command may have created."""
        return self.store.find(trial).run_id


def _find_seconds(run: RunFolder) -> Iterator[float]:
    """Yield the time between the first and the last record of each attempt."""
    times: dict[int, list[float]] = {}
    for record, _ in read(run.path):
        times.setdefault(record["attempt"], []).append(record["time"])
    for some in times.values():
        yield max(0.0, max(some) - min(some))  # a clock may jump back


def _make_study(proposal: RecipeProposal) -> LoadedStudy:
    by = {"same": "cost", "as": SIDES[0]} if proposal.equal == "flops" else {"same": "steps"}
    content = {
        "version": 1,
        "study": f"judge-{proposal.digest}",
        "base": proposal.baseline.name,
        "arms": {side: {} for side in SIDES},
        "budget": by,
        "seeds": {"report": [0]},
    }
    tree = Node({}, Place("judge"))
    variants = [
        _make_variant(side, one) for side, one in zip(SIDES, (proposal.baseline, proposal.candidate), strict=True)
    ]
    # Both rehearsals begin with the baseline's settings, such as the learning rate. A candidate that changes only these
    # costs as much as the baseline and needs no rehearsal of its own.
    firsts: dict[str, ArmVariant] = dict.fromkeys(SIDES, variants[0])
    return LoadedStudy(Path("judge"), Study.model_validate(content), Path("judge"), tuple(variants), firsts, tree, tree)


def _make_variant(side: str, contender: Contender) -> ArmVariant:
    return ArmVariant(side, (), PlacedRecipe(contender.recipe, Node({}, Place("judge"))))
