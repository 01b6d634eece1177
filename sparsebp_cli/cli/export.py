"""``sparsebp export``: a recipe as a file for another scheduler."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from sparsebp_cli.cli.option import Changes, Recipes, Seeds
from sparsebp_cli.cli.run import make_plans
from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.cli.targets import complete_target


class ExportFormat(StrEnum):
    """The scheduler that the file is for."""

    SBATCH = "sbatch"
    K8S = "k8s"
    SKY = "sky"
    DSTACK = "dstack"


def export(
    recipes: Recipes,
    form: Annotated[ExportFormat, typer.Option("--format", "-f", help="Slurm, Kubernetes, SkyPilot or dstack.")],
    changes: Changes = None,
    seeds: Seeds = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="Whose options are used.", autocompletion=complete_target),
    ] = None,
    max_parallel: Annotated[int, typer.Option(min=1, help="Runs at once, in an array of Slurm.")] = 1,
) -> None:
    """Print a recipe as a batch script, a manifest or a task, with the plan in it. Nothing is started or written."""
    from sparsebp_cli.target.export import export_dstack, export_kubernetes, export_sbatch, export_sky

    plans = make_plans(recipes, [*([f"target={target}"] if target else []), *(changes or [])], seeds)
    match form:
        case ExportFormat.SBATCH:
            text = export_sbatch(plans, max_parallel)
        case ExportFormat.K8S:
            text = export_kubernetes(plans)
        case ExportFormat.SKY:
            text = export_sky(plans)
        case ExportFormat.DSTACK:
            text = export_dstack(plans)
    print_line(text.rstrip("\n"))
