"""``sparsebp schema``: print JSON schemas of user files and of answers, and the guide for programs."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

import typer

from sparsebp_cli.cli.answer import speech, tell
from sparsebp_cli.cli.answer.recipe_record import SchemaList
from sparsebp_cli.cli.exit_code import EXIT_CODES
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.screen import Output, print_json, print_line
from sparsebp_cli.cli.stored_run import find_studies
from sparsebp_cli.entry_point import find_tool
from sparsebp_cli.errors import UsageError

SKILL = ("cli", "starter", "skill", "SKILL.md")  # path inside the package


def schema(
    study: Annotated[bool, typer.Option("--study", help="Print the schema of study files instead.")] = False,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Print the schemas of recipes, studies and each command's JSON output, and the exit codes."
        ),
    ] = False,
    skill: Annotated[
        bool, typer.Option("--skill", help="Print a SKILL.md instead, which explains SparseBP to an AI agent.")
    ] = False,
    output: Format = Output.TABLE,  # schemas are always JSON; programs may request it anyway
) -> None:
    """Print the JSON schema of recipes, with the options of every installed policy; or other schemas."""
    from sparsebp_cli.recipe import recipe_schema

    if study + every + skill > 1:
        raise UsageError("give only one of --study, --all and --skill")
    if skill and output is Output.JSON:
        raise UsageError("--skill prints Markdown: leave out -o json")
    if skill:
        text = files("sparsebp_cli").joinpath(*SKILL).read_text(encoding="utf-8")
        print_line(text.rstrip("\n"))
    elif every:
        tell(make_list(), Output.JSON, print_json)
    else:
        speech.print(find_studies("--study").make_schema() if study else recipe_schema())


def make_list() -> SchemaList:
    """Return every schema: of each kind of document, and of user files."""
    from sparsebp_cli.cli.answer.kind import KINDS, document_schema
    from sparsebp_cli.recipe import recipe_schema

    tool = find_tool("study")
    verbs: dict[str, list[str]] = {}
    for kind in KINDS:
        for verb in kind.verbs:
            verbs.setdefault(verb, []).append(kind.name)
    return SchemaList(
        documents={kind.name: document_schema(kind) for kind in KINDS},
        verbs=dict(sorted(verbs.items())),
        files={"recipe": recipe_schema()} | ({} if tool is None else {"study": tool.make_schema()}),
        exit_codes={str(code): meaning for code, meaning in EXIT_CODES.items()},
    )
