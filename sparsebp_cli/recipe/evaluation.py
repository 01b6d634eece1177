"""List what a recipe measures on its held-out splits (names, units, directions) before training starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.metrics import find_text_metric
from sparsebp_cli.policy.field_error import FieldError
from sparsebp_cli.recipe.schema import DatasetSection, Recipe, TargetOptions
from sparsebp_cli.run import metric
from sparsebp_cli.run.metric import METRICS, Metric

GENERATING = ("completion", "chat")  # formats whose rows have a prompt and what follows it
EVAL, TEST = "eval/", "test/"


def list_measured(recipe: Recipe) -> dict[str, Metric]:
    """Return the metrics that a recipe measures on validation, by name. Raise UsageError for an unknown metric of
    generated texts, or for a name that two metrics report."""
    found = {one.name: one for one in _of_forwards(recipe.dataset)}
    return found | {name: one for name, one in declare_generated(recipe).items() if name.startswith(EVAL)}


def _of_forwards(section: DatasetSection) -> tuple[Metric, ...]:
    if section.format == "classification":
        # eval/f1 exists only for two classes; the number of classes is known only from the data
        return metric.EVAL_LOSS, metric.EVAL_ACCURACY, metric.EVAL_MACRO_F1, metric.EVAL_MCC, metric.EVAL_F1
    return (metric.EVAL_LOSS,)


def without_generation(recipe: Recipe) -> Recipe:
    """Return a copy of the recipe that generates no texts, for runs that are not evaluated by them."""
    measure = recipe.measure.model_copy(update={"generate": None, "metric": None})
    checkpoint = recipe.checkpoint.model_copy(update={"keep_best": None})
    return recipe.model_copy(update={"measure": measure, "checkpoint": checkpoint})


def declare_generated(recipe: Recipe) -> dict[str, Metric]:
    """Return the metrics of generated texts on both splits; empty without ``measure.generate``. Raise UsageError as
    :func:`list_measured` does."""
    section, found = recipe.measure.generate, dict[str, Metric]()
    for name in [] if section is None else section.metrics:
        for figure, declared in find_text_metric(name).figures.items():
            for prefix in (EVAL, TEST):
                full = f"{prefix}{figure}"
                if full in METRICS or full in found:
                    raise UsageError(
                        f"{name!r} and another metric of this run both log {figure}: leave one of them out"
                    )
                found[full] = Metric(full, declared.unit, declared.better)
    return found


def to_facts(found: Mapping[str, Metric]) -> dict[str, dict[str, str]]:
    """Return units and directions in the form in which a run records them."""
    return {name: {"unit": one.unit, "better": one.better} for name, one in found.items()}


def has_own_worker(recipe: Recipe) -> bool:
    """Return whether the recipe uses the built-in worker."""
    default = TargetOptions.model_fields["worker"].default
    return bool(recipe.target.options.get("worker", default) == default)


def find_unmeasured(recipe: Recipe) -> Iterator[FieldError]:
    """Yield an error for impossible text generation, an unknown metric, or keys that name a metric that is not
    measured. Early stopping needs such a metric."""
    generate = recipe.measure.generate
    if not has_own_worker(recipe):
        return  # another worker may measure something else
    if generate is not None and recipe.dataset.format not in GENERATING:
        got = f"dataset.format: {recipe.dataset.format}"
        yield FieldError(("measure", "generate"), f"needs dataset.format: completion or chat, got {got}")
        return
    if generate is not None and recipe.target.options.get("sharding", "none") != "none":
        text = "needs target.sharding: none, got fsdp2, with which no process has the whole model"
        yield FieldError(("measure", "generate"), text)
        return
    try:
        measured = list_measured(recipe)
    except UsageError as error:
        yield FieldError(("measure", "generate", "metrics"), str(error))
        return
    named = {("checkpoint", "keep_best"): recipe.checkpoint.keep_best, ("measure", "metric"): recipe.measure.metric}
    for place, name in named.items():
        if name is not None and name not in measured:
            allowed = ", ".join(measured)
            text = f"{name} is not a validation metric of this run; allowed: {allowed}{did_you_mean(name, measured)}"
            yield FieldError(place, text)
    if recipe.training.early_stopping_patience is not None and recipe.checkpoint.keep_best is None:
        text = f"needs checkpoint.keep_best, the metric to watch; allowed: {', '.join(measured)}"
        yield FieldError(("training", "early_stopping_patience"), text)
