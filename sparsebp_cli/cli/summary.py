"""Make the summary of a finished run: one small table, and the command to type next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from sparsebp_cli.cli.quantity import show_clock, show_count, show_seconds, show_share
from sparsebp_cli.entry_point import entry_points
from sparsebp_cli.run import History, RunFolder, State, metric
from sparsebp_cli.run.journal import list_asked
from sparsebp_cli.run.metric import Metric
from sparsebp_cli.run.stored_recipe import is_dense
from sparsebp_cli.run.visible import make_visible

if TYPE_CHECKING:
    from rich.console import RenderableType

DURING = (*(metric.EVAL_LOSS, metric.EVAL_ACCURACY, metric.EVAL_MACRO_F1, metric.EVAL_MCC, metric.EVAL_F1),)
AFTER = (*(metric.TEST_LOSS, metric.TEST_ACCURACY, metric.TEST_MACRO_F1, metric.TEST_MCC, metric.TEST_F1),)
JUDGED = ("loss", "accuracy", "macro-F1", "MCC", "F1")
PHASES = (
    (metric.FORWARD_SECONDS, "forward"),
    (metric.BACKWARD_SECONDS, "backward"),
    (metric.OPTIMIZER_SECONDS, "optimizer"),
)
MEMORY = (
    (metric.WEIGHT_BYTES, "weights"),
    (metric.GRADIENT_BYTES, "gradients"),
    (metric.OPTIMIZER_BYTES, "optimizer"),
    (metric.SAVED_BYTES, "saved for backward"),
)

FIDELITY = (
    (metric.COSINE, "cosine"),
    (metric.RELATIVE_ERROR, "relative error"),
    (metric.SIGN_AGREEMENT, "same sign"),
)
SHOWN = 20  # characters of a text that the saved model was asked or answered
BROKEN = "a policy skipped less work than its estimate; `show RUN --all` shows the counts"
# Rows of the short summary: the first word of a label, and the number of rows beginning with it.
BRIEF = {"eval": 2, "test": 2, "asked": 1, "training": 1, "cost": 1, "speed": 1, "memory": 1}


def summarise(
    run: RunFolder,
    history: History,
    *,
    together: Sequence[RunFolder] = (),
    warning: str = "",
    everything: bool = False,
    names_folder: bool = False,
) -> RenderableType:
    """Return the summary for rich, at most 12 lines unless ``everything``. ``warning`` is a problem outside the run,
    such as metrics that were not sent. ``together`` are all runs of this command, given only with the last run; the
    next command names them. ``names_folder`` adds the run's folder."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from sparsebp_cli.recipe.description import describe_policies

    recipe = run.read_plan()["recipe"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    rows = summary_rows(history, recipe, brief=not everything)
    for label, text in rows if everything else _choose(rows):
        grid.add_row(label, Text(text))
    broken = BROKEN if _is_broken(history) and not everything else ""
    for text in filter(None, (warning, broken)):
        grid.add_row("warning", Text(text))
    if names_folder:
        grid.add_row("folder", Text(str(run.path)))
    if everything and (run.path / "model").is_dir():
        grid.add_row("model", Text(str(run.path / "model")))
    head = Text.assemble((recipe["name"], "bold"), f" {run.run_id}  {run.state()}  ({describe_policies(recipe)})")
    last = []
    if together:
        # Use ids, because others may have started runs meanwhile, which @N would count.
        ids = [folder.run_id for folder in together]
        command = f"sparsebp compare {' '.join(ids)}" if len(ids) > 1 else f"sparsebp show {run.run_id}"
        last.append(Text.assemble("next: ", (command, "bold")))
    if (run.path / "model").is_dir():
        has_verb = entry_points("sparsebp.verbs").select(name="model")  # of a package, may be missing
        how = (f"sparsebp model {run.run_id}", "bold") if has_verb else f"from_pretrained reads {run.path / 'model'}"
        last.append(Text.assemble("use the model: ", how))
    return Group(head, grid, *last)


def _choose(rows: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Keep the rows of the short summary."""
    left = dict(BRIEF)
    for label, text in rows:
        kind = label.partition(" ")[0]
        if left.get(kind, 0):
            left[kind] -= 1
            yield label, text


def summary_rows(history: History, recipe: dict[str, Any], *, brief: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the known values of a run as label and text. ``brief`` shortens cost and memory."""
    for key, label in zip(DURING, JUDGED, strict=True):
        if values := list(history.series(key.name).values()):
            yield f"eval {label}", f"first {values[0]:.4f}, last {values[-1]:.4f}"
    for key, label in zip(AFTER, JUDGED, strict=True):
        if (value := history.last(key.name)) is not None:
            yield f"test {label}", f"{value:.4f} on the test split, after the last step"
    yield from _declared_rows(history)
    for prompt, reference, answer in list_asked(history):
        asked, wanted, found = (make_visible(" ".join(text.split())) for text in (prompt, reference, answer))
        end = asked if len(asked) <= SHOWN else f"...{asked[-SHOWN:]}"
        yield "asked", f"{end} -> {found[:SHOWN]} (data: {wanted[:SHOWN]})"
    if text := _step_time(history):
        yield "step time", text
        yield "training", _training(history)
    if text := _cost(history, recipe, brief=brief):
        yield "cost", text
    if text := _speed(history, recipe):
        yield "speed", text
    if text := _memory(history, brief=brief):
        yield "memory", text
    executed, dense = (history.last(which.name) for which in (metric.BACKWARD_EXECUTED, metric.BACKWARD_DENSE))
    if executed is not None and dense:
        both = f"{show_count(executed, 'FLOP')} counted, {show_count(dense, 'FLOP')} in dense training"
        yield "backward", f"{both} ({show_share(executed / dense)}), at the last probe"
    if trials := history.series(metric.PROBING_FLOPS.name):
        when = ", ".join(map(str, trials))
        yield "trials", f"{show_count(sum(trials.values()), 'FLOP')} in trial passes, before step {when}"
    last = (("proof", _proof(history)), ("fidelity", _fidelity(history)))
    yield from ((label, text) for label, text in last if text)


def _declared_rows(history: History) -> Iterator[tuple[str, str]]:
    """Yield the recipe's own metrics, such as metrics of generated texts."""
    for name in history.facts.get("metrics", {}):
        values = list(history.series(name).values())
        if not values:
            continue
        if name.startswith("test/"):
            yield name.replace("/", " "), f"{values[-1]:.4f} on the test split, after the last step"
        else:
            yield name.replace("/", " "), f"first {values[0]:.4f}, last {values[-1]:.4f}"


def _proof(history: History) -> str:
    """Describe the proof. Report a claim that any probe found broken."""
    claimed, executed = (history.last(which.name) for which in (metric.CLAIMED_SHARE, metric.EXECUTED_SHARE))
    parts = []
    if claimed is not None and executed is not None:
        parts.append(
            f"counted {show_share(executed)} of the dense FLOPs at the policy's sites, estimated {show_share(claimed)}"
        )
        parts += ["the policy skipped less than its estimate"] if _is_broken(history) else []
    return "; ".join(parts)


def _is_broken(history: History) -> bool:
    """Return whether any probe found a claim of the policies broken."""
    return max(history.series(metric.EXCESS_SHARE.name).values(), default=0.0) > 0


def _fidelity(history: History) -> str:
    """Describe medians over the steps, as a comparison does, because a single step may be unusual."""
    parts = [f"{word} {value:.4f}" for which, word in FIDELITY if (value := history.median(which.name)) is not None]
    bias, chance, variance = (
        history.median(which.name) for which in (metric.BIAS, metric.BIAS_STANDARD_ERROR, metric.VARIANCE)
    )
    if bias is not None and chance is not None and variance is not None:
        parts.append(f"bias {bias:.4f} ({chance:.4f} expected by chance), variance {variance:.4f}")
    if (noise := history.median(metric.NOISE_RATIO.name)) is not None:
        parts.append(f"squared error {noise:.3g} times the variance of dense gradients over batches")
    steps = len(history.series(metric.COSINE.name))
    return ", ".join(parts) + (f" (medians of {steps} steps)" if steps > 1 else "")


def _step_time(history: History) -> str:
    from sparsebp_cli.compare.statistics import quartiles

    step = quartiles(_after_warmup(history, metric.STEP_SECONDS))
    if step is None:
        return ""
    phases = [(word, quartiles(_after_warmup(history, key))) for key, word in PHASES]
    split = ", ".join(f"{word} {show_seconds(q.median)}" for word, q in phases if q is not None)
    quarters = f"quartiles {show_seconds(step.low)} to {show_seconds(step.high)}"
    return f"median {show_seconds(step.median)} ({quarters}); medians of {split}"


def _training(history: History) -> str:
    seconds = history.series(metric.STEP_SECONDS.name)
    timed = "timed " if len(seconds) < len(history.series(metric.TRAIN_LOSS.name)) else ""  # a step may have no time
    parts = [f"{show_clock(sum(seconds.values()))} for {len(seconds)} {timed}steps"]
    if tokens := _after_warmup(history, metric.TOKENS_PER_SECOND):
        parts.append(f"median {median(tokens):,.0f} tokens/s")
    return ", ".join(parts)


def _cost(history: History, recipe: dict[str, Any], *, brief: bool) -> str:
    """Return the FLOPs of all steps, and their fraction of dense's."""
    steps, dense = (history.series(name.name) for name in (metric.STEP_FLOPS, metric.DENSE_STEP_FLOPS))
    flops = sum(steps.values())
    if not flops or not dense:
        return ""
    text = f"{show_count(flops, 'FLOP')} for {len(steps)} steps" + ("" if brief else ", updates included")
    if is_dense(recipe):
        return text
    return f"{text}, {flops / sum(dense.values()):.2f} times dense training" + ("" if brief else " on the same batches")


def _after_warmup(history: History, key: Metric) -> list[float]:
    """Leave out the first steps of every attempt, which are slower. A run with only warm-up steps keeps them."""
    warmup, series = int(history.facts.get("warmup_steps", 0)), history.series(key.name)
    cold = {step for _, start in history.warm for step in range(start + 1, start + 1 + warmup)}
    return [value for step, value in series.items() if step not in cold] or list(series.values())


def _speed(history: History, recipe: dict[str, Any]) -> str:
    """Describe the speed-up limit and the fraction of it reached, as a comparison does."""
    from sparsebp_cli.compare.loaded import LoadedRun
    from sparsebp_cli.compare.saving import find_saving

    if is_dense(recipe):
        return ""  # dense against dense only measures the machine
    steps = int(recipe["training"]["max_steps"])
    found = find_saving([LoadedRun("", "", 0, "", recipe, 0.0, history, State.FINISHED, steps)])
    parts = []
    if found.speed is not None:
        how = f"FLOPs of all steps, and time per FLOP in {found.probes} probe{'s' * (found.probes > 1)}"
        parts.append(f"about {found.speed:.2f}x as fast as dense (estimated from {how})")
    if found.limit is not None:
        parts.append(f"limit {found.limit:.2f}x, if time falls in proportion to FLOPs")
    return "; ".join(parts)


def _memory(history: History, *, brief: bool) -> str:
    device, process, whole = (
        history.last(which.name)
        for which in (metric.PEAK_ALLOCATED_BYTES, metric.PEAK_RESIDENT_BYTES, metric.STEP_PEAK_BYTES)
    )
    parts = [] if brief else [(word, history.last(key.name)) for key, word in MEMORY]
    split = ", ".join(f"{word} {show_count(value, 'B')}" for word, value in parts if value is not None)
    if whole is not None:
        split = f"tensors of a step: {show_count(whole, 'B')} at most" + (f" ({split})" if split else "")
    if device is not None:
        return f"peak {show_count(device, 'B')}" + (f": {split}" if split else "")
    rest = f"the process {show_count(process, 'B')} with its libraries" if process is not None else ""
    return "; ".join(filter(None, (split, rest)))
