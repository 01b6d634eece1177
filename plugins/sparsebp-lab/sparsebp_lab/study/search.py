"""Combinations that Optuna chooses: asked for one after the other, and told what came out.

Optuna's own database, ``studies/NAME.search.db``, keeps what was asked, so a study that is killed asks nothing twice.
An arm has a search of its own there, named after all that decides its results: other code, data or ranges begin a new
one. Each question has a seed of its own, so what is asked follows from the results alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from filelock import FileLock

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan.plan import content_hash
from sparsebp_cli.recipe.evaluation import find_decisive
from sparsebp_cli.run import home
from sparsebp_cli.study.loader import Combination, LoadedStudy, describe
from sparsebp_cli.study.schema import RangeSection
from sparsebp_lab.study.course import Tuned
from sparsebp_lab.study.trial import TrialMaker

if TYPE_CHECKING:
    import optuna

DIGITS = 4  # of a number from a range: more would not fit into a table, and decide nothing
FEWEST_AT_RANDOM, MOST_AT_RANDOM = 3, 10  # first trials of TPE: a quarter of all, within these


@dataclass
class Search:
    """The searches of a study, one for each arm."""

    loaded: LoadedStudy
    maker: TrialMaker
    parallel: int  # combinations of an arm that may be open at once

    def advance(self, tuned: Sequence[Tuned], *, asks: bool = True) -> LoadedStudy:
        """Tell the results that are known, ask for what may be tried next unless ``asks`` is False, and return the
        study with all combinations that were asked. Raise UsageError if Optuna is not installed."""
        file = home() / "studies" / f"{self.loaded.study.study}.search.db"
        if not asks and not file.exists():
            _import_optuna()
            return self.loaded
        file.parent.mkdir(parents=True, exist_ok=True)
        # Two clients at once would both count the open trials before either asks, and ask for too many.
        with FileLock(file.with_suffix(".lock")):
            asked = {arm: self._advance_arm(f"sqlite:///{file}", arm, tuned, asks) for arm in self.loaded.study.arms}
        return self.loaded.with_combinations(asked)

    def _advance_arm(self, storage: str, arm: str, tuned: Sequence[Tuned], asks: bool) -> list[Combination]:
        study = _import_optuna().create_study(
            study_name=f"{arm} {self._identify(arm)}", storage=storage, load_if_exists=True
        )
        # By the line, since Optuna's numbers have more digits than what was trained: see `_read`.
        results = {one.variant.label: one for one in tuned if one.variant.arm == arm}
        higher = find_decisive(self.loaded.firsts[arm].recipe).better == "higher"
        return advance(study, self.loaded, results, self.parallel if asks else 0, sign=-1.0 if higher else 1.0)

    def _identify(self, arm: str) -> str:
        study, first = self.loaded.study, self.loaded.firsts[arm]
        (trial, *_) = self.maker.make("tune", arm, "", first.recipe, study.seeds.tune)
        settings = study.model_dump(mode="json", include={"vary": True, "budget": True, "seeds": {"tune"}})
        return content_hash([trial.run_id, settings, study.search.kind, study.search.seed])


def advance(
    study: optuna.Study,
    loaded: LoadedStudy,
    results: Mapping[str, Tuned],
    parallel: int,
    sign: float = 1.0,
) -> list[Combination]:
    """Tell one search its results, by the lines that describe combinations; ask while fewer than ``parallel`` are open
    and trials are left. Return all in the order in which they were asked. ``sign`` makes lower values better."""
    from optuna.trial import TrialState

    search, ranges = loaded.study.search, loaded.study.vary
    assert search.trials is not None
    found: list[Combination] = []
    num_open = 0
    # deepcopy=False: Optuna would copy every trial at each look, and these are only read.
    for trial in study.get_trials(deepcopy=False):
        if len(trial.params) < len(ranges):  # a client was killed between question and answer
            if not trial.state.is_finished():
                study.tell(trial.number, state=TrialState.FAIL)
            continue
        found.append(_read(trial.params, ranges))
        if trial.state.is_finished():
            continue
        # Two questions may round to one combination, which is trained once and answers both.
        result = results.get(describe(found[-1]))
        if result is not None and result.diverged:
            study.tell(trial.number, state=TrialState.PRUNED)  # worse than all others, for the sampler
        elif result is not None and result.value is not None:
            study.tell(trial.number, sign * result.value)
        else:
            num_open += 1
    # What is drawn without looking depends on no result, so nothing is waited for.
    limit = search.trials if search.kind == "random" and parallel else parallel
    while num_open < limit and len(found) < search.trials:
        study.sampler = _make_sampler(search.kind, search.seed, len(found), search.trials)
        trial = study.ask()
        for key, choice in ranges.items():
            _suggest(trial, key, choice)
        found.append(_read(trial.params, ranges))
        num_open += 1
    # More may be there: a study that asks for fewer trials by now is still the same search.
    return found[: search.trials]


def _make_sampler(kind: str, seed: int, number: int, trials: int) -> optuna.samplers.BaseSampler:
    samplers = _import_optuna().samplers
    # So far apart that no question of one seed has the seed of another's.
    own = 100_003 * seed + number
    if kind == "random":
        return samplers.RandomSampler(seed=own)
    at_random = min(MOST_AT_RANDOM, max(FEWEST_AT_RANDOM, trials // 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar, which open trials need, is called experimental
        return samplers.TPESampler(seed=own, n_startup_trials=at_random, constant_liar=True)


def _suggest(trial: optuna.Trial, key: str, choice: RangeSection | Sequence[object]) -> None:
    if not isinstance(choice, RangeSection):
        trial.suggest_categorical(key, [*range(len(choice))])
    elif isinstance(choice.start, int) and isinstance(choice.to, int):
        trial.suggest_int(key, choice.start, choice.to, log=choice.by == "log")
    else:
        trial.suggest_float(key, choice.start, choice.to, log=choice.by == "log")


def _read(params: Mapping[str, object], ranges: Mapping[str, RangeSection | Sequence[object]]) -> Combination:
    """Return the combination of Optuna's parameters: of a list they hold the position, of a range a number."""
    found = []
    for key, choice in ranges.items():
        value = params[key]
        assert isinstance(value, int | float)
        if not isinstance(choice, RangeSection):
            found.append((key, choice[int(value)]))
        elif isinstance(value, int):
            found.append((key, value))
        else:
            # Rounding may step over an end of the range.
            found.append((key, min(max(float(f"{value:.{DIGITS}g}"), float(choice.start)), float(choice.to))))
    return tuple(found)


def _import_optuna() -> ModuleType:
    try:
        optuna = import_module("optuna")
    except ImportError as error:
        raise UsageError(
            f"search.kind: tpe and random need the package optuna ({error}): pip install 'sparsebp[search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
