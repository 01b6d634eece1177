"""``sparsebp validate --memory``: ask the worker whether a step fits and how long it takes, and show tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import typer

from sparsebp_cli.cli.answer import Problem, tell
from sparsebp_cli.cli.quantity import show_count, show_share
from sparsebp_cli.cli.screen import Output, console, print_error, print_line
from sparsebp_cli.entry_point import find_tool
from sparsebp_cli.errors import SparseBPError, UsageError
from sparsebp_tools.forecast.accelerator import ASSUMED_SHARE, Accelerator, find_accelerator
from sparsebp_tools.forecast.answer import ForecastAnswer, ForecastFacts, ForecastProblem, RemedyNeed, StepNeed

if TYPE_CHECKING:
    from rich.table import Table

    from sparsebp_cli.plan import Plan
    from sparsebp_cli.recipe import Recipe
    from sparsebp_tools.forecast.record import Forecast, Parts, Remedy, StepForecast

ROWS = (
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer state"),
    ("activations", "saved activations"),
    ("logits", "logits and their loss"),
    ("workspace", "workspace"),
)
WARMUP = 3  # first steps of a run that its rate leaves out


def show_memory(
    recipes: Sequence[Path], changes: Sequence[str], gpu: str | None, rate: str | None, form: Output
) -> None:
    """Print the forecast of each recipe: tables for one recipe, a line each for several. Exit with 2 if one is wrong.
    Weights and data are not needed."""
    from sparsebp_cli.plan import make_plan

    studies = find_tool("study")
    if gpu is not None:
        find_accelerator(gpu)  # before any recipe is read, because the error concerns none of them
    facts, problems = [], []
    every: list[tuple[Path, Plan]] = []
    for file in recipes:
        try:
            if studies is not None and studies.is_study(file):
                plans = studies.make_plans(file)
            else:
                plans = [make_plan(_load_counted(file, changes), file)]
        except SparseBPError as error:
            print_error(error)
            problems.append(ForecastProblem(file=str(file), error=Problem.of(error)))
        else:
            every += [(file, plan) for plan in plans]
    several = len(every) > 1
    for file, plan in every:
        try:
            found = forecast_plan(plan, gpu, rate)
        except SparseBPError as error:
            print_line(f"error: {plan.recipe.name}: {error}" if several else f"error: {error}", stderr=True)
            problems.append(ForecastProblem(file=str(file), error=Problem.of(error)))
            continue
        facts.append(make_facts(found, file))
        for part in [describe(found)] if several else tables(found):
            console().print(part, soft_wrap=isinstance(part, str))
    if several:
        print_line("more: give one recipe alone to see tables, or -o json for everything")
    # each was printed as soon as it was ready
    tell(ForecastAnswer(recipes=facts, problems=problems), form, lambda _: None)
    if problems:
        raise typer.Exit(UsageError.exit_code)


def _load_counted(file: Path, changes: Sequence[str]) -> Recipe:
    """Return a recipe with its number of steps; only a recipe in epochs needs its data for that."""
    from sparsebp_cli.cli.validate import load_checked
    from sparsebp_cli.recipe import load_placed

    recipe = load_placed(file, changes).recipe
    return recipe if recipe.training.num_train_epochs is None else load_checked(file, changes)[0]


def forecast_plan(plan: Plan, gpu: str | None, rate: str | None) -> Forecast:
    """Return the forecast of a plan. ``gpu`` is an accelerator's name or size, None for this machine; ``rate`` is in
    TFLOP/s, or a run with a measured rate. Raise UsageError for other words, and for unreadable runs."""
    from sparsebp_cli.cli.worker_process import measure_apart
    from sparsebp_tools.forecast.record import Forecast, ForecastRequest

    device = None if gpu is None else find_accelerator(gpu)
    flops_per_second, note = _read_rate(rate, device, plan)
    request = ForecastRequest(
        plan=plan,
        gpu=device is not None,
        capacity_bytes=None if device is None else device.memory_bytes,
        flops_per_second=flops_per_second,
    )
    found = Forecast.model_validate(measure_apart("sparsebp_tools.forecast", request.model_dump_json()))
    update = {"device": found.device if device is None else device.name, "rate_note": note or found.rate_note}
    return found.model_copy(update=update)


def _read_rate(rate: str | None, device: Accelerator | None, plan: Plan) -> tuple[float | None, str]:
    """Return FLOPs a second, and their origin."""
    if rate is None:
        training, model = plan.recipe.training, plan.recipe.model
        dtype = "bfloat16" if training.mixed_precision == "bf16" else model.dtype
        known = None if device is None else device.flops_of(dtype)
        if known is None:
            return None, "" if device is None else f"the FLOP/s of {device.name} are unknown: give --rate"
        peak = f"the {show_count(known, 'FLOP')}/s in {dtype} that the device's maker states"
        text = f"assumed: {show_share(ASSUMED_SHARE)} of {peak}"
        return ASSUMED_SHARE * known, f"{text}; --rate sets a measured speed"
    try:
        given = float(rate)
    except ValueError:
        return _measure_rate(rate)
    if not 0.0 < given < 1e6:
        raise UsageError(f"--rate must be a number of TFLOP/s above 0, or a run, got {rate!r}")
    return given * 1e12, "given"


def _measure_rate(word: str) -> tuple[float, str]:
    """Return the rate of a run: the FLOPs of its steps over their seconds."""
    from sparsebp_cli.run import History, find_run, metric

    folders = find_run(word)
    if len(folders) != 1:
        raise UsageError(f"--rate must be a number of TFLOP/s, or one run, got {word!r}")
    history = History.load(folders[0].path)
    seconds = {step: value for step, value in history.series(metric.STEP_SECONDS.name).items() if step > WARMUP}
    flops = history.series(metric.STEP_FLOPS.name)
    rates = [flops[step] / value for step, value in seconds.items() if step in flops and value > 0.0]
    if not rates:
        raise UsageError(f"--rate: run {folders[0].run_id} recorded no FLOPs or no seconds after step {WARMUP}")
    return median(rates), f"measured in run {folders[0].run_id}, with its batch size"


def make_facts(found: Forecast, file: Path) -> ForecastFacts:
    """Return a forecast with the values derived from it."""

    def derive(step: StepForecast) -> StepNeed:
        need = found.need(step)
        return StepNeed(
            peak_bytes=step.peak.total,
            peak_phase=step.peak_phase,
            probe_bytes=step.probe_bytes if found.has_probes else None,
            need_bytes=need,
            fit=found.fit(need),
            step_flops=found.step_flops(step),
            hours=found.hours(step),
        )

    needs = [None if remedy.step is None else find_need(found, remedy, remedy.step) for remedy in found.remedies]
    return ForecastFacts(
        file=str(file),
        forecast=found,
        policy=derive(found.policy),
        dense=derive(found.dense),
        remedies=[
            RemedyNeed(changes=remedy.changes, need_bytes=need, fit=None if need is None else found.fit(need))
            for remedy, need in zip(found.remedies, needs, strict=True)
        ],
    )


def find_need(found: Forecast, remedy: Remedy, step: StepForecast) -> int:
    """Return the bytes that a step with a remedy needs."""
    return found.need(step, with_probes=found.has_probes and not remedy.saves_probes)


def describe(found: Forecast) -> str:
    """Return a forecast in one line."""
    need = found.need(found.policy)
    parts = [f"needs {show_count(need, 'B')}{' at least' if found.process_bytes else ''}: {found.fit(need)}"]
    parts.append(f"{show_count(found.step_flops(found.policy), 'FLOP')} a step")
    if hours := _show_hours(found.hours(found.policy)):
        parts.append(f"{found.max_steps} steps in {hours}")
    return f"{found.name}: {', '.join(parts)}"


def tables(found: Forecast) -> Iterator[Table | str]:
    """Yield the tables of a forecast, and lines beside them."""
    batch = found.batch
    yield (
        f"{found.name}: forecast of a step on {found.device}, {show_count(found.capacity_bytes, 'B')}; no weights "
        "were loaded"
    )
    yield (
        f"   micro-batch: {batch.examples} x {batch.length}, {show_share(batch.trained_share)} of the positions "
        f"trained; {batch.note}"
    )
    yield _main_table(found)
    if found.remedies:
        yield _remedy_table(found)
    for text in filter(None, [found.layers_note, *found.assumptions]):
        yield f"   {text}"
    if found.rate_note:
        rate = "" if found.flops_per_second is None else f"by {show_count(found.flops_per_second, 'FLOP')}/s, "
        yield f"   time: {rate}{found.rate_note}"


def _main_table(found: Forecast) -> Table:
    from sparsebp_cli.cli.screen import make_table

    arms = [("policy", found.policy), ("dense", found.dense)]
    if found.policy == found.dense:
        arms = arms[1:]
    names = [name if name == "dense" else found.policy.policy for name, _ in arms]
    table = make_table("", *names, numbers=names)

    def add(label: str, cell: Callable[[StepForecast], str]) -> None:
        table.add_row(label, *(cell(step) for _, step in arms))

    for part, label in ROWS:
        add(label, lambda step, part=part: show_count(getattr(step.peak, part), "B"))  # type: ignore[misc]
    add("tensors of a step, at their peak", lambda step: f"{show_count(step.peak.total, 'B')}, {step.peak_phase}")
    if found.policy.comparison is not None:
        add("in steps that compare with the ordinary step", lambda step: _show_total(step.comparison))
    if found.policy.trial is not None:
        add("in trial passes before a step", lambda step: _show_total(step.trial))
    if found.has_probes:
        add("tensors of a probe", lambda step: f"{show_count(step.probe_bytes, 'B')}, estimated")
    if found.process_bytes:
        add("the process before its first tensor", lambda _: show_count(found.process_bytes, "B"))
    add(
        "needed at least" if found.process_bytes else "needed",
        lambda step: f"{show_count(found.need(step), 'B')}: {found.fit(found.need(step))}",
    )
    add("parameters trained", lambda step: f"{show_count(step.num_trained)} of {show_count(step.num_parameters)}")
    add("work of a step", lambda step: show_count(found.step_flops(step), "FLOP"))
    if found.flops_per_second is not None:
        add(f"{found.max_steps} steps", lambda step: _show_hours(found.hours(step)))
    return table


def _show_total(parts: Parts | None) -> str:
    return "" if parts is None else show_count(parts.total, "B")


def _remedy_table(found: Forecast) -> Table:
    from sparsebp_cli.cli.screen import make_table

    table = make_table("what needs less: --set", "needed", "", "work", "what changes", numbers=["needed", "work"])
    before = found.step_flops(found.policy)
    for remedy in found.remedies:
        cells = ["", "", ""] if remedy.step is None else _show_need(found, remedy, before)
        table.add_row("\n".join(remedy.changes), *cells, remedy.note)
    return table


def _show_need(found: Forecast, remedy: Remedy, before: float) -> list[str]:
    assert remedy.step is not None
    need = find_need(found, remedy, remedy.step)
    return [show_count(need, "B"), found.fit(need), f"{found.step_flops(remedy.step) / before:.2f}x"]


def _show_hours(hours: float | None) -> str:
    if hours is None:
        return ""
    return f"{hours:.1f} h" if hours >= 1.0 else f"{60 * hours:.1f} min"
