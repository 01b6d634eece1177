"""Each kind of bad server is one warning with the command that sends the rest; the event log keeps everything."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import requests

from sparsebp_cli.run import RunFolder
from sparsebp_cli.tracking import Follower, sync
from sparsebp_cli.tracking.store import one_line
from tests.tracking.material import metric_rows

MakeRun = Callable[..., RunFolder]
Answer = Callable[[socket.socket, int], None]

HTML = b"<html><body>Bad Gateway</body></html>"


def reply(status: str, body: bytes, kind: str = "text/html") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def drip(line: socket.socket, _: int) -> None:
    """Send a byte now and then: no single wait is long, and the answer never ends."""
    line.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
    pause = threading.Event()
    while not pause.wait(0.2):
        line.sendall(b" ")


def die_midway(line: socket.socket, number: int) -> None:
    """Answer the first question and break off in the second."""
    if number == 0:
        body = b'{"experiment": {"experiment_id": "7", "name": "sparsebp", "lifecycle_stage": "active"}}'
        line.sendall(reply("200 OK", body, "application/json"))
    else:
        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")


def send_elsewhere(line: socket.socket, _: int) -> None:
    """Redirect every question to the same server, for ever."""
    here = "{}:{}".format(*line.getsockname())
    head = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://{here}/again\r\nContent-Length: 0\r\n\r\n"
    line.sendall(head.encode())


SERVERS: dict[str, Answer] = {
    "500 with a page": lambda line, _: line.sendall(reply("500 Internal Server Error", HTML)),
    "200 with a page": lambda line, _: line.sendall(reply("200 OK", HTML)),
    "401": lambda line, _: line.sendall(reply("401 Unauthorized", b"who are you")),
    "307 for ever": send_elsewhere,
    "307 to where nobody listens": lambda line, _: line.sendall(
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    ),
    "terminal codes": lambda line, _: line.sendall(reply("403 Forbidden", b"\x1b[2J\x1b]0;x\x07" * 9)),
    "hang": lambda line, _: threading.Event().wait(60) and None,
    "drip": drip,
    "dies midway": die_midway,
}


@contextmanager
def serve(answer: Answer) -> Iterator[str]:
    """Answer every connection in one way, in threads that end with the test."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        door.settimeout(0.1)
        over, number, lines = threading.Event(), 0, list[socket.socket]()

        def talk(line: socket.socket, number: int) -> None:
            with line:
                try:
                    line.recv(65536)
                    answer(line, number)
                except OSError:
                    return

        def accept() -> None:
            nonlocal number
            while not over.is_set():
                try:
                    line, _ = door.accept()
                except TimeoutError:
                    continue
                lines.append(line)
                threading.Thread(target=talk, args=(line, number), daemon=True).start()
                number += 1

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
        over.set()
        thread.join()
        for line in lines:  # whoever waits for an answer still holds the lock of its run's tracking
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("answer", SERVERS.values(), ids=SERVERS)
@pytest.mark.promise("R5")
def test_a_bad_server_costs_one_warning_and_no_number(
    store: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    run, said = make_run(5), list[str]()
    with serve(answer) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        result = Follower(run, every=1000.0, within=2.0, warn=said.append).start().stop()
    assert not result.complete
    line = result.advice(run.run_id)
    assert line.endswith(f"; the event log keeps everything, and `sparsebp sync {run.run_id}` sends it later")
    assert "\n" not in line
    assert len(said) <= 1  # what hangs is told by the result alone
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert sync(run).points_sent == 10
    assert sync(run).points_sent == 0
    assert len(metric_rows(store)) == 10


@pytest.mark.chaos
@pytest.mark.promise("R6")
def test_eight_runs_at_once_on_a_new_store_have_every_point_there_or_a_warning(
    home_folder: Path, make_run: MakeRun
) -> None:
    home_folder.mkdir()
    runs = [make_run(500) for _ in range(8)]
    followers = [Follower(run, every=0.1, within=60.0).start() for run in runs]
    results = [follower.stop() for follower in followers]
    for run, result in zip(runs, results, strict=True):
        assert result.complete or result.advice(run.run_id)
    assert all(sync(run).complete for run in runs)
    print(f"8 runs: {sum(result.complete for result in results)} complete at their end, the others warned")
    assert len(metric_rows(home_folder / "mlflow.db")) == 8000


def test_a_line_of_a_store_says_what_the_user_can_do_and_ends_with_a_word() -> None:
    for name, words in (
        ("psycopg", "psycopg is not installed: python -m pip install 'psycopg[binary]'"),
        ("x", "x is"),
    ):
        with pytest.raises(ModuleNotFoundError) as missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        assert one_line(missing.value).startswith(words)
    outer = ConnectionError("Max retries exceeded")
    outer.__cause__ = requests.exceptions.ProxyError("Unable to connect")
    proxied = "the request went through a proxy of this shell: set NO_PROXY=HOST to bypass it"
    assert one_line(outer) == f"Max retries exceeded; {proxied}"
    long = one_line(ValueError("words " * 100))
    assert 290 < len(long) <= 300
    assert long.endswith("words")
    assert len(one_line(ValueError("w" * 400))) == 300
