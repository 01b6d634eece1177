"""``sparsebp targets`` and ``sparsebp doctor``: list targets, and check whether they and this machine work."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import Checked, tell
from sparsebp_cli.cli.answer.machine_record import CheckReport, TargetLine, TargetList
from sparsebp_cli.cli.exit_code import CHECK_FAILED
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.screen import Output, console, make_table, print_line
from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparsebp_cli.target import CheckResult

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


class Action(StrEnum):
    """Actions on targets."""

    CHECK = "check"


def complete_target(incomplete: str) -> list[str]:
    """Return the kinds and names that begin with the typed text."""
    return [line.name for line in describe_targets() if line.name.startswith(incomplete)]


def as_change(target: str | None) -> list[str]:
    """Return the recipe changes for ``--target``. Raise UsageError for an unknown name."""
    from sparsebp_cli.recipe.target import find_target, named_targets

    if target is None:
        return []
    if re.fullmatch(r"[\w.-]+", target) and target not in named_targets():
        find_target(target)  # the recipe's own error would name a key that the user did not type
    return [f"target={target}"]


def targets(
    action: Annotated[Action | None, typer.Argument(metavar="check", help="Check that targets work.")] = None,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="A name in targets.yaml, or a kind, such as docker.", autocompletion=complete_target
        ),
    ] = None,
    output: Format = Output.TABLE,
) -> None:
    """List the targets, the places where runs can train; `check NAME` tests one. Exits with 1 if this test fails."""
    if action is None:
        from sparsebp_cli.recipe.target import targets_file

        tell(TargetList(targets=describe_targets(), file=str(targets_file())), output, _print)
        return
    if not names:
        raise UsageError("targets check needs the name of a target; `sparsebp targets` lists them")
    _report({name: _check(name) for name in names}, output)


def describe_targets() -> list[TargetLine]:
    """Return every installed kind and every named target."""
    from sparsebp_cli.recipe.target import find_targets, named_targets

    lines = []
    for kind, found in find_targets().items():
        summary = (found.options_class.__doc__ or "").partition("\n")[0] if not found.problem else found.problem
        if kind == "local":
            summary = "A separate process on this machine."
        lines.append(TargetLine(name=kind, kind=kind, source=found.source, broken=bool(found.problem), text=summary))
    for name, node in named_targets().items():
        options = {key: value for key, value in node.plain.items() if key != "kind"}
        text = ", ".join(f"{key}: {value}" for key, value in options.items())
        kind = str(node.plain.get("kind", "local"))
        lines.append(TargetLine(name=name, kind=kind, source="targets.yaml", broken=False, text=text))
    return lines


def _print(found: TargetList) -> None:
    from rich.text import Text

    table = make_table("name", "kind", "source", "what")
    for line in found.targets:
        table.add_row(line.name, line.kind, line.source, Text(line.text), style="red" if line.broken else None)
    console().print(table)
    print_line(f"names are read from {found.file}")


def _check(name: str) -> list[CheckResult]:
    from sparsebp_cli.recipe.target import named_target_section
    from sparsebp_cli.target import make_target

    return list(make_target(named_target_section(name)).check())


def _report(results: Mapping[str, Sequence[CheckResult]], output: Output) -> None:
    """Answer with the results of checks, by subject, and exit with 1 if any failed."""
    checks = {name: [Checked(**result._asdict()) for result in found] for name, found in results.items()}
    is_usable = not any(one.level == "fail" for found in checks.values() for one in found)
    tell(CheckReport(is_usable=is_usable, checks=checks), output, _print_checks)
    if not is_usable:
        raise typer.Exit(CHECK_FAILED)


def _print_checks(report: CheckReport) -> None:
    from rich.text import Text

    for name, found in report.checks.items():
        table = make_table("", "what", "found", title=name if len(report.checks) > 1 else "")
        for one in found:
            text = one.text + (f"\n-> {one.hint}" if one.hint else "")
            table.add_row(Text(one.level, style=STYLES[one.level]), one.what, Text(text))
        console().print(table)


def doctor(output: Format = Output.TABLE) -> None:
    """Check this machine: packages, torch, disk, tracking store, plug-ins. Exits with 1 if something is broken."""
    from sparsebp_cli.cli.checkup import check_all

    _report({"this machine": check_all()}, output)
