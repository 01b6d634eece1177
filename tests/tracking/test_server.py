"""Through MLflow's own server, killed midway: the table is that of a direct sync."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.tracking import Follower, SyncResult, describe_pages, sync
from tests.tracking.material import attempt, metric_rows
from tests.tracking.server import Server

pytestmark = pytest.mark.xdist_group("tracking server")  # fixtures of this file take long: one process makes them

MakeRun = Callable[..., RunFolder]


@pytest.mark.slow
@pytest.mark.promise("R5")
def test_a_server_killed_midway_costs_a_warning_and_no_point(
    server: Server, make_run: MakeRun, fresh_database: Path, tmp_path: Path
) -> None:
    run = make_run(6000, end=None, tracking={"uri": server.uri})
    with JournalWriter(run.path) as journal:
        journal.write("metrics", step=6001, values={"a": math.nan, "b": math.inf, "pass@1": 0.1 + 0.2})
    results: list[SyncResult] = []
    thread = threading.Thread(target=lambda: results.append(sync(run)))
    thread.start()
    kept = run.path / "tracking.json"
    while not kept.exists() or json.loads(kept.read_text())["offset"] == 0:
        time.sleep(0.01)
    server.kill()
    thread.join()
    (broken,) = results
    assert not broken.complete
    assert broken.problem.startswith(f"tracking store {server.uri}: ")
    assert 0 < broken.points_sent < 12_003

    attempt(run, 5990, 6100, bias=1.0)  # the run went on, resumed from a checkpoint
    follower = Follower(run)
    assert not follower.flush().complete
    assert len(follower.warnings) == 1
    journal_bytes = (run.path / "journal.jsonl").read_bytes()

    server.start()
    assert follower.flush().complete
    direct = Path(shutil.copy(fresh_database, tmp_path / "direct.db"))
    assert sync(run, f"sqlite:///{direct}").complete
    through = metric_rows(server.database)
    assert through == metric_rows(direct)
    assert len(through) == 2 * 6100 + 3
    kept.unlink()
    assert sync(run).points_sent == len(through)
    assert sync(run).points_sent == 0
    assert metric_rows(server.database) == through
    assert (run.path / "journal.jsonl").read_bytes() == journal_bytes
    files = sorted(path.name for path in (server.folder / "artifacts").rglob("*") if path.is_file())
    assert files == ["environment.json", "recipe.yaml"]


@pytest.mark.slow
def test_a_password_in_the_address_reaches_the_server_only(
    server: Server, make_run: MakeRun, home_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri.replace("http://", "http://me:CANARY@"))
    run = make_run(3)
    result = sync(run)
    assert result.complete
    assert "CANARY" not in repr(result)
    kept = [file for file in home_folder.rglob("*") if file.is_file()]
    stored = [file for file in server.folder.rglob("*") if file.is_file()]
    assert (server.folder / "artifacts") in [parent for file in stored for parent in file.parents]
    for file in kept + stored:
        assert b"CANARY" not in file.read_bytes(), file


def check_foreign_hosts(address: str, mlflow_run: str) -> None:
    """Another site's page, whose name was made to lead to this machine, reads and writes nothing."""
    place = address.removeprefix("http://")
    port = place.rpartition(":")[2]
    names = ["evil.example", f"evil.example:{port}", f"{place}.evil.example", f"localhost.evil.example:{port}", "[::1]"]
    names += [f"evil.example@{place}", f"127.0.0.2:{port}", "127.0.0.1:1", f"{place}/", "*", ""]
    pages = [f"api/2.0/mlflow/runs/get?run_id={mlflow_run}", f"get-artifact?path=recipe.yaml&run_uuid={mlflow_run}", ""]
    for page in [*pages, "ajax-api/2.0/mlflow/experiments/search?max_results=1", "graphql"]:
        for name in names if page == pages[0] else names[:2]:
            foreign = urllib.request.Request(f"{address}/{page}", headers={"Host": name, "X-Forwarded-Host": place})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(foreign)
            refused.value.close()
            assert refused.value.code in {400, 403}, (page, name)
    # A page that names this server rightly, as a form or a script of another site can.
    data = json.dumps({"run_id": mlflow_run, "key": "from", "value": "elsewhere"}).encode()
    headers = {"Origin": "http://evil.example", "Content-Type": "application/json"}
    foreign = urllib.request.Request(f"{address}/api/2.0/mlflow/runs/set-tag", data, headers)
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(foreign)
    refused.value.close()


@pytest.mark.slow
def test_the_named_command_opens_the_pages_of_the_store(
    store: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(3)
    mlflow_run = sync(run).mlflow_run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}")
    port = Server.free_port()
    command = shlex.split(describe_pages(port).removeprefix("MLflow's pages: "))
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen([sys.executable, "-m", *command], stdout=-3, stderr=-3, start_new_session=True) as process:
        try:
            Server.wait(address, process)
            with urllib.request.urlopen(f"{address}/api/2.0/mlflow/runs/get?run_id={mlflow_run}") as answer:
                assert json.load(answer)["run"]["info"]["status"] == "FINISHED"
            with urllib.request.urlopen(f"{address}/get-artifact?path=recipe.yaml&run_uuid={mlflow_run}") as answer:
                assert b"name: demo" in answer.read()
            check_foreign_hosts(address, str(mlflow_run))
        finally:
            Server.end(process)
