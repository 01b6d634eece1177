"""The way from a run's folder back to the target that works on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsebp_cli.run import RunFolder

if TYPE_CHECKING:
    from sparsebp_cli.target import Job, Target


def target_of(run: RunFolder) -> Target:
    """Return the target that a run was, or is to be, submitted to."""
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.target import make_target

    return make_target(Plan.load(run.plan_file).recipe.target)


def reattach(run: RunFolder) -> Job:
    """Return a grip on a run that was submitted before."""
    return target_of(run).reattach(run)
