"""Every verb of ``--help`` is run on every hostile input that it can meet: it ends with one line, runs nothing of the
input, quotes no secret, and changes no file elsewhere."""

from __future__ import annotations

import functools
import inspect
import os
import re
import resource
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
import typer

import sparsebp_cli.target
from sparsebp_cli.cli.app import VERBS
from sparsebp_cli.run.visible import make_visible

from . import fake_sparsebp, hostile
from .conftest import RECIPE, TESTS, write_run
from .hostile import CANARY, KINDS, ROWS, SECRET

OF_A_KEY = re.compile(r"error: \S+:\d+:\d+: ")  # file, line and column
HANG_SECONDS = 120.0  # of a busy machine, too: a command takes some hundredths
STUDY = "version: 1\nstudy: s\nbase: fake.yaml\narms: {a: {policy: dense}, b: {policy: dense}}\nseeds: {report: 0-1}\n"
CELLS = [
    pytest.param(verb, kind, id=f"{verb}, {kind}")
    for verb in ROWS
    for kind in KINDS
    if kind != "working folder" and hostile.lines_of(verb, kind)  # that one is tried by test_hostile_folder.py
]
# What a parameter names that is read, by the word of its kind; and those that name what is written.
READ = {"recipe": "RECIPE", "recipes": "RECIPE", "file": "RECIPE", "candidate": "RECIPE", "run": "RUN", "runs": "RUN",
        "source": "RUN", "archive": "ARCHIVE"}  # fmt: skip
WRITTEN = {"folder", "html", "ids", "out", "to"}


@pytest.mark.inventory
def test_every_verb_has_a_row_and_each_file_that_it_reads_a_line() -> None:
    verbs = {verb.__name__: verb for group in VERBS.values() for verb in group}
    assert ROWS.keys() == verbs.keys()
    for name, verb in verbs.items():
        assert all(line.split()[0] == name for line in ROWS[name])
        words = {word for line in ROWS[name] for word in line.replace("_", " ").replace(".", " ").split()}
        hints = get_type_hints(verb, include_extras=True)
        for parameter in inspect.signature(verb).parameters:
            hint = str(hints[parameter])
            if "Path" not in hint and "ArgumentInfo" not in hint:
                continue
            is_output = parameter in WRITTEN or (name, parameter) == ("archive", "file")
            known = READ.get(parameter, "TEXT")
            assert is_output or known in words, f"{name} has no line for what its parameter {parameter} reads"
            assert is_output or "ArgumentInfo" not in hint or {"TEXT", "RECIPE"} & words


get_command = functools.cache(typer.main.get_command)  # a tenth of a second, each time


class Hang(BaseException):
    """A command does not end."""


def stop(*_: object) -> None:
    raise Hang


def sign(path: Path) -> tuple[int, ...]:
    """Return what changes with a file's content, or for a folder, that it is one."""
    found = path.lstat()
    return (
        (found.st_mode,)
        if stat.S_ISDIR(found.st_mode)
        else (found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns)
    )


