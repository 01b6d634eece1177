"""``sparsebp evaluate``: evaluate a finished run's model, or any folder's, on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.completion import complete_run
from sparsebp_cli.cli.screen import Output, console, make_table, print_line
from sparsebp_cli.errors import RunNotFoundError, SparseBPError, UsageError, explain_system_error
from sparsebp_cli.run import History, JournalWriter, RunFolder, State
from sparsebp_tools.answer.evaluation_record import Evaluation

PREFIX = "lm_eval/"


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A finished run, or a folder with a model and its tokenizer.",
            autocompletion=complete_run,
        ),
    ],
    lm_eval: Annotated[
        str,
        typer.Option(
            "--lm-eval", metavar="TASK,...", help="Names of tasks of lm-evaluation-harness, separated by commas."
        ),
    ],
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Evaluate only the first N examples of each task, for a quick try."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Number of examples in a forward pass.")] = 8,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Device of the model: cpu, cuda, cuda:1.")] = "cpu",
    output: Annotated[Output, typer.Option("-o", "--output", help="A table for people, or JSON.")] = Output.TABLE,
) -> None:
    """Evaluate a model on tasks of lm-evaluation-harness. Stores the results in the run."""
    from sparsebp_cli.cli.worker_process import measure_apart

    run, folder = _find(source)
    names = [name.strip() for name in lm_eval.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--lm-eval needs the name of at least one task, got {lm_eval!r}")
    request = {"folder": str(folder), "tasks": names, "limit": limit}
    found = measure_apart("sparsebp_tools.harness", json.dumps(request | {"batch_size": batch_size, "device": device}))
    kept, lost = _keep(run, found) if run is not None and limit is None else ([], None)
    tasks = {task: {k: part for k, part in one.items() if k != "scores"} for task, one in found["tasks"].items()}
    run_id = None if run is None else run.run_id
    facts = {"run_id": run_id, "version": found["version"], "tasks": tasks, "kept": list(kept)}
    tell(Evaluation.read(facts), output, _print)
    if run is not None and lost is not None:
        # After the results, which took minutes and are stored nowhere else.
        text = lost if isinstance(lost, SparseBPError) else explain_system_error(lost) or lost
        print_line(f"error: these results were not stored in run {run.run_id}: {text}", stderr=True)
        raise typer.Exit(getattr(lost, "exit_code", SparseBPError.exit_code))
    if run is not None and output is Output.TABLE:
        print_line(
            describe_kept(run, kept) if limit is None else "not stored: --limit evaluates only a part of the examples"
        )


def _keep(run: RunFolder, found: Mapping[str, Any]) -> tuple[list[str], SparseBPError | OSError | None]:
    """Return what :func:`record` stored, and the error that prevented it: another process, or a full disk."""
    try:
        return record(run, found), None
    except (SparseBPError, OSError) as error:
        return [], error


def describe_kept(run: RunFolder, kept: Sequence[str]) -> str:
    """Return a line about what a run stores, with the command that compares the first of these metrics."""
    if not kept:
        return f"not stored: run {run.run_id} has all of these metrics already, and keeps their first values"
    return f"stored in the run; to compare it: `sparsebp compare {run.run_id} --metric {kept[0]}`"


def _find(source: str) -> tuple[RunFolder | None, Path]:
    """Return a run and the folder of its model, or None and a folder that is no run."""
    from sparsebp_cli.cli.stored_run import find_one

    folder = Path(source)
    run = None
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        try:
            run = find_one(source)
        except RunNotFoundError:
            if not folder.is_dir():
                raise
            raise UsageError(
                f"{source} is neither a run nor the folder of a model, because it has no config.json"
            ) from None
        if run.state() is not State.FINISHED:
            raise UsageError(f"run {run.run_id} is {run.state()}, and has no model before it finishes")
        folder = run.path / "model"
    if (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{folder} has only adapters: merge them into their base model, and evaluate the folder of the merged model"
        )
    return run, folder.absolute()


def record(run: RunFolder, found: Mapping[str, Any]) -> list[str]:
    """Write the results into a run's event log as metrics of its last step, with their directions, the harness version
    and each task's identity, and return the names of these metrics. A task that was evaluated before keeps its first
    values and identity."""
    # The worker's lock, so that no other process writes to the event log meanwhile.
    lock = run.lock("worker")
    try:
        history = History.load(run.path)
        step = max(history.series("train/loss"), default=0)
        facts: Any = history.facts
        before = facts.get("lm_eval", {}).get("tasks", {})
        new = {task: judged for task, judged in found["tasks"].items() if task not in before and judged["values"]}
        if not new:
            return []
        values, declared = dict[str, float](), dict(facts.get("metrics", {}))
        for task, judged in new.items():
            for name, one in judged["values"].items():
                values[f"{PREFIX}{task}/{name}"] = one["value"]
                declared[f"{PREFIX}{task}/{name}"] = {"unit": "", "better": one["better"]}
        tasks = before | {
            task: {key: judged[key] for key in ("version", "hash", "examples")} for task, judged in new.items()
        }
        with JournalWriter(run.path) as journal:
            journal.attempt = max(1, journal.attempt - 1)  # nothing is trained, so it is no attempt
            facts = {"metrics": declared, "lm_eval": {"version": found["version"], "tasks": tasks}}
            journal.write("facts", values=facts)
            journal.write("metrics", step=step, values=values)
            scores = {
                f"{PREFIX}{task}/{name}": each for task in new for name, each in new[task].get("scores", {}).items()
            }
            if scores:
                journal.write("scores", step=step, values=scores)
        return list(values)
    finally:
        lock.release()


def _print(found: Evaluation) -> None:
    title = f"lm-evaluation-harness {found.version}"
    table = make_table("task", "metric", "value", "better", "examples", numbers=["value", "examples"], title=title)
    for task, judged in found.tasks.items():
        for name, one in judged.values.items():
            table.add_row(task, name, f"{one.value:.4f}", one.better, str(judged.examples or ""))
    console().print(table)
