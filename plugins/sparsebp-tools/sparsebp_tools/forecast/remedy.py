"""List changes of a recipe that need less memory, first those that keep the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.policy import make_policy
from sparsebp_cli.recipe import refuse_unsupported
from sparsebp_cli.recipe.schema import LoraSection, PolicyEntry, Recipe
from sparsebp_tools.forecast.record import Remedy, StepForecast

SEGMENTS = 2
RANK = 16


@dataclass(frozen=True)
class RecipeChange:
    """A change in the form of ``--set``, and the changed recipe."""

    settings: tuple[str, ...]
    recipe: Recipe
    is_exact: bool
    note: str
    batch_share: float = 1.0  # examples of a micro-batch over those before
    without_comparisons: str = ""  # the change in words of ``--set`` if it makes steps without comparisons


def list_changes(recipe: Recipe) -> Iterator[RecipeChange]:
    """Yield the changes that a recipe does not have yet and that fit the rest of it."""
    for change in (*_exact(recipe), *_other(recipe)):
        try:
            refuse_unsupported(change.recipe)
        except SparseBPError:
            continue
        yield change


def _exact(recipe: Recipe) -> Iterator[RecipeChange]:
    backward, training = recipe.backward, recipe.training
    if [entry.name for entry in recipe.policy] == ["dense"]:
        text = "the same gradient; skips padding and other work that the loss does not need"
        entry = PolicyEntry(name="lossless", **make_policy("lossless").model_dump(mode="json"))
        changed = recipe.model_copy(update={"policy": [entry]})
        yield RecipeChange(
            ("policy=lossless",), changed, True, text, without_comparisons="policy={name: lossless, verify: never}"
        )
    is_stored = backward.checkpointing == "none" and backward.segments is None
    if is_stored:
        made = backward.model_copy(update={"segments": SEGMENTS})
        text = "the same gradient: the backward recomputes all layers except those of the last segment"
        yield RecipeChange((f"backward.segments={SEGMENTS}",), recipe.model_copy(update={"backward": made}), True, text)
        made = backward.model_copy(update={"checkpointing": "full"})
        text = "the same gradient: the backward recomputes every layer"
        yield RecipeChange(("backward.checkpointing=full",), recipe.model_copy(update={"backward": made}), True, text)
    if backward.update == "deferred" and training.gradient_accumulation_steps == 1:
        clips = training.max_grad_norm is not None
        made = backward.model_copy(update={"update": "eager", "eager_clip": "exact" if clips else None})
        settings = ("backward.update=eager", *(["backward.eager_clip=exact"] if clips else []))
        text = "the same gradient: the backward updates each parameter at once, and frees its gradient"
        text += "; the backward runs twice, first for the norm of all gradients" if clips else ""
        yield RecipeChange(settings, recipe.model_copy(update={"backward": made}), True, text)
    size = training.per_device_train_batch_size
    if size > 1:
        count = training.gradient_accumulation_steps * size
        smaller = training.model_copy(update={"per_device_train_batch_size": 1, "gradient_accumulation_steps": count})
        settings = ("training.per_device_train_batch_size=1", f"training.gradient_accumulation_steps={count}")
        text = "the same gradient, unless a policy compares the examples of a batch; slower on a GPU"
        yield RecipeChange(settings, recipe.model_copy(update={"training": smaller}), True, text, 1.0 / size)
    if size > 1 and is_stored:
        made = backward.model_copy(update={"checkpointing": "full"})
        both = recipe.model_copy(update={"training": smaller, "backward": made})
        yield RecipeChange((*settings, "backward.checkpointing=full"), both, True, "both changes", 1.0 / size)


def _other(recipe: Recipe) -> Iterator[RecipeChange]:
    if recipe.model.adapters is not None:
        return
    model = recipe.model.model_copy(update={"lora": LoraSection(r=RANK, lora_alpha=2 * RANK)})
    adapted = recipe.model_copy(update={"model": model})
    text = "a different training: only low-rank adapters, which need another learning rate"
    yield RecipeChange((f"model.lora={{r: {RANK}, lora_alpha: {2 * RANK}}}",), adapted, False, text)
    if recipe.backward.checkpointing == "none" and recipe.backward.segments is None:
        backward = recipe.backward.model_copy(update={"checkpointing": "full"})
        both = adapted.model_copy(update={"backward": backward})
        settings = (f"model.lora={{r: {RANK}, lora_alpha: {2 * RANK}}}", "backward.checkpointing=full")
        yield RecipeChange(settings, both, False, "both changes")


def try_changes(
    recipe: Recipe, rehearse: Callable[[RecipeChange], StepForecast], report: Callable[[str], None]
) -> Iterator[Remedy]:
    """Yield the need of each change; a change that cannot be rehearsed has a note with the reason."""
    for change in list_changes(recipe):
        name = " ".join(change.settings)
        report(name)
        try:
            step, note = rehearse(change), change.note
        except SparseBPError as error:
            step, note = None, f"not possible with this recipe: {error}"
        yield Remedy(changes=list(change.settings), is_exact=change.is_exact, step=step, note=note)
        if step is not None and step.comparison is not None and change.without_comparisons:
            yield without_comparisons([change.without_comparisons], step, note)


def name_comparisons(recipe: Recipe) -> list[str]:
    """Return the settings that switch off policies' comparisons with the plain step."""
    entries = enumerate(recipe.policy)
    return [f"policy.{number}.verify=never" for number, entry in entries if entry.options.get("verify") == "first"]


def without_comparisons(settings: list[str], step: StepForecast, note: str) -> Remedy:
    """Return a remedy for a step that is never compared."""
    step = step.model_copy(update={"comparison": None})
    return Remedy(changes=settings, is_exact=True, step=step, note=f"{note}; no comparisons with the ordinary step")


__all__ = ["RecipeChange", "list_changes", "name_comparisons", "try_changes", "without_comparisons"]
