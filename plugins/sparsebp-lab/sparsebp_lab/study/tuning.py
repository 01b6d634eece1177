"""Show the tuning of a study as tables of a report: the validation metric over the varied keys, their importance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module

from sparsebp_cli.compare.grid import Grid
from sparsebp_lab.study.selection import TunedLine

FEWEST = 8  # combinations of an arm that a table of importances needs
MOST_COLUMNS = 12  # in a table over two keys
PAIR = re.compile(r" (?=[A-Za-z_]\w*=)")  # separator between the keys of a combination's line
OF_TUNING = (
    "Means over the tuning seeds, on the validation split. SparseBP chose values by these means; no reported "
    "interval includes them."
)


def make_tuning_grids(lines: Sequence[TunedLine]) -> list[Grid]:
    """Return a table for each arm, over its keys if there are two, and one of the keys that mattered."""
    arms: dict[str, list[TunedLine]] = {}
    for line in lines:
        arms.setdefault(line.arm, []).append(line)
    grids = [_make_grid(arm, some) for arm, some in arms.items()]
    return [*grids, *_make_importance(arms)]


def read_combination(text: str) -> dict[str, str]:
    """Return the keys and values of a combination's line."""
    pairs = (part.partition("=") for part in PAIR.split(text))
    return {key: value for key, _, value in pairs}


def _make_grid(arm: str, lines: Sequence[TunedLine]) -> Grid:
    found = [(read_combination(line.combination), line) for line in lines]
    keys = [*found[0][0]]
    title = f"Tuning of {arm}: {lines[0].metric}"
    if len(keys) == 2:
        first, second = ([*dict.fromkeys(values[key] for values, _ in found)] for key in keys)
        if len(second) <= MOST_COLUMNS and len(found) == len(first) * len(second):
            cells = {(values[keys[0]], values[keys[1]]): _show(line) for values, line in found}
            rows = tuple((one, *(cells[one, other] for other in second)) for one in first)
            return Grid(title, (keys[0], *(f"{keys[1]}={other}" for other in second)), rows, OF_TUNING)
    rows = tuple((*values.values(), _show(line)) for values, line in found)
    return Grid(title, (*keys, lines[0].metric), rows, OF_TUNING, aside=len(keys))


def _show(line: TunedLine) -> str:
    if line.value is None:
        return "pruned" if line.is_pruned else "none"
    return f"{line.value:.4f}{' chosen' if line.is_chosen else ''}"


def _make_importance(arms: dict[str, list[TunedLine]]) -> list[Grid]:
    """Return a table of each key's fraction of the variance; none without Optuna or with few results."""
    rows: list[tuple[str, ...]] = []
    for arm, lines in arms.items():
        known = [(read_combination(line.combination), line.value) for line in lines if line.value is not None]
        varied = [key for key in known[0][0] if len({values[key] for values, _ in known}) > 1] if known else []
        if len(known) >= FEWEST and len(varied) > 1:
            shares = find_importances([({key: values[key] for key in varied}, value) for values, value in known])
            rows += [(arm, key, f"{share:.0%}", f"{len(known)}") for key, share in shares.items()]
    note = (
        "Share: fraction of the variance of the validation metric that each key explains, over all fully trained "
        "combinations (Optuna's fANOVA, a random forest). With few combinations, shares are unreliable. They do "
        "not hold outside of the tried ranges."
    )
    grid = Grid("Which key mattered", ("arm", "key", "share", "combinations"), tuple(rows), note, aside=2)
    return [grid] if rows else []


def find_importances(results: Sequence[tuple[dict[str, str], float]]) -> dict[str, float]:
    """Return the importance of each key, the largest first; empty without Optuna."""
    try:
        optuna = import_module("optuna")
    except ImportError:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    columns = {key: [values[key] for values, _ in results] for key in results[0][0]}
    spaces, named = {}, set()
    for key, texts in columns.items():
        numbers = [_read_number(text) for text in texts]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            named.add(key)
            spaces[key] = optuna.distributions.CategoricalDistribution(sorted(set(texts)))
        else:
            wide = min(known) > 0 and max(known) >= 10 * min(known)
            spaces[key] = optuna.distributions.FloatDistribution(min(known), max(known), log=wide)
    study = optuna.create_study()
    for values, value in results:
        params = {key: text if key in named else float(text) for key, text in values.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=spaces, value=value))
    # The forest is random; a fixed seed makes the report reproducible.
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _read_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
