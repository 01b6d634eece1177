"""``sparsebp validate``: check recipes and the files that they name, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import Problem, tell
from sparsebp_cli.cli.answer.recipe_record import CheckedRecipe, CheckedRecipes
from sparsebp_cli.cli.idle_key import find_idle_keys
from sparsebp_cli.cli.option import Changes, Format, Recipes, Seeds
from sparsebp_cli.cli.screen import Output, print_error, print_line
from sparsebp_cli.cli.worker_answer import ask_worker
from sparsebp_cli.entry_point import find_tool, tell_home
from sparsebp_cli.errors import RecipeError, SparseBPError, UsageError
from sparsebp_cli.run import RunFolder

if TYPE_CHECKING:
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.recipe import PlacedRecipe, Recipe


Probing = Annotated[
    bool,
    typer.Option(
        "--probe",
        help="Also compute the first training step, without an update, and print its FLOPs and time relative to dense, "
        "and the fraction that the policy keeps.",
    ),
]


FORECAST = "Memory and time"
Forecasting = Annotated[
    bool,
    typer.Option(
        "--memory",
        help="Only estimate the memory of a step, and list recipe changes that save memory. Loads no weights: "
        "config.json is enough.",
        rich_help_panel=FORECAST,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="With --memory: the device, such as h100-80gb, or a memory size, such as 48gb. Default: this machine's "
        "CPU.",
        rich_help_panel=FORECAST,
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        "--rate",
        metavar="TFLOPS|RUN",
        help="With --memory: estimate the hours of training from this speed in TFLOP/s, or from the speed of this run.",
        rich_help_panel=FORECAST,
    ),
]


def validate(
    recipes: Recipes,
    changes: Changes = None,
    seeds: Seeds = None,
    probe: Probing = False,
    memory: Forecasting = False,
    gpu: Gpu = None,
    rate: Rate = None,
    output: Format = Output.TABLE,
) -> None:
    """Check recipes and studies: keys, values, combinations, and the files that they name. Exits with 2 on errors."""
    from sparsebp_cli.plan import make_plan
    from sparsebp_cli.recipe import parse_seeds
    from sparsebp_cli.recipe.description import describe_policies
    from sparsebp_cli.recipe.loader import is_targets_file

    studies_tool = find_tool("study")
    for file in filter(is_targets_file, recipes):
        print_line(f"skipped {file}: it defines targets and is not a recipe")
    recipes = [file for file in recipes if not is_targets_file(file)]
    if memory:
        if (tool := find_tool("forecast")) is None:
            raise UsageError(f"--memory is {tell_home('sparsebp-tools')}")
        tool.load()(recipes, changes or [], gpu, rate, output)
        return
    given = {"--gpu": gpu, "--rate": rate}
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} needs --memory")
    num_runs, checked, studies = len(parse_seeds(seeds)) if seeds is not None else 1, [], []
    for file in recipes:
        try:
            if studies_tool is not None and studies_tool.is_study(file):
                studies += studies_tool.check(file, changes or [], check_sources)
                continue
            recipe, origin, unknown = load_checked(file, changes or [])
            idle = find_idle_keys(recipe, [origin.resolve().parent, Path.cwd()])
            notes = [*warn_of_device(recipe), *(f"warning: {text}" for text in idle)]
            notes += warn_of_data(recipe, origin, unknown)
            notes += preview(make_plan(recipe, file)) if probe else []
        except SparseBPError as error:
            # What was found in data or model names neither the recipe nor its line.
            print_error(error if isinstance(error, RecipeError) else UsageError(f"{file}: {error}"))
            checked.append(CheckedRecipe(file=str(file), is_right=False, error=Problem.of(error)))
            continue
        one = CheckedRecipe(
            file=str(file),
            is_right=True,
            name=recipe.name,
            model=recipe.model.name or f"random {(recipe.model.config or {}).get('model_type')}",
            dataset=recipe.dataset.name,
            policy=describe_policies(recipe.model_dump(mode="json")),
            max_steps=recipe.training.max_steps,
            num_runs=num_runs,
            unknown=unknown,
            notes=notes,
        )
        checked.append(one)
        _print_checked(one)
    tell(
        CheckedRecipes(recipes=checked, studies=studies), output, lambda _: None
    )  # each was printed when it was checked
    if not all(one.is_right for one in checked):
        raise typer.Exit(UsageError.exit_code)


def _print_checked(found: CheckedRecipe) -> None:
    steps = f"{found.max_steps} steps, {found.num_runs} run{'s' * ((found.num_runs or 1) > 1)}"
    what = f"model {found.model}, data {found.dataset}, policy {found.policy}, {steps}"
    print_line(f"ok {found.file}: {found.name}: {what}")
    for text in found.unknown:
        print_line(f"   not checked here: {text}")
    for line in found.notes:
        print_line(f"   {line}")


def preview(plan: Plan) -> list[str]:
    """Return a line about a step's cost against dense; none if it is the same. Train nothing. Raise
    ``UsageError`` if model or data cannot be loaded as the recipe says, ``RunFailedError`` if the process failed."""
    return [str(line) for line in ask_worker("preview", plan, "computes a trial step")["lines"]]


def warn_of_device(recipe: Recipe) -> list[str]:
    """Return a line if a recipe requests a GPU of this machine and there is none."""
    from sparsebp_cli.target.local import list_gpus

    if recipe.target.kind != HERE or recipe.target.device != "cuda" or Path("/dev/kfd").exists() or list_gpus():
        return []
    return ["warning: target.device: cuda, and nvidia-smi lists no GPU on this machine: the run would fail"]


def warn_of_data(recipe: Recipe, origin: Path, unknown: Sequence[str]) -> list[str]:
    """Tokenise the data and return a line for each problem. Return nothing if the data are not on this machine, or no
    tokenizer is needed to find problems. Raise ``UsageError`` if no example would be left."""
    from sparsebp_cli.plan import make_plan
    from sparsebp_cli.source import needs_tokens

    if any(text.startswith(("model", "dataset")) for text in unknown):
        return []
    if not needs_tokens(recipe.dataset, [origin.resolve().parent, Path.cwd()]):
        return []
    answer = ask_worker("data_preview", make_plan(recipe, origin), "reads the data")
    return [f"{level}: {text}" for level, text in answer["warnings"] if level == "warning"]


PLAN = "plan.json"
HERE = "local"  # the target kind for this machine


def load_checked(file: Path, changes: Sequence[str]) -> tuple[Recipe, Path, list[str]]:
    """Read a recipe, or the recipe in a ``plan.json``, apply ``--set`` changes, and check its model and data. Return
    the recipe, the file to which its paths are relative, and a sentence for each thing that this machine cannot check.
    Raise ``RecipeError`` with the place of the problem."""
    from sparsebp_cli.cli.epochs import derive_steps
    from sparsebp_cli.recipe import load_placed, load_stored

    if file.name != PLAN:
        placed = load_placed(file, changes)
        unknown = check_sources(placed, [file.resolve().parent, Path.cwd()])
        return derive_steps(placed, file, unknown), file, unknown
    stored = RunFolder(file.parent).read_plan()
    placed = load_stored(stored["recipe"], str(file), changes)
    # The code is that of the working folder. Paths became absolute when the first plan was made.
    origin = Path.cwd() / str(stored.get("provenance", {}).get("recipe_file") or PLAN)
    return placed.recipe, origin, check_sources(placed, [origin.resolve().parent, Path.cwd()])


def check_sources(placed: PlacedRecipe, folders: Sequence[Path]) -> list[str]:
    """Check the model and the data of a recipe. Relative paths are searched in the folders in order. Return a sentence
    for each thing that this machine cannot check. Raise ``RecipeError`` for problems."""
    from sparsebp_cli.policy.field_error import FieldError
    from sparsebp_cli.recipe.check import first_error
    from sparsebp_cli.recipe.evaluation import has_own_worker
    from sparsebp_cli.source import inspect_sources

    if not has_own_worker(placed.recipe):
        return ["model and data: only the worker that target.worker names reads them"]
    is_here = placed.recipe.target.kind == HERE
    problems = list(inspect_sources(placed.recipe, list(dict.fromkeys(folders)), is_here=is_here))
    if wrong := [FieldError(found.location, found.text) for found in problems if found.kind == "wrong"]:
        raise first_error(placed.tree, wrong)
    return [f"{FieldError(found.location, '').key}: {found.text}" for found in problems]
