"""The command line as real processes, most of them with a worker that trains nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparsebp_cli.cli.app import main
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run import JournalWriter, RunFolder, create_run

from ..target.fake_worker import measure

TESTS = Path(__file__).parent.parent
FAKE = [sys.executable, "-m", "fake_sparsebp"]
REAL = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()"]
RECIPE = """\
version: 1
name: {name}
model: {{name: none}}
dataset: {{name: none}}
policy: [{{name: topk, keep: 0.1}}]
training: {{max_steps: 30}}
tracking: {{uri: "sqlite:////dev/null/m.db", tags: {{fake: {fake}}}}}  # told before mlflow is imported, which is slow
"""

Cli = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., "subprocess.Popen[str]"]
Write = Callable[..., Path]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{TESTS / 'cli'}{os.pathsep}{TESTS / 'target'}"}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run the command line to its end."""

    def run(*words: object, real: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*(REAL if real else FAKE), *map(str, words)],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,  # of a busy machine, too
            cwd=tmp_path,
            env=environment() | environ,
        )

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command line and go on."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*words: object, command: list[str] = FAKE) -> subprocess.Popen[str]:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell starts jobs in the background so, and their children inherit it: a terminal does not.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(
            [*command, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment(),
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def write_recipe(tmp_path: Path) -> Write:
    """Write a recipe for the worker that trains nothing."""

    def write(fake: str = "ok", name: str = "fake") -> Path:
        file = tmp_path / f"{name}.yaml"
        file.write_text(RECIPE.format(fake=fake, name=name))
        return file

    return write


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Run the command line to its end inside this process: faster, where no process of its own matters."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["sparsebp", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, errors = capsys.readouterr()
        return subprocess.CompletedProcess(words, int(end.value.code or 0), out, errors)

    return run


def write_run(recipe: Path, *changes: str, max_steps: int = 3) -> RunFolder:
    """Write a finished run as the worker that trains nothing would leave it."""
    plan = Plan(recipe=load_recipe(recipe, [*changes, f"training.max_steps={max_steps}"]))
    run = create_run(plan.run_id)
    plan.save(run.path)
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=0, environment={"python": "3", "packages": {}})
        journal.write("facts", values={"max_steps": max_steps, "warmup_steps": 1})
        for step in range(1, max_steps + 1):
            journal.write("metrics", step=step, values=measure(step) | {"eval/loss": 4.1 / (1 + 0.01 * step)})
        journal.write("end", status="finished", step=max_steps, text="")
    return run


@pytest.fixture
def two_runs(write_recipe: Write) -> None:
    """One of ``topk-rows``, then one of ``dense``, both finished."""
    write_run(write_recipe(name="topk-rows"))
    write_run(write_recipe(name="dense"), "policy=dense")


@pytest.fixture(autouse=True)
def _leave_nothing_running(no_process_left: None) -> None:
    """Every test may start workers."""
