"""``sparsebp doctor``: checks this machine, and says how to mend it."""

from __future__ import annotations

import typer

from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.screen import Output, console, make_table, print_json

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(output: Format = Output.TABLE) -> None:
    """Check this machine: packages, torch, disk, tracking store, plugins. Exit code 1 when something is broken."""
    from sparsebp_cli.cli.checkup import check_all

    findings = check_all()
    if output is Output.JSON:
        print_json([finding._asdict() for finding in findings])
    else:
        from rich.text import Text

        table = make_table("", "what", "found")
        for finding in findings:
            text = finding.text + (f"\n-> {finding.hint}" if finding.hint else "")
            table.add_row(Text(finding.level, style=STYLES[finding.level]), finding.what, Text(text))
        console().print(table)
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)
