"""The end of the report: every run, where it ran, and how all of it is made again."""

from __future__ import annotations

import base64
import shlex
import time
from html import escape
from typing import Any

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.loaded import flatten
from sparsebp_cli.compare.number import SECONDS
from sparsebp_cli.run.visible import mask


def runs_grid(comparison: Comparison) -> Grid:
    """Return every run that was given.

    Args:
        comparison: What was compared.

    Returns:
        One row a run.
    """
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
    """Return where the runs ran; what differs between them is among the other differences, too.

    Args:
        comparison: What was compared.

    Returns:
        One row a thing and value.
    """
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


def reproduce(comparison: Comparison, command: str) -> str:
    """Return the section that tells how everything is made again.

    Args:
        comparison: What was compared.
        command: That made the report; empty leaves it out.

    Returns:
        HTML.
    """
    ours = [group for group in comparison.groups if group.policies]
    lines = []
    for group in ours:
        seeds = ",".join(str(seed) for seed in group.seeds)
        lines.append(f"sparsebp run {_file_name(group)}" + (f" --seeds {seeds}" if seeds else ""))
    if command:
        lines.append(mask(command))
    versions = sorted({run.version for run in comparison.runs if run.version})
    commits = sorted({run.git_sha for run in comparison.runs if run.git_sha})
    made = f"Made with SparseBP {', '.join(versions)}" if versions else ""
    made += f", commit {', '.join(commits)}" if commits else ""
    said = "Save each recipe under the name that stands above it, then:" if ours else "No run here has a recipe."
    recipes = "".join(_recipe(group) for group in comparison.groups)
    return (
        f"<section><h2>How to make it again</h2>{f'<p>{escape(made)}.</p>' if made else ''}<p>{said}</p>"
        f"<pre><code>{escape(chr(10).join(lines))}</code></pre>{recipes}</section>"
    )


def _file_name(group: Group) -> str:
    return shlex.quote(f"{group.label.replace('#', '-')}.yaml")


def _recipe(group: Group) -> str:
    import yaml

    text = yaml.safe_dump(_plain(group.recipe), sort_keys=False, allow_unicode=True, width=100)
    if not group.policies:
        head = f"{escape(group.label)}: parameters, as another program logged them"
        return f"<details><summary>{head}</summary><pre><code>{escape(text)}</code></pre></details>"
    name = escape(_file_name(group))
    encoded = base64.b64encode(text.encode()).decode()
    link = f'<a download="{name}" href="data:text/yaml;base64,{encoded}">save</a>'
    return f"<details><summary>{name}</summary><p>{link}</p><pre><code>{escape(text)}</code></pre></details>"


def _plain(recipe: dict[str, Any]) -> dict[str, Any]:
    """The store is the reader's own business, and its address may name a machine."""
    tracking = recipe.get("tracking")
    return recipe | (
        {"tracking": {k: v for k, v in tracking.items() if k != "uri"}} if isinstance(tracking, dict) else {}
    )
