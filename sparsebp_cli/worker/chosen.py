"""What was chosen of the batches of a step, as metric values."""

from __future__ import annotations

from collections.abc import Iterable

from sparsebp_cli.backward.core.report import Chosen
from sparsebp_cli.policy import GradientSelector, Policy, TokenSelector
from sparsebp_cli.policy.discovery import find_policy
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import metric
from sparsebp_cli.worker.process import Ranks


def find_columns(policies: Iterable[Policy]) -> frozenset[str]:
    """Return the names of the data's columns that policies read.

    Args:
        policies: Of any kind.

    Returns:
        The names.
    """
    return frozenset(name for policy in policies if isinstance(policy, TokenSelector) for name in policy.reads)


def find_candidates(policies: Iterable[Policy]) -> str | None:
    """Return the name of the column that says which targets may be trained; None: all of them may.

    Args:
        policies: Of any kind.

    Returns:
        The name.
    """
    return next((policy.candidate_column for policy in policies if isinstance(policy, TokenSelector)), None)


def tell_chosen(chosen: Chosen | None, ranks: Ranks, recipe: Recipe) -> dict[str, float | None]:
    """Return the figures of what was chosen before the forward, over all ranks.

    Args:
        chosen: On this rank, in this step; None where nothing chooses.
        ranks: Every one must ask.
        recipe: A gradient policy in it says what ``policy/kept_share`` is; else that is the trained share.

    Returns:
        Metric values by name; None where there is none.
    """
    if chosen is None:
        return {}
    counts = (chosen.trained, chosen.targets, chosen.carried, chosen.real)
    trained, targets, carried, real = ranks.total([float(count) for count in counts])
    trained_share = trained / targets if targets else None
    values = {
        metric.TRAINED_SHARE.name: trained_share,
        metric.CARRIED_SHARE.name: carried / real if real else None,
        metric.SCORING_SECONDS.name: ranks.highest([chosen.scoring_seconds])[0],
    }
    if any(find_policy(entry.name).kind == GradientSelector.__name__ for entry in recipe.policy):
        return values
    return values | {metric.KEPT_SHARE.name: trained_share}
