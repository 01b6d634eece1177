"""``sparsebp rerun``: train a run exactly again, or list what has changed.

The new run gets the plan of the old one, and its event log begins with the old config fingerprint: recipe, versions of
the code and digest of the data. So the worker, on any machine, compares them before it trains, as it does when a run
resumes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.answer.run_record import Losses, RunOutcomes
from sparsebp_cli.cli.follow import follow_all, make_outcome, make_outcomes, print_changes
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.option import Detach, Format, OneRun
from sparsebp_cli.cli.run import print_ids
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.cli.stored_run import check_plans, find_one, submit_all
from sparsebp_cli.errors import ChangedError, RunBusyError, UsageError
from sparsebp_cli.run import History, JournalWriter, RunFolder, create_run
from sparsebp_cli.run.metric import EVAL_LOSS, TEST_LOSS, TRAIN_LOSS

if TYPE_CHECKING:
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.plan.seal import Seal, SealChange

LOSSES = (TRAIN_LOSS.name, EVAL_LOSS.name, TEST_LOSS.name)
ALLOWED = ("code", "data")  # what may differ with --anyway; the recipe is in the plan


def rerun(
    run: OneRun,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Train even if packages, code or data have changed.")
    ] = False,
    detach: Detach = False,
    output: Format = Output.TABLE,
) -> None:
    """Train a run again with the same recipe and seed, under a new id, and report whether all losses are bit-identical.

    If packages, code or data have changed, the changes are listed and nothing is trained.
    """
    old = find_one(run)
    plan, seal = read_finished(old)
    changes = find_changes(plan, seal)
    if changes and not anyway:
        print_changes([list(change) for change in changes])
        fields = ", ".join(change.field for change in changes)
        text = f"run {old.run_id} cannot be repeated exactly: {fields} changed; --anyway trains it in spite of this"
        raise ChangedError(old.run_id, "", changes, text=text)
    check_plans([plan])
    with Interrupts() as interrupts:
        jobs = submit_all([prepare(plan, seal, anyway=anyway)])
        new = jobs[0].run
        if detach:
            outcome = replace(make_outcome(new), repeats=old.run_id)
            tell(make_outcomes([outcome]), output, print_ids)
            return
        print_line(f"run {new.run_id} repeats {old.run_id}", stderr=True)
        code = follow_all(jobs, interrupts).exit_code
    losses = compare_losses(History.load(old.path), History.load(new.path)) if code == 0 else None
    outcome = replace(make_outcome(new, code), repeats=old.run_id, losses=losses)
    tell(make_outcomes([outcome]), output, _print)
    raise typer.Exit(code)


def _print(found: RunOutcomes) -> None:
    if (losses := found.runs[0].losses) is not None:
        print_line(losses.text)


def read_finished(run: RunFolder) -> tuple[Plan, Seal]:
    """Return plan and last config fingerprint of a run. Raise RunBusyError if it is alive, UsageError if it never
    trained."""
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.plan.seal import read_seal

    plan = Plan.load(run.plan_file)
    if not (state := run.state()).over:
        raise RunBusyError(f"run {run.run_id} is {state}: only a run that has ended can be repeated")
    if (seal := read_seal(run.path)) is None or not seal.data:
        raise UsageError(
            f"run {run.run_id} does not record the code and data that it trained with; `sparsebp run --like "
            f"{run.run_id}` trains its recipe with the present code and data"
        )
    return plan, seal


def find_changes(plan: Plan, seal: Seal) -> list[SealChange]:
    """Return what differs from a config fingerprint on this machine, without reading the data. On other machines the
    worker compares, and reports it before it trains."""
    from sparsebp_cli.plan.identity import find_code
    from sparsebp_cli.plan.seal import Seal

    if plan.recipe.target.kind != "local":
        return []
    now = Seal(plan.recipe.model_dump(mode="json"), find_code(plan.recipe))
    return seal.changes(now)


def prepare(plan: Plan, seal: Seal, *, anyway: bool) -> RunFolder:
    """Write the folder of a run that repeats a plan; with ``anyway`` code and data may differ."""
    from sparsebp_cli.plan import Plan

    again = Plan(recipe=plan.recipe, provenance=plan.provenance.model_copy(update={"ledger": None}))
    folder = create_run(again.run_id)
    with JournalWriter(folder.path) as journal:
        journal.write("facts", values={"repeats": plan.run_id})
        journal.write("seal", values=seal.to_json())
        if anyway:
            journal.write("allow", fields=list(ALLOWED))
    again.save(folder.path)  # last: a folder is a run only with its plan
    return folder


def compare_losses(old: History, new: History) -> Losses:
    """Compare the losses of two runs, and find where they first differ."""
    num_values = 0
    for name in LOSSES:
        before, after = old.series(name), new.series(name)
        for step in sorted({*before, *after}):
            then, now = before.get(step, math.inf), after.get(step, math.inf)
            num_values += 1
            if then != now and not (math.isnan(then) and math.isnan(now)):
                text = f"not the same bits: {name} at step {step} was {then}, now {now}"
                return Losses(same=False, text=text)
    return Losses(same=True, text=f"the same bits: all {num_values} losses are equal")
