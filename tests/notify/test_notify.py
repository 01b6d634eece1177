"""Users are told of the end of runs, by servers that fail, hang, drip, redirect and refuse; runs never notice."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli import notify
from sparsebp_cli.cli.checkup import check_notices
from sparsebp_cli.errors import RecipeError, UsageError
from sparsebp_cli.run import JournalWriter, RunFolder, home
from sparsebp_tools.notify import Event, Notice, event, load_settings, tell, tell_end
from sparsebp_tools.notify.deliver import complete, deliver, main
from tests.cli.conftest import Cli, Write, cli, write_recipe, write_run  # noqa: F401 - fixtures

KEY = "a key that nobody may see"
EVENT = Event("finished", {"run_id": "r1"})
Behave = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """A local server that behaves as each test wants; ``received`` are headers and body of every attempt."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int | Behave] = [204]
        self.closing, self.arrived = threading.Event(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.received.append(({name.lower(): value for name, value in self.headers.items()}, body))
                outer.arrived.set()
                answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                if callable(answer):
                    answer(self)
                    return
                self.send_response(answer)
                self.end_headers()

            def do_GET(self) -> None:
                outer.received.append(({}, b"followed"))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}/hook/of-mine"

    def hang(self, _handler: BaseHTTPRequestHandler) -> None:
        self.closing.wait()

    def drip(self, handler: BaseHTTPRequestHandler) -> None:
        """Send a byte of a header now and then: every read of a socket succeeds in time."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self.closing.wait(0.02):
            try:
                handler.wfile.write(b"x")
                handler.wfile.flush()
            except OSError:
                return

    def redirect(self, handler: BaseHTTPRequestHandler, code: int = 302) -> None:
        """Lead elsewhere. urllib refuses 307 after POST by itself, and follows 301 to 303 with GET."""
        handler.send_response(code)
        handler.send_header("Location", self.address)
        handler.end_headers()

    def redirect_the_post(self, handler: BaseHTTPRequestHandler) -> None:
        self.redirect(handler, 307)

    def talk_nonsense(self, handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"this is no HTTP\r\n\r\n")


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.closing.set()
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "settings.yaml"
    monkeypatch.setenv("SPARSEBP_SETTINGS", str(file))
    home().mkdir(parents=True, exist_ok=True)
    return file


def notice(server: Server, **options: Any) -> Notice:
    return Notice(**{"webhook": server.address, "attempts": 3, "pause_seconds": 0.0, "timeout_seconds": 30.0} | options)


def log() -> str:
    file = home() / "notify.log"
    return file.read_text() if file.exists() else ""


def test_what_arrives_has_the_event_and_a_signature_of_time_and_body(
    server: Server, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_KEY", KEY)
    assert deliver(notice(server, secret={"env": "HOOK_KEY"}), EVENT)
    ((headers, body),) = server.received
    assert json.loads(body) == {"event": "finished", "id": EVENT.id, "time": EVENT.time, "facts": {"run_id": "r1"}}
    signed = headers["x-sparsebp-timestamp"].encode() + b"." + body
    assert headers["x-sparsebp-signature"] == "sha256=" + hmac.new(KEY.encode(), signed, hashlib.sha256).hexdigest()
    assert headers["x-sparsebp-event"] == "finished"
    assert KEY not in str(headers)
    assert log() == ""


def test_a_server_that_fails_is_tried_again_with_the_same_id(server: Server, settings: Path) -> None:
    server.answers = [500, 429, 200]
    assert deliver(notice(server), EVENT)
    assert {headers["x-sparsebp-delivery"] for headers, _ in server.received} == {EVENT.id}
    assert len(server.received) == 3
    assert log() == ""


@pytest.mark.parametrize(
    ("answer", "attempts", "says"),
    [
        (503, 3, "HTTP 503, attempt 3 of 3"),
        (401, 1, "HTTP 401, attempt 1 of 3"),
        (404, 1, "HTTP 404"),
        ("redirect", 1, "HTTP 302"),
        ("redirect_the_post", 1, "HTTP 307"),
        ("talk_nonsense", 3, "BadStatusLine"),
    ],
)
def test_what_is_refused_for_good_is_not_tried_again(
    server: Server, settings: Path, answer: int | str, attempts: int, says: str
) -> None:
    server.answers = [getattr(server, answer) if isinstance(answer, str) else answer]
    assert not deliver(notice(server), EVENT)
    assert len(server.received) == attempts
    assert f"finished r1: webhook at 127.0.0.1: {says}" in log()
    assert "of-mine" not in log()  # the rest of an address may be a secret


@pytest.mark.timeout(60)  # a server that drips would be waited for until its header is too long
@pytest.mark.parametrize("how", ["hang", "drip"])
def test_a_server_that_hangs_or_drips_is_given_up(server: Server, settings: Path, how: str) -> None:
    server.answers = [getattr(server, how)]
    assert not deliver(notice(server, attempts=2, timeout_seconds=0.3), EVENT)
    assert "no answer within 0.3 s, attempt 2 of 2" in log()


def test_a_timeout_of_the_socket_is_told_as_one_of_the_attempt(
    server: Server, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", time_out)
    assert not deliver(notice(server, attempts=1), EVENT)
    assert "no answer within 30 s, attempt 1 of 1" in log()


def test_a_server_that_is_not_there_is_a_line_in_the_log(settings: Path) -> None:
    gone = Server()
    gone.server.server_close()
    assert not deliver(notice(gone, attempts=2), EVENT)
    assert "Connection refused, attempt 2 of 2" in log()


def test_an_address_and_a_key_from_files_are_in_no_log(server: Server, settings: Path, tmp_path: Path) -> None:
    server.answers = [500]
    (tmp_path / "address").write_text(server.address + "\n")
    (tmp_path / "key").write_text(KEY + "\n")
    ways = {"webhook": {"file": str(tmp_path / "address")}, "secret": {"file": str(tmp_path / "key")}}
    assert not deliver(notice(server, **ways), EVENT)
    assert "HTTP 500" in log()
    assert KEY not in log()
    assert "of-mine" not in log()
    (tmp_path / "address").write_text("ftp://of-mine\n")
    assert not deliver(notice(server, **ways), EVENT)
    assert "of-mine" not in log()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_know_is_sent_to_nobody(server: Server, settings: Path, number: float) -> None:
    assert not deliver(notice(server), Event("judged", {"gain": number}))
    assert "judged: has a number that JSON does not know" in log()
    assert server.received == []


def test_a_command_gets_the_event_and_its_failures_are_logged(settings: Path, tmp_path: Path) -> None:
    copy = f"import pathlib, sys; pathlib.Path({str(tmp_path / 'got')!r}).write_text(sys.stdin.read())"
    assert deliver(Notice(command=(sys.executable, "-c", copy)), EVENT)
    assert json.loads((tmp_path / "got").read_text())["facts"] == {"run_id": "r1"}
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


def test_the_whole_way_is_a_process_of_its_own(server: Server, settings: Path, tmp_path: Path) -> None:
    settings.write_text(f"notify:\n- {{webhook: '{server.address}', on: [judged]}}\n")
    tell("ignored", {})
    tell("judged", {"answer": "better"})
    for process in event._started:
        assert process.wait(120) == 0
    assert [json.loads(body)["event"] for _, body in server.received] == ["judged"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("notify: [{command: [a], webhook: 'https://b.example'}]", "give either command or webhook"),
        ("notify: [{webhok: x}]", "webhok"),
        ("notify: [{webhook: 'ftp://token@x'}]", "begins with https:// or http://"),
        ("notify: [{webhook: 'https://u:token@x.example'}]", "has no user or password"),
        ("notify: [{webhook: {env: A, file: token}}]", "must be an https:// or http:// address"),
        ("notify: [{webhook: 'https://x.example', attempts: 0}]", "attempts"),
        ("notify: [{command: [a], secret: {env: KEY}}]", "secret signs what a webhook gets"),
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


def test_doctor_says_what_is_set_and_sends_nothing(server: Server, settings: Path) -> None:
    assert check_notices() == []
    settings.write_text(f"notify: [{{webhook: '{server.address}', secret: {{env: NO_SUCH_KEY}}}}]\n")
    (found,) = check_notices()
    assert (found.level, found.text) == ("warn", "the secret in NO_SUCH_KEY is empty or not set")
    settings.write_text("notify: [{command: [notify-send]}]\n")
    assert [found.text for found in check_notices()] == ["command; nothing was sent"]
    assert server.received == []


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
        f"nothing reads {settings}: `notify` is in the package sparsebp-tools: python -m pip install sparsebp-tools, "
        "or plugins/sparsebp-tools of a checkout",
    )
    settings.unlink()
    assert check_notices() == []


def test_a_secret_that_is_not_there_is_named_by_its_place() -> None:
    with pytest.raises(UsageError, match="NO_SUCH_KEY is empty or not set"):
        Notice(webhook={"env": "NO_SUCH_KEY"}).webhook.read()  # type: ignore[union-attr, arg-type]


@pytest.mark.slow
def test_a_run_tells_its_end_and_neither_waits_for_it_nor_keeps_a_secret(
    cli: Cli,  # noqa: F811 - the fixture
    server: Server,
    settings: Path,
    write_recipe: Write,  # noqa: F811 - the fixture
) -> None:
    server.answers = [server.hang, server.hang]
    hook = "webhook: {env: HOOK}, secret: {env: HOOK_KEY}, attempts: 1"
    settings.write_text(f"notify: [{{{hook}, on: [finished]}}, {{{hook}, on: [failed]}}]\n")
    for behaviour, code, name in (("ok", 0, "finished"), ("fail", 100, "failed")):
        done = cli("run", write_recipe(behaviour), HOOK=server.address, HOOK_KEY=KEY)
        assert done.returncode == code, done.stderr
        assert server.arrived.wait(120)
        server.arrived.clear()
        assert json.loads(server.received[-1][1])["event"] == name
        assert json.loads(server.received[-1][1])["facts"]["state"] == name
    kept = [file.read_bytes() for file in home().rglob("*") if file.is_file()]
    assert len(kept) > 10
    assert not any(KEY.encode() in content or b"of-mine" in content for content in kept)
