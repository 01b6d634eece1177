"""``sparsebp quickstart``: trains dense and with the same gradient for less work, and compares the two runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.option import Changes
from sparsebp_cli.cli.run import IDS, execute_plans, make_plans, write_ids
from sparsebp_cli.cli.screen import console

if TYPE_CHECKING:
    from sparsebp_cli.compare import Comparison

RECIPES = ("quickstart-dense", "quickstart")


def quickstart(
    changes: Changes = None,
    ids: Annotated[Path | None, typer.Option(metavar="FILE", help=IDS)] = None,
) -> None:
    """Train dense and with the same gradient for less work, and compare the two: a minute or two on two cores."""
    from sparsebp_cli.compare import Question, View, compare_runs, load_all, table
    from sparsebp_cli.compare.choose import choose, local_candidates
    from sparsebp_cli.starter import find_shipped

    plans = make_plans([find_shipped(name).file for name in RECIPES], changes or [], None)
    if ids is not None:
        write_ids(ids, plans)
    if code := execute_plans(plans, max_parallel=1):
        raise typer.Exit(code)
    runs, _ = load_all(choose(local_candidates(None), [plan.run_id for plan in plans], None, ""))
    comparison = compare_runs(runs, Question())
    console().print(*table(comparison, View()), sep="\n", crop=False)
    console().print(*describe_lesson(comparison, plans[1].run_id), sep="\n")


def describe_lesson(comparison: Comparison, run_id: str) -> list[str]:
    """Return what was seen, in the words of the comparison's verdict; how to use it; and where to go on."""
    from sparsebp_cli.compare.verdict import split_statements

    group = comparison.groups[-1]
    executed, dense = group.cost.executed_flops, group.cost.dense_flops
    share = f", and its backward executed {executed / dense:.0%} of the multiplications" if executed and dense else ""
    quality, *further = split_statements(group.verdict)
    seen = "; ".join([quality, *further[:1]])  # the second statement is about time; the rest stands in the comparison
    return [
        f"Seen: {group.label} is {seen}{share}.",
        'Use: `policy: lossless` in a recipe, `sbp.attach(model, "lossless")` in your own loop.',
        f"Next: `sparsebp init study` (your model and data), `sparsebp recipes`, `sparsebp show {run_id}`.",
    ]