def remove(path: Path) -> None:
    """Remove whatever is at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Ground:
    """A working folder, a home with two runs, and a file elsewhere; made anew for every command."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.monkeypatch = place, monkeypatch
        self.work, self.home, self.elsewhere = place / "work", place / "home", place / "outside"
        self.elsewhere.mkdir()
        (self.elsewhere / "secret").write_text(f"password: {SECRET}\n")
        self._fresh, self._signed = place / "fresh", dict[Path, tuple[int, ...]]()
        self._make()

    def _make(self) -> None:
        work = self._fresh / "work"
        work.mkdir(parents=True)
        (work / "fake.yaml").write_text(RECIPE.format(fake="ok", name="fake"))
        (work / "study.yaml").write_text(STUDY)
        (work / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        self.monkeypatch.setenv("SPARSEBP_HOME", str(self._fresh / "home"))
        self.ids = {}
        for name in ("RUN", "OTHER"):
            run = write_run(work / "fake.yaml")
            self.ids[name] = run.run_id
            hostile.write_model(run.path / "model")
            checkpoint = run.path / "checkpoints" / "step-00000003"
            checkpoint.mkdir(parents=True)
            (checkpoint / "weights.safetensors").write_bytes(bytes(100))

    def renew(self, kind: str, form: str) -> dict[str, str]:
        """Put a form of a kind in its place, and return what each word of a line stands for."""
        self.monkeypatch.undo()
        for place in (self.work, self.home):
            self._restore(place)
        for name, value in {
            "SPARSEBP_HOME": str(self.home), "SPARSEBP_TARGETS": str(self.place / "targets.yaml"),
            "PIP_NO_INDEX": "1",
            "PYTHONPATH": f"{TESTS / 'cli'}{os.pathsep}{TESTS / 'target'}", "HOME": str(self.place),
        }.items():  # fmt: skip
            self.monkeypatch.setenv(name, value)
        self.monkeypatch.setattr(sparsebp_cli.target, "make_target", fake_sparsebp.make_fake)
        self.monkeypatch.setattr(typer.main, "get_command", get_command)
        self.monkeypatch.chdir(self.work)
        words = self.ids | {"FAKE": "fake.yaml", "STUDY": "study.yaml", "RECIPE": "r.yaml", "RECIPE.yaml": "r.yaml"}
        words |= {"ARCHIVE": "a.tar.gz", "MODEL_FOLDER": "model"}
        return words | self._put(kind, KINDS[kind][1][form])

    def _restore(self, place: Path) -> None:
        """Make a folder what it is at first. What no command touched stays: to make everything anew takes longer than
        the command."""
        found = [Path(folder, name) for folder, *names in os.walk(place) for name in [*names[0], *names[1]]]
        for path in sorted(found, reverse=True):
            if self._signed.get(path) != sign(path):
                remove(path)
        place.mkdir(exist_ok=True)
        for source in sorted((self._fresh / place.name).rglob("*")):
            path = place / source.relative_to(self._fresh / place.name)
            if not path.exists():
                path.mkdir() if source.is_dir() else shutil.copy(source, path)
                self._signed[path] = sign(path)

    def _put(self, kind: str, given: object) -> dict[str, str]:
        run = self.home / "runs" / self.ids["RUN"]
        if kind == "text":
            return {"TEXT": str(given)}
        if kind == "variable":
            assert isinstance(given, dict)
            for name, value in given.items():
                self.monkeypatch.setenv(name, value)
            return {}
        if kind == "data":
            assert isinstance(given, tuple)
            name, put = given
            put(self.work / name)
            text = RECIPE.format(fake="ok", name="fake").replace("dataset: {name: none}", f"dataset: {{name: {name}}}")
            (self.work / "data.yaml").write_text(text.replace("model: {name: none}", "model: {name: austen-llama}"))
            return {"DATA": "data.yaml"}
        assert callable(given)
        match kind:
            case "model":
                hostile.write_model(self.work / "model")
                given(self.work / "model")
                text = RECIPE.format(fake="ok", name="fake").replace("model: {name: none}", "model: {name: ./model}")
                (self.work / "model.yaml").write_text(
                    text.replace("dataset: {name: none}", "dataset: {name: text.txt}")
                )
            case "recipe or study":
                given(self.work / "r.yaml")
            case "run" | "name of a run":
                given(run)
            case "archive":
                given(self.work / "a.tar.gz")
            case "store and home":
                given(self.home)
            case "targets.yaml":
                remove(self.place / kind)
                given(self.place / kind)
        return {"MODEL": "model.yaml"}

    def find_problems(self, code: int, out: str, err: str) -> Iterator[str]:
        """Yield what a command did that no input may cause."""
        if code < 0:
            yield "does not end"
            return
        if "raceback" in out + err:
            yield "crashed"
        # Of several runs each that goes wrong has its warning.
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        is_told = errors or "warning: " in err
        is_one = len(errors) < 2 or all(OF_A_KEY.match(line) for line in errors)  # of a file, all that is wrong with it
        if not is_one or (errors and not code) or (code >= 2 and not is_told):
            yield f"exit code {code} with {len(errors)} errors"
        if SECRET in out + err:
            yield "quotes a secret"
        if make_visible(out + err) != out + err:
            yield "commands the terminal"
        for folder in (self.place, self.work, self.home):
            if (folder / CANARY).exists():
                yield "ran foreign code"
        if [file.name for file in self.elsewhere.iterdir()] != ["secret"] or SECRET not in (
            self.elsewhere / "secret"
        ).read_text():
            yield "changed a file elsewhere"


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    """The ground, with less memory than the larger inputs unpack to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (4 << 30), hard))
    before = signal.signal(signal.SIGUSR1, stop)
    yield Ground(tmp_path, monkeypatch)
    signal.signal(signal.SIGUSR1, before)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.promise("R12", "R22", "R32")
@pytest.mark.parametrize(("verb", "kind"), CELLS)
def test_no_verb_hangs_crashes_or_runs_code_of_a_hostile_input(
    verb: str, kind: str, ground: Ground, capsys: pytest.CaptureFixture[str], record_property
) -> None:
    found = []
    lines, forms = hostile.lines_of(verb, kind), KINDS[kind][1]
    for line in lines:
        for form in forms:
            words = ground.renew(kind, form)
            argv = [words.get(word, word) for word in line.split()]
            capsys.readouterr()
            code = run(argv)
            out, err = capsys.readouterr()
            found += [f"{line} on {form}: {what}: {err[-300:]}" for what in ground.find_problems(code, out, err)]
    record_property("trials", len(lines) * len(forms))
    assert not found, "\n".join(found)


def run(argv: list[str]) -> int:
    """Return the exit code of a command, in this process: -1 where it does not end."""
    from sparsebp_cli.cli.app import main

    sys.argv = ["sparsebp", *argv]
    guard = threading.Timer(HANG_SECONDS, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    guard.start()
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    except Hang:
        return -1
    finally:
        guard.cancel()
    return 0
