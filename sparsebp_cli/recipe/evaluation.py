"""What a recipe measures on its held-out splits: names, units and directions, before anything is trained."""

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
    generated texts, or one that two of them give."""
    found = {one.name: one for one in _of_forwards(recipe.dataset)}
    return found | {name: one for name, one in declare_generated(recipe).items() if name.startswith(EVAL)}


def _of_forwards(section: DatasetSection) -> tuple[Metric, ...]:
    if section.format == "classification":
        # eval/f1 of two classes alone: the data say how many there are
        return metric.EVAL_LOSS, metric.EVAL_ACCURACY, metric.EVAL_MACRO_F1, metric.EVAL_MCC, metric.EVAL_F1
    if section.format == "regression":
        return metric.EVAL_LOSS, metric.EVAL_PEARSON, metric.EVAL_SPEARMAN
    return (metric.EVAL_LOSS,)


def find_decisive(recipe: Recipe) -> Metric:
    """Return the validation metric by which a recipe's runs are chosen."""
    if recipe.measure.metric is not None:
        return list_measured(recipe)[recipe.measure.metric]
    return metric.EVAL_ACCURACY if recipe.dataset.format == "classification" else metric.EVAL_LOSS


def find_interval(recipe: Recipe) -> int | None:
    """Return the steps between evaluations of that metric; None if it has none under way."""
    generate = recipe.measure.generate
    if generate is not None and recipe.measure.metric in declare_generated(recipe):
        return generate.every
    return recipe.measure.eval_every


def without_generation(recipe: Recipe) -> Recipe:
    """Return a recipe that generates no texts, for a run that is not judged."""
    measure = recipe.measure.model_copy(update={"generate": None, "metric": None})
    checkpoint = recipe.checkpoint.model_copy(update={"keep_best": None})
    return recipe.model_copy(update={"measure": measure, "checkpoint": checkpoint})


def declare_generated(recipe: Recipe) -> dict[str, Metric]:
    """Return the metrics of generated texts on both splits; none without ``measure.generate``. Raise UsageError as
    :func:`list_measured` does."""
    section, found = recipe.measure.generate, dict[str, Metric]()
    for name in [] if section is None else section.metrics:
        for figure, declared in find_text_metric(name).figures.items():
            for prefix in (EVAL, TEST):
                full = f"{prefix}{figure}"
                if full in METRICS or full in found:
                    raise UsageError(f"metric {name!r} gives {figure}, which another metric of this run is called")
                found[full] = Metric(full, declared.unit, declared.better)
    return found


def to_facts(found: Mapping[str, Metric]) -> dict[str, dict[str, str]]:
    """Return units and directions as a run records them in its facts."""
    return {name: {"unit": one.unit, "better": one.better} for name, one in found.items()}


def find_unmeasured(recipe: Recipe) -> Iterator[FieldError]:
    """Yield an error for a generation that cannot be, an unknown metric, a best evaluation by one that no
    evaluation has, and a patience that watches none."""
    generate, options = recipe.measure.generate, recipe.target.options
    default = TargetOptions.model_fields["worker"].default
    if options.get("worker", default) != default:
        return  # another worker may measure something else
    if generate is not None and recipe.dataset.format not in GENERATING:
        got = f"dataset.format: {recipe.dataset.format}"
        yield FieldError(("measure", "generate"), f"needs dataset.format: completion or chat, got {got}")
        return
    if generate is not None and options.get("sharding", "none") != "none":
        yield FieldError(("measure", "generate"), "needs target.sharding: none: no rank has the whole model; got fsdp2")
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
            text = f"{name} is not measured on validation here; allowed: {allowed}{did_you_mean(name, measured)}"
            yield FieldError(place, text)
    if recipe.training.early_stopping_patience is not None and recipe.checkpoint.keep_best is None:
        text = f"needs checkpoint.keep_best, the metric that it watches: {', '.join(measured)}"
        yield FieldError(("training", "early_stopping_patience"), text)
