"""Secrets around a run: none of them is found in anything that a run, its store or its report leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ..plan.test_provenance import run_git
from ..worker.conftest import tiny_folder
from .conftest import Cli
from .test_real_worker import RECIPE

__all__ = ["tiny_folder"]  # a fixture of the worker's tests

PLACES = ("environment", "hub", "password", "address", "recipe", "argument", "remote", "tracked", "untracked", "netrc")
CANARY = {place: f"Zq{number}canary{number}Qz" for number, place in enumerate(PLACES)}


@pytest.fixture
def server() -> Iterator[str]:
    """A store that refuses everything and repeats the password that it refuses; yields its host and port."""

    class Refuse(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.send_response(401)
            self.end_headers()
            self.wfile.write(f"password={CANARY['address']} of http://bob:{CANARY['address']}@h is wrong".encode())

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def find_leaks(folder: Path) -> list[str]:
    """Name the files under a folder, or their names, in which there is a canary, and which."""
    found = []
    for file in folder.rglob("*"):
        data = str(file).encode() + (file.read_bytes() if file.is_file() else b"")
        found += [f"{place}: {file.relative_to(folder)}" for place, text in CANARY.items() if text.encode() in data]
    return found


@pytest.mark.slow
@pytest.mark.promise("R13")
def test_no_secret_around_a_run_is_found_in_what_it_leaves(
    cli: Cli, tmp_path: Path, tiny_folder: Path, home_folder: Path, server: str, record_property: Any
) -> None:
    record_property("trials", len(PLACES))
    user = tmp_path / "user"
    user.mkdir()
    (user / ".netrc").write_text(f"machine 127.0.0.1 login bob password {CANARY['netrc']}\n")
    (tmp_path / "r.yaml").write_text(RECIPE.format(folder=tiny_folder))
    (tmp_path / "settings.ini").write_text("[store]\n")
    (tmp_path / ".gitignore").write_text("user\nhome\n")
    run_git(tmp_path, "init", "-q")
    run_git(tmp_path, "remote", "add", "origin", f"https://bob:{CANARY['remote']}@h.invalid/r.git")
    run_git(tmp_path, "add", "r.yaml", "settings.ini", ".gitignore")
    run_git(tmp_path, "commit", "-qm", "m")
    (tmp_path / "settings.ini").write_text(f"[store]\npassword = {CANARY['tracked']}\n")
    (tmp_path / "notes.txt").write_text(CANARY["untracked"])
    environ = {
        "HOME": str(user),
        "SERVICE_SECRET": CANARY["environment"],
        "HF_TOKEN": CANARY["hub"],
        "MLFLOW_TRACKING_USERNAME": "bob",
        "MLFLOW_TRACKING_PASSWORD": CANARY["password"],
    }
    address = {"MLFLOW_TRACKING_URI": f"http://bob:{CANARY['address']}@{server}"}
    printed = []

    def run(*words: object, code: int = 0, **more: str) -> None:
        done = cli(*words, real=True, **environ | more)
        printed.append(done.stdout + done.stderr)
        assert done.returncode == code, printed[-1]

    run("run", "r.yaml")
    run("run", "r.yaml", "--set", "training.max_steps=2", "--set", "policy=dense", **address)
    run("run", "r.yaml", "--set", f"tracking.uri=http://bob:{CANARY['argument']}@{server}", code=2)
    (tmp_path / "user" / "b.yaml").write_text(
        (tmp_path / "r.yaml").read_text() + f'tracking: {{uri: "http://bob:{CANARY["recipe"]}@{server}"}}\n'
    )
    run("run", "user/b.yaml", code=2)
    run("compare", "@2", "--html", home_folder / "report.html", **address)
    run("show", "@last", **address)
    assert len(list((home_folder / "runs").iterdir())) == 2
    assert (home_folder / "mlflow.db").stat().st_size > 0
    assert find_leaks(home_folder) == []
    assert [place for place, text in CANARY.items() if text in "".join(printed)] == []
