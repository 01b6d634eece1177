"""What a run, a store or another machine wrote cannot command the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from sparsebp_cli.cli.screen import console, print_json, print_line
from sparsebp_cli.errors import RunFailedError
from sparsebp_cli.run import JournalWriter, read
from sparsebp_cli.run.visible import make_visible

from .conftest import Cli, Write, write_run

HOSTILE = {
    "clears the screen": "\x1b[2J\x1b[H",
    "sets the clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "hides a link": "\x1b]8;;http://evil\x1b\\text\x1b]8;;\x1b\\",
    "sets the title": "\x1b]0;root@host\x07",
    "C1 form of an escape sequence": "\x9b31m\x9d52;c;eA==\x9c",
    "turns the writing direction": "\u202egnp.exe\u202c",
    "isolates": "\u2066x\u2069\u061c\u200f",
    "goes back": "good\rbad \b\b\b\x7f",
    "invisible ASCII": "\U000e0041\U000e0042",
    "half a surrogate pair": "\ud800",
}


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE.keys())
def hostile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_harmless(text: str) -> None:
    assert make_visible(text) == text
    text.encode()


def test_lines_tables_and_texts_show_control_characters_as_text(
    hostile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_line(hostile)
    table = Table(title=hostile)
    table.add_column(hostile)
    table.add_row(Text(hostile))
    table.add_row(hostile)
    console().print(table)
    console(stderr=True).print(hostile, markup=False)
    out, err = capsys.readouterr()
    assert_harmless(out + err)
    assert "\\u" in out
    assert "\\u" in err


def test_json_stays_the_same_json(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": hostile, hostile: [hostile]})
    out = capsys.readouterr().out
    assert_harmless(out)
    assert json.loads(out) == {"text": hostile, hostile: [hostile]}


def test_a_terminal_still_gets_our_own_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    ours = console()
    with ours.capture() as captured:
        ours.print(Text("a\x1b[31mb", style="bold"), end="")
    assert captured.get() == "\x1b[1ma\\u001b[31mb\x1b[0m"


def test_letters_of_every_language_stay() -> None:
    text = "Grüße, 漢字, שלום, سلام, नमस्ते\u200d, 👩\u200d🔬\tand\nlines"
    assert make_visible(text) == text


@pytest.mark.parametrize("verb", [["show"], ["show", "-o", "json"], ["runs"], ["logs"], ["compare"]], ids=" ".join)
def test_no_verb_passes_on_what_a_journal_or_log_says(verb: list[str], call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe())
    everything = "".join(HOSTILE.values()).replace("\ud800", "")
    attempts = max(record["attempt"] for record, _ in read(run.path))
    with JournalWriter(run.path) as journal:
        journal.write("note", level="warning", text=everything)
        journal.write("end", status="failed", step=attempts, text=everything)
    run.log_file.write_bytes(everything.encode() + b"\n\xff\xfe\x1b[2J\n")
    done = call(*verb, run.run_id) if verb != ["runs"] else call("runs")
    assert_harmless(done.stdout + done.stderr)
    assert done.returncode == (RunFailedError.exit_code if verb == ["compare"] else 0)


PIPES: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "without end": lambda file: file.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.mark.promise("R22")
@pytest.mark.parametrize("make", PIPES.values(), ids=PIPES)
@pytest.mark.parametrize(
    "name", ["journal.jsonl", "outline.json", "labels.json", "target.json", "tracking.json", "trial.json", "worker.log"]
)
def test_a_file_that_never_ends_costs_no_verb_its_end(
    name: str, make: Callable[[Path], None], call: Cli, write_recipe: Write
) -> None:
    good, bad = write_run(write_recipe(name="good")), write_run(write_recipe(name="bad"))
    (bad.path / name).unlink(missing_ok=True)
    make(bad.path / name)
    for words in (["runs"], ["show", bad.run_id], ["logs", bad.run_id], ["compare", good.run_id, bad.run_id]):
        done = call(*words)
        assert "Traceback" not in done.stdout + done.stderr, words
        if words[0] == "runs":
            assert done.returncode == 0, done.stderr
            assert good.run_id in done.stdout
            assert bad.run_id in done.stdout
