"""``sparsebp quickstart``: train dense, and with the same gradient for less work, and compare the two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.option import Changes, Format
from sparsebp_cli.cli.run import IDS, execute_plans, make_plans, write_ids
from sparsebp_cli.cli.screen import Output, console

if TYPE_CHECKING:
    from sparsebp_cli.compare import Comparison

RECIPES = ("quickstart-dense", "quickstart")


def quickstart(
    changes: Changes = None,
    ids: Annotated[Path | None, typer.Option(metavar="FILE", help=IDS)] = None,
    output: Format = Output.TABLE,
) -> None:
    """Train a small model twice, the second time with less work for the same gradient, and compare the two runs."""
    from sparsebp_cli.cli.starter import find_shipped
    from sparsebp_cli.compare import Question, compare_runs, load_all
    from sparsebp_cli.compare.choose import choose, local_candidates

    plans = make_plans([find_shipped(name).file for name in RECIPES], changes or [], None)
    if ids is not None:
        write_ids(ids, plans)
    followed = execute_plans(plans)
    if followed.exit_code:
        tell(followed.answer(), output, lambda _: None)
        raise typer.Exit(followed.exit_code)
    run_ids = [plan.run_id for plan in plans]
    runs, _ = load_all(choose(local_candidates(None), run_ids, None, ""))
    console().print(*describe_lesson(compare_runs(runs, Question()), run_ids), sep="\n")
    tell(followed.answer(), output, lambda _: None)  # `compare -o json` of these runs has the comparison


def describe_lesson(comparison: Comparison, ids: Sequence[str]) -> list[str]:
    """Return the result in the words of the comparison's statements, how to use it, and the commands that show more.
    ``ids`` are the runs' ids, the baseline's first."""
    from sparsebp_cli.compare.report.headline import find_main
    from sparsebp_cli.compare.words import say

    group = comparison.groups[-1]
    seen = "; ".join(map(say, find_main(group)))
    time = group.find("step time")
    withheld = [f"Step times are not shown: {time.reasons[0]}."] if time and time.reasons and not time.numbers else []
    return [
        f"Result: compared with dense, which computes every gradient, {group.label} is {seen}.",
        *withheld,
        'Use: `policy: lossless` in a recipe, `sbp.attach(model, "lossless")` in your own loop.',
        f"Next: `sparsebp compare {' '.join(ids)}` (every number), `sparsebp show {ids[-1]}` (the run and its notes), "
        "`sparsebp init study` (your model and data).",
    ]
