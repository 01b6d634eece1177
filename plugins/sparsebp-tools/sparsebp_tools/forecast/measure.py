"""Build a forecast: the recipe, dense, and changes that would need less memory, on the same material."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from sparsebp_cli.errors import SparseBPError, UnsupportedError, UsageError, first_line
from sparsebp_cli.recipe.composition import refuse_unsupported
from sparsebp_cli.recipe.evaluation import has_own_worker
from sparsebp_cli.recipe.schema import PolicyEntry, Recipe
from sparsebp_cli.worker.policy import make_policies
from sparsebp_tools.forecast.depth import Depth, count_layers
from sparsebp_tools.forecast.material import gather_material
from sparsebp_tools.forecast.record import HELD_ON_CPU, Forecast, ForecastRequest, Remedy, StepForecast
from sparsebp_tools.forecast.remedy import RecipeChange, name_comparisons, try_changes, without_comparisons
from sparsebp_tools.forecast.step import Rehearsal, make_order

SECONDS = 0.5  # duration of the timed products if no rate was given
WORTH = 0.99  # a change whose peak is above this fraction is not shown
SIDE = 1024  # size of the multiplied matrices

Report = Callable[[str, int, int], None]


def forecast(request: ForecastRequest, report: Report) -> Forecast:
    """Return the forecast of a plan. Raise DataError without a config, UnsupportedError if it cannot be rehearsed."""
    process_bytes = 0 if request.gpu else psutil.Process().memory_info().rss
    recipe = request.plan.recipe
    if not has_own_worker(recipe):
        raise UnsupportedError("--memory cannot forecast a custom target.worker")
    policies = make_policies(recipe)
    report("reads config and data", 0, 0)
    material = gather_material(recipe, policies)
    number, batch = material.describe(recipe, make_order(recipe, material))
    rehearsal = Rehearsal(material, number, gpu=request.gpu)
    depth = Depth(count_layers(material.config))
    report("the recipe", 0, 0)
    own = _rehearse(lambda: depth.forecast(lambda layers: rehearsal.forecast(recipe, layers), checks=True))
    dense = make_dense(recipe)
    report("dense", 0, 0)
    plain = own if dense == recipe else depth.forecast(lambda layers: rehearsal.forecast(dense, layers), checks=False)

    def rehearse(change: RecipeChange) -> StepForecast:
        changed = _one_example(rehearsal) if change.batch_share < 1.0 else rehearsal
        step = _rehearse(lambda: depth.forecast(lambda layers: changed.forecast(change.recipe, layers), checks=False))
        # Converted to the recipe's own micro-batch size, like all other values.
        return step.model_copy(update={"pass_flops": step.pass_flops / change.batch_share})

    tried = try_changes(recipe, rehearse, lambda name: report(name, 0, 0)) if request.remedies else ()
    remedies = [one for one in tried if one.step is None or one.step.largest_bytes < WORTH * own.largest_bytes]
    if settings := name_comparisons(recipe):
        never = without_comparisons(settings, own, "as it is")
        if never.step is not None and never.step.largest_bytes < WORTH * own.largest_bytes:
            remedies.insert(0, never)
    if recipe.measure.probe_every is not None or recipe.measure.fidelity_every is not None:
        remedies.insert(0, _without_probes(own))
    rate, rate_note = _find_rate(request, recipe)
    return Forecast(
        name=recipe.name,
        device="" if request.gpu else f"this machine's CPU, {torch.get_num_threads()} threads",
        capacity_bytes=request.capacity_bytes or psutil.virtual_memory().available + process_bytes,
        process_bytes=process_bytes,
        has_probes=recipe.measure.probe_every is not None,
        micro_batches=recipe.training.gradient_accumulation_steps,
        max_steps=recipe.training.max_steps,
        processes=recipe.target.options.get("processes", 1),
        batch=batch,
        policy=own,
        dense=plain,
        remedies=remedies,
        flops_per_second=rate,
        rate_note=rate_note,
        assumptions=_assume(request, recipe, own),
        layers_note=depth.describe(),
    )


def make_dense(recipe: Recipe) -> Recipe:
    """Return a recipe without its policies, and without backward options or an optimizer that only they need."""
    plain = recipe.model_copy(update={"policy": [PolicyEntry(name="dense")]})
    usual = type(recipe.backward)(update=recipe.backward.update, eager_clip=recipe.backward.eager_clip)
    training = recipe.training.model_copy(update={"optim": "adamw", "optim_args": {}})
    for update in ({}, {"backward": usual}, {"training": training}, {"backward": usual, "training": training}):
        try:
            refuse_unsupported(found := plain.model_copy(update=update))
        except SparseBPError:
            continue
        return found
    return plain


def _rehearse(run: Callable[[], StepForecast]) -> StepForecast:
    """Run a rehearsal; raise UnsupportedError for code that fails without data."""
    try:
        return run()
    except Exception as error:
        # Policies that depend on values see placeholders here and may raise.
        if isinstance(error, SparseBPError) and type(error) is not UsageError:
            raise
        text = f"{type(error).__name__}: {first_line(error)}"
        raise UnsupportedError(
            f"--memory cannot forecast this step without data ({text}); train two steps instead, with max_steps=2"
        ) from error


def _one_example(rehearsal: Rehearsal) -> Rehearsal:
    """Return a rehearsal of micro-batches of one example, the longest of the largest micro-batch."""
    data = rehearsal.material.data
    longest = max(data.train, key=lambda example: len(example.input_ids))
    material = replace(rehearsal.material, data=replace(data, train=[longest] * len(data.train)))
    return replace(rehearsal, material=material, number=0)


def _without_probes(own: StepForecast) -> Remedy:
    return Remedy(
        changes=["measure.probe_every=null", "measure.fidelity_every=null"],
        is_exact=True,
        step=own,
        note="the same gradient, without comparisons with dense training",
        saves_probes=True,
    )


def _find_rate(request: ForecastRequest, recipe: Recipe) -> tuple[float | None, str]:
    if request.flops_per_second is not None or request.gpu:
        return request.flops_per_second, ""
    dtype = torch.bfloat16 if "bf16" in recipe.training.mixed_precision else getattr(torch, recipe.model.dtype)
    left = torch.ones(SIDE, SIDE, dtype=dtype)
    torch.mm(left, left)
    start, number = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < SECONDS:
        torch.mm(left, left)
        number += 1
    rate = 2.0 * SIDE**3 * number / seconds
    return rate, "a lower bound, from the speed of matrix products measured just now on this machine"


def _assume(request: ForecastRequest, recipe: Recipe, own: StepForecast) -> list[str]:
    found = [
        "temporary tensors inside operators, and memory that an allocator rounds up or cannot reuse, are not counted"
    ]
    if not request.gpu:
        found.append(
            "the forecast counts tensors and the process before its first tensor; on a CPU, measured runs used up to "
            f"{HELD_ON_CPU:g} times as much, for library buffers, freed memory that the C library keeps, and copies "
            "of saved weights"
        )
    else:
        found += [
            "attention is assumed to run a fused kernel without stored scores (flash, or memory-efficient with a mask)",
            "CUDA's context and the libraries' workspaces, about 0.5 to 1 GB, are not counted",
        ]
    if recipe.measure.probe_every is not None:
        found.append(
            "the memory of a probe (a measuring pass) is estimated: a step's, plus the gradients of policy and dense"
        )
    if recipe.training.compile:
        found.append("the forecast is for an uncompiled step; a compiled step fuses operators and may need less")
    if recipe.training.mixed_precision != "no":
        found.append("autocast follows the rules of a CPU; on a GPU, more operators, such as norms, run in float32")
    processes = recipe.target.options.get("processes", 1)
    if processes > 1:
        found.append(f"the forecast is for one of {processes} processes, without DDP's copies of all gradients")
    if recipe.target.options.get("sharding", "none") != "none":
        found.append("the forecast is for unsharded weights; fsdp2 divides weights, gradients and optimizer state")
    if make_dense(recipe).training.optim != recipe.training.optim:
        found.append(f"the dense run uses adamw, because {recipe.training.optim} works only with the policy")
    if own.trial is not None:
        found.append("the hours leave out trial passes, which run before a few steps only")
    found.append("evaluations, generations and checkpoints are not included")
    return found
