"""``sparsebp schema``: JSON schemas of what users write and of what verbs answer; the text that tells programs so."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

import typer

from sparsebp_cli.cli.answer import speech, tell
from sparsebp_cli.cli.answer.kind import KINDS, document_schema
from sparsebp_cli.cli.answer.recipe_record import SchemaList
from sparsebp_cli.cli.exit_code import EXIT_CODES
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.screen import Output, print_json, print_line
from sparsebp_cli.errors import UsageError

SKILL = ("starter", "skill", "SKILL.md")  # below the package


def schema(
    study: Annotated[bool, typer.Option("--study", help="That of the files of `sparsebp study`.")] = False,
    every: Annotated[
        bool,
        typer.Option("--all", help="Those of recipes, studies and every document of `-o json`; exit codes."),
    ] = False,
    skill: Annotated[
        bool, typer.Option("--skill", help="Instead: the SKILL.md that tells an agent how to use this command.")
    ] = False,
    output: Format = Output.TABLE,  # schemas are JSON in any case; programs may say so
) -> None:
    """Print the JSON schema of recipes, with the options of every installed policy, or another one, or all."""
    from sparsebp_cli.recipe import recipe_schema
    from sparsebp_cli.study.schema import study_schema

    if study + every + skill > 1:
        raise UsageError("choose one of --study, --all, --skill")
    if skill and output is Output.JSON:
        raise UsageError("--skill prints Markdown: leave out -o json")
    if skill:
        text = files("sparsebp_cli").joinpath(*SKILL).read_text(encoding="utf-8")
        print_line(text.rstrip("\n"))
    elif every:
        tell(make_list(), Output.JSON, print_json)
    else:
        speech.print(study_schema() if study else recipe_schema())


def make_list() -> SchemaList:
    """Return every schema: of each kind of document, and of the files that users write."""
    from sparsebp_cli.recipe import recipe_schema
    from sparsebp_cli.study.schema import study_schema

    verbs: dict[str, list[str]] = {}
    for kind in KINDS:
        for verb in kind.verbs:
            verbs.setdefault(verb, []).append(kind.name)
    return SchemaList(
        documents={kind.name: document_schema(kind) for kind in KINDS},
        verbs=dict(sorted(verbs.items())),
        files={"recipe": recipe_schema(), "study": study_schema()},
        exit_codes={str(code): meaning for code, meaning in EXIT_CODES.items()},
    )
