"""``sparsebp run``: execute recipes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import tell, warn
from sparsebp_cli.cli.answer.run_record import PlannedRun, RunOutcomes, RunPlans
from sparsebp_cli.cli.follow import Followed, follow_all, make_outcome, make_outcomes
from sparsebp_cli.cli.idle_key import find_idle_keys
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.option import Changes, Detach, Format, Like, OptionalRecipes, Seeds
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.cli.stored_run import check_plans, find_one, submit_all
from sparsebp_cli.cli.targets import as_change, complete_target
from sparsebp_cli.cli.validate import load_checked
from sparsebp_cli.entry_point import entry_points
from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.run import RunFolder, create_run, durable, home

if TYPE_CHECKING:
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.recipe.schema import Recipe


IDS = "Also write the ids of the runs to this file, one per line, as soon as they are known."


def run(  # noqa: PLR0913, PLR0917 - one parameter an option
    recipes: OptionalRecipes = None,
    like: Like = None,
    changes: Changes = None,
    seeds: Seeds = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the runs, instead of the recipe's name.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print settings and command of each run; start and write nothing.")
    ] = False,
    detach: Detach = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="TARGET",
            help="Where to train: a kind or a name that `sparsebp targets` lists.",
            autocompletion=complete_target,
        ),
    ] = None,
    max_parallel: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of runs that train at once on the target. The target's GPUs are divided among them.",
        ),
    ] = 1,
    ids: Annotated[Path | None, typer.Option(metavar="FILE", help=IDS)] = None,
    with_baseline: Annotated[
        bool,
        typer.Option(
            "--with-baseline",
            help="Also train each recipe with policy dense, directly before or after the recipe itself, on the same "
            "device.",
        ),
    ] = False,
    output: Format = Output.TABLE,
) -> None:
    """Train the runs that recipes describe. Several recipes or seeds run one after the other."""
    from sparsebp_cli.recipe.target import describe_settings

    files = _find_recipes(recipes or [], like)
    if with_baseline and max_parallel > 1:  # parallel runs would make step times unfair
        raise UsageError("--with-baseline trains one run at a time: leave out --max-parallel")
    changes = [*as_change(target), *(changes or [])]
    changes += [f"name={name}"] if name else []
    plans = make_plans(files, changes, seeds)
    if with_baseline:
        plans = _add_baselines(plans, files, changes)
    check_plans(plans)
    if dry_run:
        tell(RunPlans(plans=[_describe_plan(plan) for plan in plans]), output, _print_plans)
        return
    if text := describe_settings():
        warn(text)
    if ids is not None:
        write_ids(ids, plans)
    with Interrupts() as interrupts:
        jobs = submit_all([_write_plan(plan) for plan in plans], max_parallel)
        if detach:
            tell(make_outcomes([make_outcome(job.run) for job in jobs]), output, print_ids)
            return
        followed = follow_all(jobs, interrupts)
    tell(followed.answer(), output, lambda _: None)  # each was printed when it was over
    raise typer.Exit(followed.exit_code)


def make_plans(recipes: Sequence[Path], changes: Sequence[str], seeds: str | None) -> list[Plan]:
    """Make the plans of all recipes before any is started: all seeds of the first recipe, then those of the second. A
    ``plan.json`` can replace its recipe. ``--set`` changes apply to each. Without ``seeds``, make one plan per recipe
    with its own seed."""
    from sparsebp_cli.plan import make_plan
    from sparsebp_cli.recipe import parse_seeds, with_seed

    numbers = parse_seeds(seeds) if seeds is not None else None
    plans = []
    for file in recipes:
        recipe, origin, unknown = load_checked(file, changes)
        _warn_of_near_name(file, recipe, unknown)
        for text in find_idle_keys(recipe, [origin.resolve().parent, Path.cwd()]):
            warn(f"{file}: {text}")
        variants = [recipe] if numbers is None else [with_seed(recipe, number) for number in numbers]
        plans += [make_plan(variant, origin) for variant in variants]
    return plans


def _warn_of_near_name(file: Path, recipe: Recipe, unknown: Sequence[str]) -> None:
    """Warn of an installed model with nearly the name of one that is not here: a worker asks the hub for a minute."""
    from sparsebp_cli.source import MODELS

    name = recipe.model.name
    if name is None or not any(text.startswith("model.name:") for text in unknown):
        return
    if near := did_you_mean(name, entry_points(group=MODELS).names):
        print_line(f"warning: {file}: model.name: {name} is not on this machine{near}", stderr=True)


def _find_recipes(recipes: Sequence[Path], like: str | None) -> list[Path]:
    if (like is None) == (not recipes):
        given = "both" if recipes else "neither"
        raise UsageError(f"run needs recipe files, or --like RUN for the recipe of a stored run; got {given}")
    return [find_one(like).plan_file] if like is not None else list(recipes)


def print_ids(started: RunOutcomes) -> None:
    """Print the ids of runs, one a line."""
    for outcome in started.runs:
        print_line(outcome.run.run_id)


def execute_plans(plans: Sequence[Plan]) -> Followed:
    """Run plans one after the other to their end, without summaries."""
    check_plans(plans)
    with Interrupts() as interrupts:
        jobs = submit_all([_write_plan(plan) for plan in plans], max_parallel=1)
        return follow_all(jobs, interrupts, is_brief=True)


def _write_plan(plan: Plan) -> RunFolder:
    folder = create_run(plan.run_id)
    plan.save(folder.path)
    return folder


def write_ids(file: Path, plans: Sequence[Plan]) -> None:
    """Write the ids of plans to a file, one a line."""
    try:
        durable.write_file(file, "".join(f"{plan.run_id}\n" for plan in plans))
    except OSError as error:
        raise UsageError(f"--ids: cannot write {file}: {error.strerror}") from None


def _describe_plan(plan: Plan) -> PlannedRun:

    from sparsebp_cli.target import make_target

    folder, target = RunFolder(home() / "runs" / plan.run_id), make_target(plan.recipe.target)
    return PlannedRun(
        run_id=plan.run_id,
        plan=plan.model_dump(mode="json", exclude={"provenance": {"git_diff"}}),
        files={str(file): text for file, text in target.files(folder).items()},
        command=list(target.command(folder)),
    )


def _print_plans(found: RunPlans) -> None:
    import yaml

    for planned in found.plans:
        lines = [yaml.safe_dump(planned.plan, sort_keys=False, allow_unicode=True)]
        for file, text in planned.files.items():
            lines += [f"# {file}\n", *(f"#     {line}".rstrip() + "\n" for line in text.splitlines())]
        print_line("".join(lines) + f"# {shlex.join(planned.command)}")


def _add_baselines(plans: Sequence[Plan], recipes: Sequence[Path], changes: Sequence[str]) -> list[Plan]:
    """Add the dense plan of the same recipe and seed to each plan, and interleave the two. Machines drift: they get
    warm, and others use them. So dense and sparse alternate, and the first of a pair changes each time. ``plans`` are
    all seeds of the first recipe, then those of the second. Plans with the same baseline share it. Raise ``UsageError``
    if every plan is already dense."""
    num_seeds = len(plans) // len(recipes)
    ordered: list[Plan] = []
    known = {(plan.group, plan.recipe.training.seed) for plan in plans}
    for number, plan in enumerate(plans):
        file = recipes[number // num_seeds]
        # 58 characters: with -dense a name has at most 64.
        dense_changes = [*changes, "policy=dense", f"name={plan.recipe.name[:58]}-dense"]
        (dense,) = make_plans([file], dense_changes, str(plan.recipe.training.seed))
        key = (dense.group, dense.recipe.training.seed)
        if key in known:
            ordered.append(plan)
            continue
        known.add(key)
        ordered += [dense, plan] if len(ordered) % 4 == 0 else [plan, dense]
    if len(ordered) == len(plans):
        raise UsageError(
            "leave out --with-baseline: it adds no run, because each recipe is dense, or its dense version is already "
            "one of these runs"
        )
    times = sorted(plan.created for plan in ordered)  # runs are listed by creation time: keep their order of start
    return [plan.model_copy(update={"created": time}) for plan, time in zip(ordered, times, strict=True)]
