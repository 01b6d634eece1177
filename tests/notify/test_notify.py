"""Users are told of the end of runs, by a command that may fail or hang; runs never notice."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from sparsebp_cli import notify
from sparsebp_cli.cli.checkup import check_notices
from sparsebp_cli.errors import RecipeError
from sparsebp_cli.run import JournalWriter, RunFolder, home
from sparsebp_tools.notify import Event, Notice, event, load_settings, tell, tell_end
from sparsebp_tools.notify.deliver import complete, deliver, main
from tests.cli.conftest import Cli, Write, cli, write_recipe, write_run  # noqa: F401 - fixtures

EVENT = Event("finished", {"run_id": "r1"})


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "settings.yaml"
    monkeypatch.setenv("SPARSEBP_SETTINGS", str(file))
    home().mkdir(parents=True, exist_ok=True)
    return file


def write_to(file: Path) -> Notice:
    """A command that writes what it gets to a file, which is whole as soon as it is there."""
    copy = "import os, sys; open(sys.argv[2], 'w').write(sys.stdin.read()); os.replace(sys.argv[2], sys.argv[1])"
    return Notice(command=(sys.executable, "-c", copy, str(file), f"{file}.new"))


def log() -> str:
    file = home() / "notify.log"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_know_is_sent_to_nobody(settings: Path, tmp_path: Path, number: float) -> None:
    assert not deliver(write_to(tmp_path / "got"), Event("judged", {"gain": number}))
    assert "judged: has a number that JSON does not know" in log()
    assert not (tmp_path / "got").exists()


def test_a_command_gets_the_event_and_its_failures_are_logged(settings: Path, tmp_path: Path) -> None:
    assert deliver(write_to(tmp_path / "got"), EVENT)
    got = json.loads((tmp_path / "got").read_text())
    assert got == {"event": "finished", "id": EVENT.id, "time": EVENT.time, "facts": {"run_id": "r1"}}
    assert not deliver(Notice(command=(sys.executable, "-c", "raise SystemExit(3)")), EVENT)
    assert not deliver(Notice(command=("no-such-program",)), EVENT)
    assert not deliver(Notice(command=("sleep", "600"), timeout_seconds=0.2), EVENT)
    assert "ended with 3" in log()
    assert "no-such-program cannot be started: No such file or directory" in log()
    assert "sleep took more than 0.2 s, and was ended" in log()


def end(run: RunFolder, status: str, text: str = "", **more: object) -> RunFolder:
    with JournalWriter(run.path) as journal:
        journal.attempt = 1
        journal.write("end", status=status, step=3, text=text, **more)
    return run


@pytest.mark.parametrize(
    ("status", "code", "is_asked", "name"),
    [
        ("finished", 0, False, "finished"),
        ("failed", 1, False, "failed"),
        ("failed", 3, False, "diverged"),
        ("interrupted", -9, False, "interrupted"),
        ("interrupted", 130, True, None),
        ("cancelled", 143, True, None),
    ],
)
def test_the_end_of_a_run_is_named_from_its_journal(
    write_recipe: Write,  # noqa: F811 - the fixture
    status: str,
    code: int,
    is_asked: bool,
    name: str | None,
) -> None:
    run = end(write_run(write_recipe()), status, "a reason")
    facts = {"folder": str(run.path), "exit_code": code, "is_asked": is_asked}
    found = complete(Event("", facts))
    assert (found and found.event) == name
    if found is not None:
        assert (found.facts["run_id"], found.facts["state"], found.facts["text"]) == (run.run_id, status, "a reason")


def test_a_run_that_pauses_as_its_recipe_says_tells_nobody(write_recipe: Write) -> None:  # noqa: F811 - the fixture
    run = end(write_run(write_recipe()), "interrupted", "paused", cause="paused")
    assert complete(Event("", {"folder": str(run.path), "exit_code": 0, "is_asked": False})) is None


def test_nothing_is_started_where_nobody_asked(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    tell("finished", {})


def test_what_goes_wrong_when_telling_is_never_raised(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.write_text("notify: [{command: [true]}]\n")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(event.subprocess, "Popen", refuse)
    tell("finished", {"loss": object()})
    tell_end(RunFolder(home() / "runs" / "gone"), None, is_asked=False)


def test_the_whole_way_is_a_process_of_its_own(settings: Path, tmp_path: Path) -> None:
    command = json.dumps(write_to(tmp_path / "got").command)
    settings.write_text(f"notify:\n- {{command: {command}, on: [judged]}}\n")
    tell("ignored", {})
    tell("judged", {"answer": "better"})
    for process in event._started:
        assert process.wait(120) == 0
    assert json.loads((tmp_path / "got").read_text())["event"] == "judged"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("notify: [{on: [finished]}]", "command"),
        ("notify: [{comand: [x]}]", "command"),
        ("notify: [{webhook: 'https://b.example/token'}]", "was removed: use command, such as [curl"),
        ("notify: [{command: [a], timeout_seconds: 0}]", "timeout_seconds"),
        ("other: 1", "unknown key 'other'"),
    ],
)
def test_wrong_settings_are_refused_with_line_and_key_but_without_secrets(settings: Path, text: str, says: str) -> None:
    settings.write_text(text + "\n")
    with pytest.raises(RecipeError, match=r"settings.yaml:1:\d+") as error:
        load_settings()
    assert says in str(error.value)
    assert "token" not in str(error.value)
    (found,) = check_notices()
    assert found.level == "warn"


def test_wrong_settings_cost_a_line_in_the_log(settings: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings.write_text("notify: 3\n")
    given = tmp_path / "event.json"
    given.write_text(json.dumps({"event": "finished", "facts": {}, "id": "1", "time": time.time()}))
    with given.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        main()
    assert "nothing is sent: " in log()


def test_doctor_says_what_is_set_and_sends_nothing(settings: Path) -> None:
    assert check_notices() == []
    settings.write_text("notify: [{command: [notify-send, a-secret]}]\n")
    assert [found.text for found in check_notices()] == ["notify-send; nothing was sent"]


def test_the_core_hands_events_to_the_package_and_does_without_it(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []
    monkeypatch.setattr(event, "_start", told.append)
    run = RunFolder(home() / "runs" / "gone")
    notify.tell("judged", {})  # nobody asked
    settings.write_text("notify: [{command: [notify-send]}]\n")
    notify.tell("judged", {"answer": "better"})
    notify.tell_end(run, 1, is_asked=True)
    assert [(one.event, one.facts.get("exit_code")) for one in told] == [("judged", None), ("", 1)]
    monkeypatch.setattr("sparsebp_cli.entry_point.find_tool", lambda name: None)
    monkeypatch.setattr(notify, "find_tool", lambda name: None)
    notify.tell_end(run, None, is_asked=False)
    assert len(told) == 2
    (found,) = check_notices()
    assert (found.level, found.text) == (
        "warn",
        f"{settings} has no effect: `notify` is in the package sparsebp-tools: "
        "python -m pip install sparsebp-tools, or plugins/sparsebp-tools of a checkout",
    )
    settings.unlink()
    assert check_notices() == []


@pytest.mark.slow
def test_a_run_tells_its_end_and_does_not_wait_for_it(
    cli: Cli,  # noqa: F811 - the fixture
    settings: Path,
    tmp_path: Path,
    write_recipe: Write,  # noqa: F811 - the fixture
) -> None:
    slow = "import sys; sys.stdin.read(); open(sys.argv[1], 'a').write('x'); sys.stdin = open(sys.argv[2])"
    os.mkfifo(tmp_path / "never")  # whoever opens it waits for a writer
    hang = json.dumps([sys.executable, "-c", slow, str(tmp_path / "hung"), str(tmp_path / "never")])
    got = json.dumps(write_to(tmp_path / "got").command)
    settings.write_text(f"notify: [{{command: {hang}}}, {{command: {got}}}]\n")
    for behaviour, code, name in (("ok", 0, "finished"), ("fail", 100, "failed")):
        done = cli("run", write_recipe(behaviour))
        assert done.returncode == code, done.stderr
        wait_for(tmp_path / "got")
        told = json.loads((tmp_path / "got").read_text())
        assert (told["event"], told["facts"]["state"]) == (name, name)
        (tmp_path / "got").unlink()


def wait_for(file: Path) -> None:
    end = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
