"""``sparsebp runs``: the runs of this machine."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.quantity import show_age
from sparsebp_cli.cli.screen import Output, console, make_table, print_json, print_line
from sparsebp_cli.cli.stored_run import describe_policies, read_plan
from sparsebp_cli.errors import RunNotFoundError
from sparsebp_cli.run import RunFolder, home, list_runs
from sparsebp_cli.run.journal import describe_unreadable, find_outline

STYLES = {"finished": "green", "failed": "red", "running": "cyan", "interrupted": "yellow"}


def runs(
    output: Format = Output.TABLE,
    limit: Annotated[int, typer.Option(min=1, help="Show the newest so many.")] = 20,
) -> None:
    """List runs, newest first."""
    found = list_runs()
    lines = [describe_run(folder) for folder in found[:limit]]
    if output is Output.JSON:
        print_json(lines)
        return
    if not lines:
        print_line(f"no runs yet under {home()}; `sparsebp run RECIPE` makes one")
        return
    from rich.text import Text

    table = make_table(
        "run", "name", "policy", "state", "step", "eval loss", "age", numbers=("step", "eval loss", "age")
    )
    for column in table.columns:  # never wrap an id, which is copied, or a number
        column.no_wrap = column.header in {"run", "step", "eval loss"}
    for line in lines:
        loss = "" if line["eval_loss"] is None else f"{line['eval_loss']:.4f}"
        state = Text(line["state"], style=STYLES.get(line["state"], ""))
        steps = f"{line['step']}/{line['max_steps']}"
        age = show_age(time.time() - line["created"])
        table.add_row(line["run_id"], Text(line["name"]), Text(line["policy"]), state, steps, loss, age)
    console().print(table)
    for line in lines:
        if line["problem"]:
            print_line(f"run {line['run_id']}: {line['problem']}")
    if len(found) > limit:
        print_line(f"{len(found) - limit} older runs are not shown; --limit {len(found)} shows all")


def describe_run(folder: RunFolder) -> dict[str, Any]:
    """Return a run's line of the table as plain values; the state of a run with a damaged plan is ``damaged``."""
    line: dict[str, Any] = {"run_id": folder.run_id, "name": "?", "policy": "?", "state": "damaged"}
    line |= {"step": 0, "max_steps": 0, "seed": None, "eval_loss": None, "created": 0.0, "folder": str(folder.path)}
    line["problem"] = ""
    try:
        plan = read_plan(folder)
        recipe = plan["recipe"]
        line |= {
            "name": str(recipe["name"]),
            "policy": describe_policies(recipe),
            "max_steps": recipe["training"]["max_steps"],
            "seed": recipe["training"]["seed"],
            "created": float(plan["created"]),
        }
    except RunNotFoundError as error:
        return line | {"problem": str(error).removeprefix(f"run {folder.run_id}: ")}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return line | {"problem": f"{folder.plan_file} is not a plan: {error!r}"}
    found = find_outline(folder.path)
    return line | {
        "state": str(folder.state()),
        "step": found.step,
        "eval_loss": found.eval_loss,
        "problem": describe_unreadable(found.unreadable),
    }
