"""Find the metric that chooses among the runs of a study, and its interval."""

from __future__ import annotations

from sparsebp_cli.recipe.evaluation import declare_generated, list_measured
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import metric
from sparsebp_cli.run.metric import Metric


def find_decisive(recipe: Recipe) -> Metric:
    """Return the validation metric by which a recipe's runs are chosen."""
    if recipe.measure.metric is not None:
        return list_measured(recipe)[recipe.measure.metric]
    return metric.EVAL_ACCURACY if recipe.dataset.format == "classification" else metric.EVAL_LOSS


def find_interval(recipe: Recipe) -> int | None:
    """Return the steps between evaluations of that metric; None if it has no intermediate ones."""
    generate = recipe.measure.generate
    if generate is not None and recipe.measure.metric in declare_generated(recipe):
        return generate.every
    return recipe.measure.eval_every
