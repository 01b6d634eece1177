"""``sparsebp targets`` and ``sparsebp doctor``: the targets for plans and this machine, and whether they work."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.screen import Output, console, make_table, print_json, print_line
from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from sparsebp_cli.target import CheckResult

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


class Action(StrEnum):
    """Actions on targets."""

    CHECK = "check"


def complete_target(incomplete: str) -> list[str]:
    """Return the kinds and names that begin with the typed text."""
    return [line["name"] for line in describe_targets() if line["name"].startswith(incomplete)]


def targets(
    action: Annotated[Action | None, typer.Argument(metavar="check", help="Test whether targets work.")] = None,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Kinds, or names of targets.yaml.", autocompletion=complete_target),
    ] = None,
    output: Format = Output.TABLE,
) -> None:
    """List target kinds and the targets of targets.yaml; `check NAME` tests one. Exit code 1 if it cannot be used."""
    if action is None:
        _list(output)
        return
    if not names:
        raise UsageError("targets check needs the name of a target; `sparsebp targets` lists them")
    _report({name: _check(name) for name in names}, output)


def describe_targets() -> list[dict[str, Any]]:
    """Return every installed kind and every named target as plain values."""
    from sparsebp_cli.recipe.target import find_targets, named_targets

    lines: list[dict[str, Any]] = []
    for kind, found in find_targets().items():
        summary = (found.options_class.__doc__ or "").partition("\n")[0] if not found.problem else found.problem
        if kind == "local":
            summary = "A process of its own on this machine."
        lines.append(
            {"name": kind, "kind": kind, "source": found.source, "broken": bool(found.problem), "text": summary}
        )
    for name, node in named_targets().items():
        options = {key: value for key, value in node.plain.items() if key != "kind"}
        text = ", ".join(f"{key}: {value}" for key, value in options.items())
        lines.append({"name": name, "kind": str(node.plain.get("kind", "local")), "source": "targets.yaml"})
        lines[-1] |= {"broken": False, "text": text}
    return lines


def _list(output: Output) -> None:
    from rich.text import Text

    from sparsebp_cli.recipe.target import targets_file

    lines = describe_targets()
    if output is Output.JSON:
        print_json(lines)
        return
    table = make_table("name", "kind", "source", "what")
    for line in lines:
        table.add_row(
            line["name"], line["kind"], line["source"], Text(line["text"]), style="red" if line["broken"] else None
        )
    console().print(table)
    print_line(f"names are read from {targets_file()}")


def _check(name: str) -> list[CheckResult]:
    from sparsebp_cli.recipe.target import named_target_section
    from sparsebp_cli.target import make_target

    return list(make_target(named_target_section(name)).check())


def _report(results: dict[str, list[CheckResult]], output: Output, *, is_single: bool = False) -> None:
    """Print the results of checks by what was checked, and exit with 1 if any failed. A single one has no name."""
    if output is Output.JSON:
        plain = {name: [result._asdict() for result in found] for name, found in results.items()}
        print_json(next(iter(plain.values())) if is_single else plain)
    else:
        from rich.text import Text

        for name, found in results.items():
            table = make_table("", "what", "found", title=name if len(results) > 1 else "")
            for result in found:
                text = result.text + (f"\n-> {result.hint}" if result.hint else "")
                table.add_row(Text(result.level, style=STYLES[result.level]), result.what, Text(text))
            console().print(table)
    if any(result.level == "fail" for found in results.values() for result in found):
        raise typer.Exit(1)


def doctor(output: Format = Output.TABLE) -> None:
    """Check this machine: packages, torch, disk, tracking store, plugins. Exit code 1 when something is broken."""
    from sparsebp_cli.cli.checkup import check_all

    _report({"this machine": check_all()}, output, is_single=True)
