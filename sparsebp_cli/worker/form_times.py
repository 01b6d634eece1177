"""Which forms products are computed in: timed once at a run's set-up, and stored with the run.

A checkpoint holds the times as a part of the engine's state, the journal as a fact. A run that goes on, here or on
another machine, takes them from there, so that its numbers do not depend on where it was interrupted.
"""

from __future__ import annotations

from accelerate import Accelerator

from sparsebp_cli.backward import Engine
from sparsebp_cli.backward.linear.form_choice import STATE, find_choice
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import GradientSelector, Policy
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter, RunFolder
from sparsebp_cli.run.break_even import FACT, FormTimes, describe_use, read_times
from sparsebp_cli.run.policy_phase import PolicyPhase
from sparsebp_cli.worker.checkpoint import Snapshot
from sparsebp_cli.worker.process import Ranks


def choose_forms(
    engine: Engine,
    recipe: Recipe,
    phases: list[PolicyPhase[Policy]],
    accelerator: Accelerator,
    run: RunFolder,
    journal: JournalWriter,
    snapshot: Snapshot | None,
    ranks: Ranks,
) -> None:
    """Let the engine take the times that the run has stored, or time its forms now; collective. Do nothing without
    ``backward.time_forms``. Raise UnsupportedError if what is stored are no times."""
    choice = find_choice(engine)
    if choice is None:
        return
    # One answer for all: ranks that chose different forms would differ in their last bits.
    stored = ranks.broadcast(_find_stored(run, snapshot) if ranks.is_first else None)
    if stored is not None:
        choice.set(stored)
        return
    every = [policy for phase in phases for policy in phase.policies if isinstance(policy, GradientSelector)]

    def tell(text: str) -> None:
        journal.write("note", level="info", text=text)

    num_rows = recipe.training.per_device_train_batch_size * recipe.dataset.max_seq_length
    with accelerator.autocast():
        times = choice.measure(num_rows, policies=every, tell=tell)
    fact = describe_use(times, choice.uses(every))
    tell(str(fact["text"]))
    journal.write("facts", values={FACT: fact})


def _find_stored(run: RunFolder, snapshot: Snapshot | None) -> FormTimes | None:
    """Return the times of the checkpoint; without one those of the journal, as of a run that was killed early."""
    content = snapshot.rest["engine"].get(STATE) if snapshot is not None else None
    try:
        return read_times(History.load(run.path).facts) if content is None else FormTimes.from_json(content)
    except ValueError as error:
        raise UnsupportedError(f"{'the journal' if content is None else 'the checkpoint'} has {error}") from None
