"""``sparsebp audit``: measure the work and memory of a backward pass, and the wasted part."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.exit_code import CHECK_FAILED
from sparsebp_cli.cli.option import Changes
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.run import interpreter

if TYPE_CHECKING:
    from sparsebp_audit.report import AuditReport
    from sparsebp_audit.verb.audit_process import AuditedCommand

WHAT, GATE, FILE = "What is watched", "For CI", "Result"
SUBJECT = "A recipe, or `--` and any command that trains with PyTorch: -- python train.py --epochs 3."


def audit(  # noqa: PLR0913, PLR0917 - one parameter an option
    words: Annotated[list[str], typer.Argument(metavar="RECIPE|COMMAND", help=SUBJECT)],
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many optimizer steps to watch.", rich_help_panel=WHAT)
    ] = 3,
    changes: Changes = None,
    stop: Annotated[
        bool,
        typer.Option(
            "--stop",
            help="End the training command after the number of steps that --steps sets.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply",
            help="After the audit, skip the wasted work in the rest of the training, and measure their time.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Write the policy `lossless` into the audited script, which must have one Trainer, and show the diff.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    examples: Annotated[
        bool,
        typer.Option(
            "--examples",
            help="Also check in the first step whether examples of a batch influence each other.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    threshold: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Hide findings that would save less than this fraction of a step's FLOPs, bytes or time.",
        ),
    ] = 0.005,
    fail_if_waste: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Exit with 1 if more than this fraction of the FLOPs, or of the stored bytes, is wasted.",
            rich_help_panel=GATE,
        ),
    ] = None,
    fail_if_mixed: Annotated[
        bool,
        typer.Option(
            "--fail-if-mixed",
            help="With --examples: exit with 1 if examples influence each other.",
            rich_help_panel=GATE,
        ),
    ] = False,
    output: Annotated[
        Output, typer.Option("-o", "--output", help="A table for people, or JSON for programs.", rich_help_panel=FILE)
    ] = Output.TABLE,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the report as one HTML page.", rich_help_panel=FILE)
    ] = None,
) -> None:
    """Watch a training for a few steps, and report the work and memory that its backward pass wastes."""
    for name, share in (("--threshold", threshold), ("--fail-if-waste", fail_if_waste or 0.0)):
        if not 0.0 <= share < 1.0:
            raise UsageError(f"{name} must be a fraction in [0, 1), got {share:g}")
    if fail_if_mixed and not examples:
        raise UsageError(
            "--fail-if-mixed needs --examples, which checks whether examples of a batch influence each other"
        )
    if html is not None:
        from sparsebp_cli.compare.page import check_path

        check_path(html)
    from sparsebp_audit.verb.audit_process import run_audited

    settings = {"steps": steps, "threshold": threshold, "stop": stop, "apply": apply, "examples": examples}
    with tempfile.TemporaryDirectory(prefix="sparsebp-audit-") as place:
        is_recipe = Path(words[0]).suffix in {".yaml", ".yml"}
        if is_recipe and (apply or write):
            what = "--apply works only with a command" if apply else "--write works only with a script"
            raise UsageError(f"{what}; in a recipe, write 'policy: lossless' instead")
        command = _train_command(words, changes, steps, Path(place)) if is_recipe else words
        if not is_recipe and changes:
            raise UsageError(
                "--set changes keys of a recipe, not options of a training command; change them in the command itself"
            )
        settings |= {"stop": stop or is_recipe}
        audited = run_audited(
            command,
            settings,
            Path(place),
            lambda report: _write_results(report, output, html, shlex.join(words)),
            quiet=output is Output.JSON,
        )
    if audited.report is None and not audited.exit_code:
        raise UsageError(audited.why_no_report)
    if audited.report is None and not (is_recipe and audited.exit_code == UsageError.exit_code):
        # A recipe's worker has printed what is wrong with recipe or data.
        print_line(f"audit: {audited.why_no_report}", stderr=True)
    is_written = not write or _write_line(audited, quiet=output is Output.JSON)
    if audited.exit_code or not is_written:
        raise typer.Exit(audited.exit_code or CHECK_FAILED)
    assert audited.report is not None
    if not write and output is Output.TABLE:
        print_next(audited.report, audited.script, is_recipe=is_recipe)
    _check_gates(audited.report, fail_if_waste, fail_if_mixed=fail_if_mixed)


def _check_gates(report: AuditReport, fail_if_waste: float | None, *, fail_if_mixed: bool) -> None:
    """End the command if the report exceeds a limit."""
    if fail_if_mixed and report.examples is not None and report.examples.is_mixed:
        print_line(f"failed: {report.examples.headline}", stderr=True)
        raise typer.Exit(CHECK_FAILED)
    if fail_if_waste is not None and report.waste_share > fail_if_waste:
        share = f"{report.waste_share:.2%} of the FLOPs or bytes"
        print_line(f"failed: {share} is wasted, allowed {fail_if_waste:.2%}", stderr=True)
        raise typer.Exit(CHECK_FAILED)


def print_next(report: AuditReport, script: Path | None, *, is_recipe: bool) -> None:
    """Print the line that adds lossless to the audited training, if lossless leaves work out there."""
    from sparsebp_audit.verb.script_line import describe_change, find_objection

    if find_objection(report):
        return
    for where, line in [("write into the recipe", "policy: lossless")] if is_recipe else describe_change(script):
        print_line(f"next: {where}:")
        print_line(f"   {line}")


def _write_line(audited: AuditedCommand, *, quiet: bool) -> bool:
    """Write the line of lossless into the audited script, and show it. Return whether it was written; if not, print the
    reason."""
    from sparsebp_audit.verb.script_line import find_change, find_objection

    objection = find_objection(audited.report) if audited.report is not None else audited.why_no_report
    if audited.exit_code:
        objection = f"the command ended with exit code {audited.exit_code}"
    try:
        if objection:
            raise UnsupportedError(objection)
        if audited.script is None:
            raise UnsupportedError("the command ran no Python file that --write could change")
        change = find_change(audited.script)
        print_line(change.diff(), stderr=quiet)
        kept = change.write()
    except UsageError as error:
        print_line(f"not written: {error}", stderr=True)
        return False
    print_line(f"written: {change.file}; the old file: {kept}", stderr=True)
    return True


def _train_command(words: list[str], changes: list[str] | None, steps: int, place: Path) -> list[str]:
    """Return the worker's command for a recipe, without evaluations, probes and checkpoints."""

    from sparsebp_cli.cli.starter import resolve_recipe
    from sparsebp_cli.plan import make_plan
    from sparsebp_cli.recipe import load_recipe
    from sparsebp_cli.recipe.evaluation import without_generation

    if len(words) > 1:
        raise UsageError(f"audit takes one recipe, got {len(words)}: {' '.join(words)}")
    file = resolve_recipe(Path(words[0]))
    plan = make_plan(load_recipe(file, changes or []), file)
    recipe = plan.recipe
    if recipe.target.kind != "local":
        raise UnsupportedError(f"an audit runs only on this machine: set target to local, got {recipe.target.kind}")
    if recipe.target.options.get("processes", 1) != 1:
        raise UnsupportedError(
            f"an audit watches only one process: set target.processes to 1, got {recipe.target.options['processes']}"
        )
    if recipe.training.max_steps < steps:
        raise UsageError(f"--steps must be at most training.max_steps ({recipe.training.max_steps}), got {steps}")
    recipe = without_generation(recipe)
    measure = recipe.measure.model_copy(
        update={
            "probe_every": None,
            "fidelity_every": None,
            "eval_every": recipe.training.max_steps,
            "eval_examples": 1,
        }
    )
    checkpoint = recipe.checkpoint.model_copy(update={"every": recipe.training.max_steps})
    run = place / "run"
    run.mkdir()
    recipe = recipe.model_copy(update={"measure": measure, "checkpoint": checkpoint})
    saved = plan.model_copy(update={"recipe": recipe}).save(run)
    return interpreter.command("-m", "sparsebp_cli.worker", str(saved))


def _write_results(report: AuditReport, output: Output, html: Path | None, command: str) -> None:
    """Print a report, and write the requested page."""
    from sparsebp_audit.report import write_page

    if html is not None:  # before printing, because a closed pipe must not lose it
        write_page(report, html, command)
    from sparsebp_audit.verb.audit_table import print_audit

    tell(report, output, print_audit)
    if html is not None:
        print_line(f"report: {html}", stderr=True)
