"""``sparsebp model``: write a run's model for other programs, with its card; convert or upload it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.completion import complete_run
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.quantity import show_count
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.errors import RunNotFoundError, UsageError
from sparsebp_tools.answer.model_record import ModelFolder

if TYPE_CHECKING:
    from sparsebp_tools.release import ReleasedModel

ARCHIVES = (".tar.gz", ".tgz")


def model(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run: an id, the beginning of an id, a recipe's name, @last, @TAG, or a run's folder.",
            autocompletion=complete_run,
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FOLDER",
            help="A new or empty folder (default: a folder here, named after the run and its id).",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="best|last|STEP",
            help=(
                "The checkpoint whose weights are written (default: the weights at the end of the run): best (needs "
                "checkpoint.keep_best), last (the newest checkpoint), or a step."
            ),
        ),
    ] = None,
    gguf: Annotated[
        bool,
        typer.Option(
            "--gguf",
            help="Also write a GGUF file with llama.cpp's converter (set LLAMA_CPP to the folder of llama.cpp).",
        ),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Also upload the model to the Hugging Face hub, as USER/NAME or NAME. The uploaded model is private."
            ),
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: make the uploaded model public.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Write a run's model as a folder for transformers, vLLM or llama.cpp, with a model card."""
    from sparsebp_tools.release import write_model
    from sparsebp_tools.release.hub import check_hub
    from sparsebp_tools.release.hub import push as send

    if public and push is None:
        raise UsageError("--public needs --push")
    planned = _plan(run, folder, checkpoint, gguf=gguf, name=push)
    planned.check()
    if push is not None:
        check_hub(push)
    with _ending_on_sigterm():
        notes = write_model(planned, lambda part: _rebuild(planned, part), _verify)
    for note in notes:
        print_line(f"note: {note}", stderr=True)
    files = sorted(file for file in planned.place.rglob("*") if file.is_file())
    size = sum(file.stat().st_size for file in files)
    # Before the upload, which may take long or fail: the folder exists already.
    if output is Output.TABLE:
        print_line(f"{planned.place}: step {planned.weights.step} of run {planned.run.run_id}, {show_count(size, 'B')}")
    found = ModelFolder(
        folder=str(planned.place),
        run=planned.run.run_id,
        step=planned.weights.step,
        bytes=size,
        files=[str(file.relative_to(planned.place)) for file in files],
        hub=None if push is None else send(planned.place, push, public=public),
        notes=list(notes),
    )
    tell(found, output, lambda _: None if found.hub is None else print_line(found.hub))


def _plan(word: str, folder: Path | None, checkpoint: str | None, *, gguf: bool, name: str | None) -> ReleasedModel:
    from sparsebp_cli.cli.stored_run import find_one
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.run import History
    from sparsebp_cli.run.folder import is_file
    from sparsebp_tools.release import ReleasedModel, find_weights
    from sparsebp_tools.release.gguf import find_converter

    if word.endswith(ARCHIVES) and is_file(Path(word)):
        raise UsageError(
            f"{word} is an archive, and archives contain no models: name the run on the machine that trained it"
        )
    try:
        run = find_one(word)
    except RunNotFoundError:
        if not is_file(Path(word) / "config.json"):
            raise
        raise UsageError(f"{word} is already the folder of a model: name a run instead") from None
    plan, history = Plan.load(run.plan_file), History.load(run.path)
    weights = find_weights(run, plan, history, checkpoint)
    place = folder or Path(f"{plan.recipe.name}-{run.run_id}")
    title = name or place.absolute().name
    return ReleasedModel(run, plan, history, weights, place, title, find_converter() if gguf else [])


def _verify(part: Path, recorded: Path) -> None:
    """Compare a folder's outputs, loaded in a new process, with the outputs that the run recorded."""
    from sparsebp_cli.cli.worker_answer import ask

    ask("reload", [part, recorded], "compares the saved model")


def _rebuild(planned: ReleasedModel, part: Path) -> None:
    """Write a checkpoint's model into a folder, in a process that loads torch."""
    from sparsebp_cli.cli.worker_process import measure_apart

    recipe = planned.plan.recipe
    names: Any = planned.history.facts.get("label_names") or []
    labels = len(names) if recipe.dataset.format == "classification" else None
    request = {"plan": str(planned.run.plan_file), "labels": labels, "step": planned.weights.step, "folder": str(part)}
    measure_apart("sparsebp_tools.checkpoint_model", json.dumps(request))


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block with an exception, as Ctrl-C does, so that it leaves nothing incomplete."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
