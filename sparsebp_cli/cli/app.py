"""The command ``sparsebp``: its verbs, and the place where errors become one line and an exit code.

Nothing heavy is imported here or at the top of a verb's file, so that `sparsebp --help` answers at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from sparsebp_cli.cli.archive import archive
from sparsebp_cli.cli.assets import datasets, fetch, models
from sparsebp_cli.cli.audit import audit
from sparsebp_cli.cli.bench import bench
from sparsebp_cli.cli.compare import compare
from sparsebp_cli.cli.control import cancel, logs, resume
from sparsebp_cli.cli.data import data
from sparsebp_cli.cli.difference import diff
from sparsebp_cli.cli.evaluate import evaluate
from sparsebp_cli.cli.housekeeping import prune, rm
from sparsebp_cli.cli.label import note, tag
from sparsebp_cli.cli.outlet import Outlets
from sparsebp_cli.cli.policies import policies
from sparsebp_cli.cli.quickstart import quickstart
from sparsebp_cli.cli.rerun import rerun
from sparsebp_cli.cli.run import export, run
from sparsebp_cli.cli.runs import runs
from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.cli.show import show
from sparsebp_cli.cli.starter import init, new, recipes
from sparsebp_cli.cli.study import study
from sparsebp_cli.cli.targets import doctor, targets
from sparsebp_cli.cli.top import top
from sparsebp_cli.cli.tracking import sync, ui
from sparsebp_cli.cli.validate import schema, validate
from sparsebp_cli.cli.verb_help import Verb, Verbs
from sparsebp_cli.cli.worth import worth
from sparsebp_cli.errors import RunNotFoundError, SparseBPError, explain_system_error
from sparsebp_cli.run import find_deleted, home, keep_private


@dataclass
class Crash:
    """How unexpected errors are shown; ``shown`` prints the traceback to the screen."""

    shown: bool = False

    def describe(self, error: Exception) -> str:
        """Show the traceback or write it to a file, and return one line for the user."""
        line = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, OSError):  # a full disk or a missing permission is no defect, and needs no traceback
            if (text := explain_system_error(error)) and not self.shown:
                return text
            line = " ".join(str(error).split())
        trace = "".join(traceback.format_exception(error))
        if self.shown:
            return f"{line}\n{trace}".rstrip()
        file = home() / "error.log"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(trace, encoding="utf-8")
        except OSError:
            return f"{line} (`--debug` before the verb shows the traceback)"
        return f"{line} (the traceback is in {file}; `--debug` before the verb shows it)"


app: typer.Typer = typer.Typer(
    cls=Verbs,
    help="Fine-tune transformers with a policy that leaves a part of the backward pass out, and compare the result "
    "with dense training, which computes every gradient: quality, time, memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 a check or a gate failed, 2 wrong recipe or usage, 100 failed, 101 not finished, "
    "102 not found, 103 cancelled, 104 diverged, 130 and 143 interrupted.",
)
crash: Crash = Crash()

VERBS: dict[str, tuple[Callable[..., None], ...]] = {
    "Begin": (quickstart, init, new, recipes),
    "Runs": (run, study, resume, rerun, cancel, logs, tag, note, archive, prune, rm),
    "Results": (compare, evaluate, diff, runs, top, show, sync, ui),
    "Recipes": (validate, worth, data, export, schema, policies, models, datasets, fetch),
    "This machine and others": (doctor, audit, bench, targets),
}
# Verbs that write runs or the store; keep_private() applies to them. Other verbs write only files that the user names.
WRITING = {
    "run",
    "fetch",
    "quickstart",
    "study",
    "resume",
    "rerun",
    "cancel",
    "prune",
    "rm",
    "tag",
    "note",
    "sync",
    "ui",
    "doctor",
    "evaluate",
}
for panel, verbs in VERBS.items():
    for verb in verbs:
        app.command(cls=Verb, rich_help_panel=panel)(verb)


def show_version(requested: bool) -> None:
    """Print the version and end, if ``--version`` was given."""
    if requested:
        print(f"sparsebp {installed_version('sparsebp')}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - only its callback is used
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")] = False,
) -> None:
    crash.shown = debug
    if context.invoked_subcommand in WRITING:
        keep_private()


def main() -> None:
    """Run the command line of this process and exit."""
    with Outlets():
        try:
            app(prog_name="sparsebp")
        except SparseBPError as error:
            print_line(f"error: {' '.join(str(error).split())}", stderr=True)
            sys.exit(error.exit_code)
        except Exception as error:
            if isinstance(error, OSError) and (deleted := find_deleted(error)) and not crash.shown:
                print_line(f"error: {deleted}", stderr=True)
                sys.exit(RunNotFoundError.exit_code)
            print_line(f"error: {crash.describe(error)}", stderr=True)
            sys.exit(SparseBPError.exit_code)
