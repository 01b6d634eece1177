"""Let Optuna propose combinations one after the other, and report their results to it.

Optuna's database, ``studies/NAME.search.db``, stores the proposals, so a killed study asks nothing twice. Each arm has
a search there, whose name covers all that affects its results: other code, data or ranges begin a new search. Each
proposal has its own seed, so proposals follow from the results only.
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
from sparsebp_cli.run import home
from sparsebp_lab.study.course import Tuned
from sparsebp_lab.study.decisive import find_decisive
from sparsebp_lab.study.loader import Combination, LoadedStudy, describe
from sparsebp_lab.study.schema import RangeSection
from sparsebp_lab.study.trial import TrialMaker

if TYPE_CHECKING:
    import optuna

DIGITS = 4  # digits of a number from a range: more would not fit into a table and make no difference
FEWEST_AT_RANDOM, MOST_AT_RANDOM = 3, 10  # limits of TPE's first random trials, a quarter of all


@dataclass
class Search:
    """The searches of a study, one for each arm."""

    loaded: LoadedStudy
    maker: TrialMaker
    parallel: int  # combinations of an arm that may be unfinished at once

    def advance(self, tuned: Sequence[Tuned], *, asks: bool = True) -> LoadedStudy:
        """Report known results, ask for new combinations unless ``asks`` is False, and return the study with all
        proposed combinations. Raise UsageError if Optuna is not installed."""
        file = home() / "studies" / f"{self.loaded.study.study}.search.db"
        if not asks and not file.exists():
            _import_optuna()
            return self.loaded
        file.parent.mkdir(parents=True, exist_ok=True)
        # Two clients at once would both count the unfinished trials before either asks, and ask for too many.
        with FileLock(file.with_suffix(".lock")):
            asked = {arm: self._advance_arm(f"sqlite:///{file}", arm, tuned, asks) for arm in self.loaded.study.arms}
        return self.loaded.with_combinations(asked)

    def _advance_arm(self, storage: str, arm: str, tuned: Sequence[Tuned], asks: bool) -> list[Combination]:
        study = _import_optuna().create_study(
            study_name=f"{arm} {self._identify(arm)}", storage=storage, load_if_exists=True
        )
        # Keyed by label, because Optuna's numbers have more digits than the trained ones: see `_read`.
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
    """Report results to one search, keyed by the labels of combinations, and ask while fewer than ``parallel`` are
    unfinished and trials are left. Return all combinations in the order of their proposals. ``sign`` makes lower values
    better."""
    from optuna.trial import TrialState

    search, ranges = loaded.study.search, loaded.study.vary
    assert search.trials is not None
    found: list[Combination] = []
    num_open = 0
    # deepcopy=False: Optuna would copy every trial at each look, and this code only reads them.
    for trial in study.get_trials(deepcopy=False):
        if len(trial.params) < len(ranges):  # a client was killed while it asked
            if not trial.state.is_finished():
                study.tell(trial.number, state=TrialState.FAIL)
            continue
        found.append(_read(trial.params, ranges))
        if trial.state.is_finished():
            continue
        # Two proposals may round to one combination, which is trained once and answers both.
        result = results.get(describe(found[-1]))
        if result is not None and result.diverged:
            study.tell(trial.number, state=TrialState.PRUNED)  # the sampler treats it as worse than all others
        elif result is not None and result.value is not None:
            study.tell(trial.number, sign * result.value)
        else:
            num_open += 1
    # Random draws depend on no result, so they need not wait.
    limit = search.trials if search.kind == "random" and parallel else parallel
    while num_open < limit and len(found) < search.trials:
        study.sampler = _make_sampler(search.kind, search.seed, len(found), search.trials)
        trial = study.ask()
        for key, choice in ranges.items():
            _suggest(trial, key, choice)
        found.append(_read(trial.params, ranges))
        num_open += 1
    # The database may hold more, if the study was reduced to fewer trials; it is still the same search.
    return found[: search.trials]


def _make_sampler(kind: str, seed: int, number: int, trials: int) -> optuna.samplers.BaseSampler:
    samplers = _import_optuna().samplers
    # The factor keeps the seeds of different searches apart.
    own = 100_003 * seed + number
    if kind == "random":
        return samplers.RandomSampler(seed=own)
    at_random = min(MOST_AT_RANDOM, max(FEWEST_AT_RANDOM, trials // 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar, which unfinished trials need, is experimental
        return samplers.TPESampler(seed=own, n_startup_trials=at_random, constant_liar=True)


def _suggest(trial: optuna.Trial, key: str, choice: RangeSection | Sequence[object]) -> None:
    if not isinstance(choice, RangeSection):
        trial.suggest_categorical(key, [*range(len(choice))])
    elif isinstance(choice.start, int) and isinstance(choice.to, int):
        trial.suggest_int(key, choice.start, choice.to, log=choice.by == "log")
    else:
        trial.suggest_float(key, choice.start, choice.to, log=choice.by == "log")


def _read(params: Mapping[str, object], ranges: Mapping[str, RangeSection | Sequence[object]]) -> Combination:
    """Return the combination for Optuna's parameters: positions in lists, numbers in ranges."""
    found = []
    for key, choice in ranges.items():
        value = params[key]
        assert isinstance(value, int | float)
        if not isinstance(choice, RangeSection):
            found.append((key, choice[int(value)]))
        elif isinstance(value, int):
            found.append((key, value))
        else:
            # Clamped, because rounding may leave the range.
            found.append((key, min(max(float(f"{value:.{DIGITS}g}"), float(choice.start)), float(choice.to))))
    return tuple(found)


def _import_optuna() -> ModuleType:
    try:
        optuna = import_module("optuna")
    except ImportError as error:
        raise UsageError(
            f"search.kind tpe and random need the package optuna ({error}): pip install 'sparsebp[search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
