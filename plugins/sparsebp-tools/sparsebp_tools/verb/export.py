"""``sparsebp export``: write recipes for another scheduler."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.option import Changes, Format, Recipes, Seeds
from sparsebp_cli.cli.run import make_plans
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.cli.targets import as_change, complete_target


class ExportFormat(StrEnum):
    """The scheduler that the file is for."""

    SBATCH = "sbatch"
    K8S = "k8s"
    SKY = "sky"
    DSTACK = "dstack"


def export(
    recipes: Recipes,
    form: Annotated[
        ExportFormat,
        typer.Option("--format", "-f", help="Format for Slurm (sbatch), Kubernetes (k8s), SkyPilot (sky) or dstack."),
    ],
    changes: Changes = None,
    seeds: Seeds = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="TARGET",
            help="Use the options of this target: a kind or a name that `sparsebp targets` lists.",
            autocompletion=complete_target,
        ),
    ] = None,
    max_parallel: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of runs of a Slurm array that train at once.")
    ] = 1,
    output: Format = Output.TABLE,
) -> None:
    """Print a recipe as a batch script, manifest or task for a scheduler. Starts and writes nothing."""
    from sparsebp_tools.answer.export_record import ExportedRuns
    from sparsebp_tools.export.scheduler import export_dstack, export_kubernetes, export_sbatch, export_sky

    plans = make_plans(recipes, [*as_change(target), *(changes or [])], seeds)
    writers = {"k8s": export_kubernetes, "sky": export_sky, "dstack": export_dstack}
    text = export_sbatch(plans, max_parallel) if form is ExportFormat.SBATCH else writers[form.value](plans)
    found = ExportedRuns(format=form.value, text=text, runs=[plan.run_id for plan in plans])
    tell(found, output, lambda found: print_line(found.text.rstrip("\n")))
