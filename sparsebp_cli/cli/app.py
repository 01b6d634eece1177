"""Define the command ``sparsebp`` and its subcommands, and turn errors into one line and an exit code.

This module and the subcommands' modules import nothing heavy at the top, so that `sparsebp --help` answers at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebp_cli.cli.answer import ErrorAnswer, Problem, speech, wants_json
from sparsebp_cli.cli.archive import archive
from sparsebp_cli.cli.compare import compare
from sparsebp_cli.cli.control import cancel, logs, resume
from sparsebp_cli.cli.data import data
from sparsebp_cli.cli.exit_code import CHECK_FAILED, SHORT
from sparsebp_cli.cli.housekeeping import prune, rm
from sparsebp_cli.cli.init import init, new, recipes
from sparsebp_cli.cli.label import tag
from sparsebp_cli.cli.outlet import Outlets
from sparsebp_cli.cli.plugin import load_verbs
from sparsebp_cli.cli.policies import policies
from sparsebp_cli.cli.quickstart import quickstart
from sparsebp_cli.cli.run import run
from sparsebp_cli.cli.runs import runs
from sparsebp_cli.cli.schema import schema
from sparsebp_cli.cli.screen import print_error, print_line
from sparsebp_cli.cli.show import show
from sparsebp_cli.cli.targets import doctor, targets
from sparsebp_cli.cli.tracking import sync
from sparsebp_cli.cli.validate import validate
from sparsebp_cli.cli.verb_help import EXAMPLES, Verb, Verbs
from sparsebp_cli.errors import (
    RunNotFoundError,
    SparseBPError,
    UsageError,
    explain_system_error,
    first_line,
    is_out_of_memory,
)
from sparsebp_cli.run import find_deleted, home, keep_private


def _has_working_folder() -> bool:
    try:
        return Path.cwd().exists()
    except OSError:
        return False


MORE_MEMORY = "end other programs, raise `ulimit -v`, or use a machine with more memory"


@dataclass
class Crash:
    """How unexpected errors are reported. ``shown`` prints the traceback to the screen."""

    shown: bool = False

    def describe(self, error: Exception) -> str:
        """Show the traceback or write it to a file, and return one line for the user."""
        line = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, FileNotFoundError) and not self.shown and not _has_working_folder():
            return "the working folder of this shell was deleted: cd to another folder"
        if isinstance(error, OSError):  # a full disk or a missing permission is not a bug, and needs no traceback
            if (text := explain_system_error(error)) and not self.shown:
                return text
            line = " ".join(str(error).split())
        elif is_out_of_memory(error) and not self.shown:  # not a bug either, and a traceback needs memory
            said = first_line(error)
            return f"out of memory{'' if said == type(error).__name__ else f': {said}'}; {MORE_MEMORY}"
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
    help="Fine-tune transformers and leave out part of the backward pass, as a policy decides. Compare quality, time "
    "and memory with dense training, which computes every gradient.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=SHORT,
)
crash: Crash = Crash()

# The first panel has what users need on the first day. Each of its commands works without reading about the others.
VERBS: dict[str, tuple[Callable[..., None], ...]] = {
    "Everyday": (quickstart, init, validate, data, run, compare, show),
    "More: write and check recipes": (new, recipes, policies, schema),
    "More: runs": (runs, logs, resume, cancel, tag, archive, prune, rm, sync),
    "More: results": (),  # from packages
    "More: this machine and others": (doctor, targets),
}
# Commands that write runs or the store; keep_private() applies to them. Others write only files that the user names.
WRITING = {"run", "quickstart", "resume", "cancel", "prune", "rm", "tag", "sync", "doctor"}
for name, entry, function in load_verbs():
    EXAMPLES[name] = entry.example
    VERBS[entry.panel] = (*VERBS.get(entry.panel, ()), function)
    WRITING.update({name} if entry.writes else ())
for panel, verbs in VERBS.items():
    for verb in verbs:
        example = EXAMPLES.get(verb.__name__)
        epilog = f"Example: sparsebp {example}" if example else None
        # Typer would keep the line breaks of the source.
        prose = "\n\n".join(" ".join(part.split()) for part in (verb.__doc__ or "").split("\n\n"))
        app.command(cls=Verb, rich_help_panel=panel, epilog=epilog, help=prose)(verb)


def show_version(requested: bool) -> None:
    """Print the version and exit, if ``--version`` was given."""
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


# The command line's own errors, such as an unknown option. Depending on typer, the class is its copy or click's.
ClickError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def describe_error(error: Exception) -> Problem:
    """Return the facts of any error that ends a command."""
    if isinstance(error, SparseBPError):
        return Problem.of(error)
    if isinstance(error, ClickError):
        given: Any = error
        near = [str(name) for name in getattr(error, "possibilities", None) or ()]
        text = " ".join(given.format_message().replace("Value error, ", "").split()).rstrip(".")
        path = getattr(getattr(given, "ctx", None), "command_path", "")
        return Problem(
            type=UsageError.__name__,
            exit_code=given.exit_code,
            text=f"{text}; see `{path} --help`" if path else text,
            nearest=near[0] if near else None,
        )
    if isinstance(error, typer.Abort):
        return Problem(
            type="Interrupted",
            exit_code=CHECK_FAILED,
            text="the command asked a question, and the answer was no or missing: nothing was done",
        )
    return Problem(type="Crash", exit_code=SparseBPError.exit_code, text=crash.describe(error))


def main() -> None:
    """Run the command line of this process and exit."""
    with Outlets():
        if wants_json(sys.argv[1:]):
            with speech.in_json():
                code = _answer_in_json()
            sys.exit(code)
        try:
            _refuse_bytes(sys.argv[1:])
            code = int(app(prog_name="sparsebp", standalone_mode=False) or 0)
        except Exception as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # of typer or click: its text is the help
                print(error.ctx.get_help())  # type: ignore[attr-defined]
                sys.exit(error.exit_code)  # type: ignore[attr-defined]
            sys.exit(_print_error(error).exit_code)
        sys.exit(code)


def _refuse_bytes(words: Sequence[str]) -> None:
    """Raise UsageError for an argument that is not text: plans and answers are JSON, which cannot hold it."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"an argument must be UTF-8 text, got {word[:100]!a}; rename the file") from None


def _answer_in_json() -> int:
    """Run the command, answer with an error if it raises one, and return the exit code."""
    try:
        _refuse_bytes(sys.argv[1:])
        code = int(app(prog_name="sparsebp", standalone_mode=False) or 0)
    except Exception as error:
        problem = _print_error(error)
        speech.tell(ErrorAnswer(error=problem))
        return problem.exit_code
    speech.end(code)
    return code


def _print_error(error: Exception) -> Problem:
    """Print what is wrong to standard error, and return the facts."""
    if isinstance(error, OSError) and not crash.shown and (deleted := find_deleted(error)):
        error = RunNotFoundError(deleted)
    problem = describe_error(error)
    if isinstance(error, SparseBPError):
        print_error(error)
    else:
        print_line(f"error: {problem.text}", stderr=True)
    return problem
