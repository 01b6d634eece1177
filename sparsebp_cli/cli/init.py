"""``sparsebp recipes``, ``init`` and ``new``: the shipped recipes, a starter folder, a package for a policy."""

from __future__ import annotations

import shlex
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sparsebp_cli.cli.answer import FileList, tell
from sparsebp_cli.cli.answer.recipe_record import ShippedLine, ShippedList
from sparsebp_cli.cli.completion import complete_shipped
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.screen import Output, can_ask, console, make_table, print_line
from sparsebp_cli.cli.starter import Task
from sparsebp_cli.entry_point import find_tool, tell_home
from sparsebp_cli.errors import RecipeError, UsageError
from sparsebp_cli.run import interpreter


class RecipeAction(StrEnum):
    """Actions on the shipped recipes."""

    COPY = "copy"


def recipes(
    action: Annotated[
        RecipeAction | None,
        typer.Argument(metavar="copy", help="Copy a recipe, and the base recipe that it changes (key `base`)."),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The recipe to copy.", autocompletion=complete_shipped)
    ] = None,
    to: Annotated[Path, typer.Argument(metavar="TO", help="Folder to copy to; created if it does not exist.")] = Path(),
    output: Format = Output.TABLE,
) -> None:
    """List the included recipes; `copy NAME [TO]` copies one into a folder. Overwrites nothing."""
    from sparsebp_cli.cli.starter import collect_files, find_shipped, list_shipped, write_files

    if action is not None:
        if name is None:
            raise UsageError("recipes copy needs the name of a recipe; `sparsebp recipes` lists them")
        files = collect_files(find_shipped(name))
        write_files(to, files)
        tell(FileList(files=[str(to / file) for file in files], next=[]), output, _print_files)
        return
    lines = [
        ShippedLine(name=one.name, short_name=one.short_name, summary=one.summary, file=str(one.file))
        for one in list_shipped()
    ]
    tell(ShippedList(recipes=lines), output, _print_recipes)


def _print_files(found: FileList) -> None:
    for file in found.files:
        print_line(file)
    for number, command in enumerate(found.next):
        print_line(f"{'      ' if number else 'next: '}{command}")


def _print_recipes(found: ShippedList) -> None:
    table = make_table("name", "what it shows")
    table.columns[0].no_wrap = True  # names to copy
    for one in found.recipes:
        table.add_row(one.short_name, one.summary)
    console().print(table)
    print_line("run: sparsebp run NAME; a paper: sparsebp study papers/NAME; copy: sparsebp recipes copy NAME [TO]")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")] = Path("study"),
    task: Annotated[
        Task | None,
        typer.Option(metavar="TASK", help=f"Kind of task: {', '.join(Task)}.", show_default="asked in a terminal"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model: an installed name, a hub id or a path.", show_default="austen-llama"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The training data: an installed name, a hub id, a file or a folder.",
            show_default="an installed dataset for the task",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Names of the data's columns, such as question,reply.",
            show_default="the usual names, if present",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Convert this config file of axolotl, TRL, LLaMA-Factory or torchtune to a recipe.",
        ),
    ] = None,
    output: Format = Output.TABLE,
) -> None:
    """Write a project folder: two recipes, targets, an example policy with its test, a README."""
    from sparsebp_cli.cli.starter import check_new, default_data, make_starter, write_files

    check_new(folder)
    if file is not None:
        if any((task, model, data, columns)):
            raise UsageError("with --from, leave out --task, --model, --data and --columns: the file sets them")
        _convert(file, folder, output)
        return
    if task is None:
        if output is Output.JSON or not can_ask():
            raise UsageError(f"init needs --task if there is no terminal; allowed: {', '.join(Task)}")
        task = Task(typer.prompt("Task", default=Task.COMPLETION, type=Task))
        model = model or typer.prompt("Model (installed name, hub id or path)", default="austen-llama")
        usual = default_data(task)
        data = data or typer.prompt("Data (installed name, hub id, file or folder)", default=usual)
    names = None if columns is None else columns.split(",")
    data = None if data is None else _absolute(data)
    files = make_starter(folder, task, _absolute(model or "austen-llama"), data, names)
    _check_recipes(files)
    write_files(folder, files)
    command = f"cd {shlex.quote(str(folder))}; README.md has the commands"
    tell(FileList(files=[str(folder / file) for file in files], next=[command]), output, _print_files)


def _convert(source: Path, folder: Path, output: Output) -> None:
    from sparsebp_cli.cli.starter import write_files

    if (convert := find_tool("convert")) is None:
        raise UsageError(f"init --from is {tell_home('sparsebp-tools')}")
    found = convert(source, _absolute)
    file = folder / f"{source.stem}.yaml"
    write_files(folder, {file.name: found.text})
    tell(FileList(files=[str(file)], next=[f"sparsebp validate {shlex.quote(str(file))}"]), output, _print_files)
    if found.left and output is Output.TABLE:
        print_line(f"not converted: {', '.join(found.left)}; the end of the file gives the reasons")


def _absolute(name: str) -> str:
    """Return an existing path as absolute, because the recipe lies in another folder. Return other names unchanged;
    installed names take precedence."""
    from sparsebp_cli.entry_point import entry_points
    from sparsebp_cli.source import DATASETS, MODELS, find_path

    if any(name in entry_points(group=group).names for group in (DATASETS, MODELS)):
        return name
    return str(find_path(name, [Path.cwd()]) or name)


def _check_recipes(files: dict[str, str]) -> None:
    """Check the recipes before they are written, so that a wrong model or wrong data leave nothing behind."""
    from sparsebp_cli.cli.starter import write_files
    from sparsebp_cli.cli.validate import load_checked

    recipes = {name: text for name, text in files.items() if name.endswith(".yaml") and name != "targets.yaml"}
    # Use a temporary folder first: a recipe that fails its check leaves nothing behind.
    with tempfile.TemporaryDirectory(prefix="sparsebp-") as folder:
        write_files(Path(folder), {name: text for name, text in files.items() if "/" not in name})
        for name in recipes:
            try:
                load_checked(Path(folder) / name, [])
            except RecipeError as error:
                text = error.text.replace(f"{folder}/", "").replace(f"{folder}, ", "")
                raise UsageError(f"{error.key}: {text}; nothing was written") from None


class Starter(StrEnum):
    """The kinds of packages that `new` writes."""

    POLICY = "policy"


def new(
    kind: Annotated[Starter, typer.Argument(metavar="policy", help="Write a package with one policy.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the policy in recipes, such as peak-rows.")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A new or empty folder.", show_default="sparsebp-NAME")
    ] = None,
    output: Format = Output.TABLE,
) -> None:
    """Write an installable package for a policy of your own: module, entry point, tests, README."""
    from sparsebp_cli.cli.starter import check_new, make_package, write_files
    from sparsebp_cli.policy.discovery import find_policies

    files = make_package(name)
    if known := find_policies().get(name):
        raise UsageError(f"there is a {kind} {name!r} of {known.source} already; choose another name")
    folder = folder or Path(f"sparsebp-{name}")
    check_new(folder)
    write_files(folder, files)
    python, package = shlex.quote(interpreter.PYTHON), shlex.quote(str(folder))
    install = f"{python} -m pip install --editable {shlex.quote(f'{folder}[test]')}"
    written = FileList(files=[str(folder / file) for file in files], next=[install, f"{python} -m pytest {package}"])
    tell(written, output, _print_files)
