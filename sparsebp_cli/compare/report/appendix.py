"""The report's appendix: every run, the environments, and the commands and recipes that make all of it again."""

from __future__ import annotations

import base64
import shlex
import time
from dataclasses import dataclass
from typing import Any

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.loaded import flatten
from sparsebp_cli.compare.number import SECONDS
from sparsebp_cli.run.visible import mask


def runs_grid(comparison: Comparison) -> Grid:
    """Return one row for each run, those that count in no mean included."""
    rows = []
    for run in comparison.runs:
        commit = f"{run.git_sha[:10]}{' + changes' if run.dirty else ''}" or show.NONE
        day = time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.created)) if run.created else show.NONE
        rows.append(
            (
                run.label,
                show.NONE if run.seed is None else str(run.seed),
                run.run_id,
                run.state if run.counts or run.state in run.reason else f"{run.state}; {run.reason}",
                str(run.steps),
                show.of_plain(run.quality, 4),
                show.scaled(run.step_seconds, SECONDS),
                day,
                run.version or show.NONE,
                commit,
            )
        )
    columns = ("group", "seed", "run", "state", "steps", comparison.metric, "step", "made (UTC)", "SparseBP", "commit")
    note = "Runs that did not finish, diverged or were repeated are in no mean."
    return Grid("Every run", columns, tuple(rows), note, aside=4)


def environment_grid(comparison: Comparison) -> Grid:
    """Return one row for each property of the environments and each value that it has in some run."""
    values: dict[str, dict[str, dict[str, None]]] = {}
    for run in comparison.runs:
        for key, value in flatten(run.environment).items():
            if value not in ("", None, {}, []):
                shown = show.scaled(float(value), show.BYTES) if key.endswith("_bytes") else str(value)
                values.setdefault(key.replace("_bytes", ""), {}).setdefault(shown, {})[run.label] = None
    rows = tuple(
        (key, value, "all" if len(found) == 1 else ", ".join(labels))
        for key, found in values.items()
        for value, labels in found.items()
    )
    return Grid("Environment", ("what", "value", "groups"), rows, aside=3)


@dataclass(frozen=True)
class RecipeText:
    """A recipe as YAML; ``file_name`` is empty for another program's parameters, which SparseBP cannot run."""

    title: str
    text: str
    file_name: str = ""

    @property
    def base64(self) -> str:
        """The YAML as the base64 of a data URL."""
        return base64.b64encode(self.text.encode()).decode()


@dataclass(frozen=True)
class Appendix:
    """The commands and recipes that make every run and the report again."""

    made_with: str
    commands: tuple[str, ...]
    recipes: tuple[RecipeText, ...]

    @property
    def has_recipes(self) -> bool:
        """Whether SparseBP can run at least one of the recipes."""
        return any(recipe.file_name for recipe in self.recipes)


def make_appendix(comparison: Comparison, command: str) -> Appendix:
    """Collect what makes everything again; an empty command, which made the report, is left out."""
    lines = []
    for group in comparison.groups:
        if group.policies:
            seeds = ",".join(str(seed) for seed in group.seeds)
            lines.append(f"sparsebp run {_file_name(group)}" + (f" --seeds {seeds}" if seeds else ""))
    if command:
        lines.append(mask(command))
    versions = sorted({run.version for run in comparison.runs if run.version})
    commits = sorted({run.git_sha for run in comparison.runs if run.git_sha})
    made_with = f"Made with SparseBP {', '.join(versions)}" if versions else ""
    made_with += f", commit {', '.join(commits)}" if commits else ""
    return Appendix(made_with, tuple(lines), tuple(_recipe(group) for group in comparison.groups))


def _file_name(group: Group) -> str:
    return shlex.quote(f"{group.label.replace('#', '-')}.yaml")


def _recipe(group: Group) -> RecipeText:
    import yaml

    text = yaml.safe_dump(_without_store(group.recipe), sort_keys=False, allow_unicode=True, width=100)
    if not group.policies:
        return RecipeText(f"{group.label}: parameters, as another program logged them", text)
    return RecipeText(_file_name(group), text, _file_name(group))


def _without_store(recipe: dict[str, Any]) -> dict[str, Any]:
    """Leave the store's address out: it may name a private machine, and a reader has another store."""
    tracking = recipe.get("tracking")
    return recipe | (
        {"tracking": {k: v for k, v in tracking.items() if k != "uri"}} if isinstance(tracking, dict) else {}
    )
