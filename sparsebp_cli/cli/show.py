"""``sparsebp show``: show all data of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.answer.result_record import MetricRange, Note, RunFacts
from sparsebp_cli.cli.census_table import census_table
from sparsebp_cli.cli.compare import find_one_in
from sparsebp_cli.cli.option import OneRun
from sparsebp_cli.cli.proof import proof_table, read_rows
from sparsebp_cli.cli.screen import console, make_table, print_line, print_screenful
from sparsebp_cli.cli.stored_run import find_one
from sparsebp_cli.cli.summary import summarise
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.run.census import Census
from sparsebp_cli.run.journal import list_asked, list_samples
from sparsebp_cli.run.label import Labels

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


REST = "more: --all (FLOPs, memory, data, machine, recipe), -o json, -o yaml"
LONGEST = 160  # characters of a generated text in the table; JSON has more


class ShowFormat(StrEnum):
    """Output formats of a run."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def show(
    run: OneRun,
    output: Annotated[
        ShowFormat,
        typer.Option("-o", "--output", help="A table for people, JSON with everything, or YAML with the recipe only."),
    ] = ShowFormat.TABLE,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show counted FLOPs, memory, generated texts, data, machine and recipe.")
    ] = False,
    place: Annotated[
        str | None,
        typer.Option("--from", metavar="PLACE", help="Read the run from here: a folder of runs, or an archive."),
    ] = None,
) -> None:
    """Show the result, numbers, notes and files of one run. With --all, show everything."""
    folder = find_one(run) if place is None else find_one_in(place, run)
    plan, history = folder.read_plan(), History.load(folder.path)
    if output is ShowFormat.YAML:
        print_line(_to_yaml(plan["recipe"]))
    else:
        tell(
            describe(folder, plan, history), output, lambda found: _print(found, folder, history, everything=everything)
        )


def describe(folder: RunFolder, plan: dict[str, Any], history: History) -> RunFacts:
    """Return everything about a run as plain data."""
    metrics = {}
    for name in sorted(history.metrics):
        series = history.series(name)
        steps = list(series)
        metrics[name] = MetricRange(
            points=len(steps),
            first_step=steps[0],
            first=series[steps[0]],
            last_step=steps[-1],
            last=series[steps[-1]],
        )
    proofs: Any = {str(step): read_rows(proof) for step, proof in history.proofs.items()}
    return RunFacts(
        run_id=folder.run_id,
        name=plan["recipe"]["name"],
        labels=asdict(Labels.load(folder.path)),
        state=str(folder.state()),
        plan=plan,
        facts=dict(history.facts),
        environments=history.environments,
        metrics=metrics,
        layers=_by_text(history.layers),
        samples=_by_text(history.samples),
        proofs=proofs,
        notes=[Note(attempt=attempt, level=level, text=text) for attempt, level, text in history.notes],
        ends=[dict(end) for end in history.ends],
        files={path.name: str(path) for path in sorted(folder.path.iterdir()) if not path.name.endswith(".lock")},
    )


def _by_text(values: Mapping[Any, object]) -> dict[str, Any]:
    """Return a mapping with its keys, such as steps, as text."""
    return {str(key): value for key, value in values.items()}


def _print(found: RunFacts, folder: RunFolder, history: History, *, everything: bool) -> None:
    head: list[RenderableType] = [summarise(folder, history, everything=everything, names_folder=True)]
    head += [f"tags: {', '.join(found.labels['tags'])}"] if found.labels["tags"] else []
    head += [f"note: {found.labels['note']}"] if found.labels["note"] else []
    # The last end is of an earlier attempt if the run was resumed and has not ended again.
    ends = [] if folder.ended() is None else found.ends[-1:]
    head += [f"{end['status']}: {end['text']}" for end in ends if end["text"]]
    notes = sorted(found.notes, key=lambda note: note.level != "warning")
    texts = [note.text if note.level == "detail" else f"{note.level}: {note.text}" for note in notes]
    if not everything:
        print_screenful(head, texts, REST)
        return
    for part in head:
        console().print(part, soft_wrap=isinstance(part, str))
    for text in texts:
        console().print(text)
    facts, plan = dict(found.facts), found.plan
    for table in _tables(history, facts.pop("census", None)):
        console().print()
        console().print(table)
    sections: dict[str, object] = {"facts": facts, "machine": (found.environments or [{}])[-1]}
    provenance = {key: value for key, value in plan["provenance"].items() if value and key != "git_diff"}
    if plan["provenance"].get("git_diff"):
        provenance["git_diff"] = "uncommitted changes; plan.json has their text"
    sections |= {"provenance": provenance, "recipe": plan["recipe"], "folder": str(folder.path)}
    for title, content in sections.items():
        if content:
            print_line("\n" + _to_yaml({title: content}))


def _tables(history: History, census: Census | None) -> Iterator[Table]:
    if history.proofs:
        step = max(history.proofs)
        yield proof_table(history.proofs[step], step)
    if any(True for _ in list_samples(history)):
        yield samples_table(history)
    if list_asked(history):
        yield asked_table(history)
    if census:
        yield census_table(census)


def samples_table(history: History) -> Table:
    """Return the generated texts of the first, the middle and the last generation beside the reference texts."""
    title = "generated: answers to the first validation prompts, at the first, middle and last generation"
    table = make_table("step", "prompt", "reference", "generated", numbers=["step"], title=title)
    for step, *texts in list_samples(history):
        prompt, *answers = (" ".join(text.split()) for text in texts)
        table.add_row(str(step), prompt[-LONGEST:], *(answer[:LONGEST] for answer in answers))
    return table


def asked_table(history: History) -> Table:
    """Return the saved model's questions and answers at the end, beside the reference texts."""
    table = make_table(
        "prompt", "reference", "answer", title="asked: answers of the saved model, loaded by plain transformers"
    )
    for texts in list_asked(history):
        prompt, *answers = (" ".join(text.split()) for text in texts)
        table.add_row(prompt[-LONGEST:], *(answer[:LONGEST] for answer in answers))
    return table


def _to_yaml(content: object) -> str:
    import yaml

    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100).rstrip("\n")
