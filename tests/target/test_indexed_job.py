"""Several nodes in Kubernetes: an Indexed Job with a Service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebp_cli.errors import RunBusyError
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.target.engine import Phase
from sparsebp_cli.target.kubernetes import KubernetesEngine
from sparsebp_cli.target.manifest import KubernetesOptions, make_job, make_service, to_text
from sparsebp_cli.testing import check_target

from . import fake_kubectl
from .conftest import last_end, make_run, until, wait_for_step
from .test_engines import prepare

SET = "jobsets.jobset.x-k8s.io"  # of 0.5


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cluster"
    (folder / "data").mkdir(parents=True)
    (folder / "pod").mkdir()
    (folder / "apis").write_text("")
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_kubectl.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CLUSTER", str(folder))
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def engine(cluster: Path) -> KubernetesEngine:
    return make_engine()


def make_engine(**options: object) -> KubernetesEngine:
    chosen = {"nodes": 2, "processes": 2, "claim": "runs", "python": sys.executable, **options}
    return KubernetesEngine(KubernetesOptions(worker="sparsebp_cli.testing.worker", **chosen))  # type: ignore[arg-type]


def names(cluster: Path) -> set[str]:
    found = {f"{file.parent.name}/{file.stem}" for file in cluster.glob("*/*.json")}
    return {name.rpartition("-")[0] if name.startswith("pod/") else name for name in found}


@pytest.mark.long
def test_several_nodes_keep_the_contract(cluster: Path) -> None:
    (cluster / "apis").write_text("kueue.x-k8s.io")
    (cluster / "localqueues.kueue.x-k8s.io").mkdir()
    (cluster / "localqueues.kueue.x-k8s.io" / "team-a.json").write_text("{}")
    (cluster / "pvc").mkdir()
    (cluster / "pvc" / "runs.json").write_text(json.dumps({"status": {"phase": "Bound"}}))
    options = {"nodes": 2, "processes": 2, "claim": "runs", "queue": "team-a", "python": sys.executable}
    check_target("kubernetes", **options)
    assert "delete job " in (cluster / "calls").read_text()
    assert names(cluster) <= {"localqueues.kueue.x-k8s.io/team-a", "pvc/runs"}, "nothing is left behind"


@pytest.mark.slow
def test_a_run_on_a_claim_is_stopped_and_resumed_as_another_job(cluster: Path) -> None:
    options = {"nodes": 2, "processes": 2, "claim": "runs", "python": sys.executable}
    run, target = prepare("kubernetes", options)
    job = target.submit(run)
    wait_for_step(run)
    job.stop()
    assert job.wait(60) is State.INTERRUPTED
    checkpoint = last_end(run)["step"]
    again = target.submit(run)  # its pod meets the folder of the one before
    until(lambda: len(History.load(run.path).warm) == 2)
    assert History.load(run.path).warm[1] == (2, checkpoint)
    assert again.cancel() is State.CANCELLED
    assert names(cluster) == set()


def test_a_run_on_several_nodes_is_an_indexed_job_with_a_service(cluster: Path, engine: KubernetesEngine) -> None:
    run = make_run()
    (handle,) = engine.start([run], 1)
    name = f"sparsebp-{run.run_id}"
    assert handle.startswith(f"{name} ")
    assert names(cluster) == {f"job/{name}", f"service/{name}", f"pod/{name}-0"}
    assert engine.find(run) == handle
    assert engine.status(run, handle).phase is Phase.WAITING
    with pytest.raises(RunBusyError, match="was already started on"):
        engine.start([run], 1)
    engine.release(run, handle)
    assert names(cluster) == set()
    assert engine.find(run) is None


def test_an_indexed_job_from_before_is_found_and_ended(cluster: Path, engine: KubernetesEngine, tmp_path: Path) -> None:
    run = make_run()
    waiting = tmp_path / "waiting"  # a pod whose program never begins: a relay might, between the two calls below
    waiting.write_text("#!/bin/sh\nexec sleep 600\n")
    waiting.chmod(0o755)
    options = KubernetesOptions(nodes=2, processes=2, claim="runs", python=str(waiting))
    uids = []
    for manifest in (make_service(run.run_id), make_job(options, run.run_id)):
        words = ["kubectl", "create", "--filename", "-"]
        made = subprocess.run(words, input=to_text(manifest), capture_output=True, text=True, check=True)
        uids.append(made.stdout.strip())
    uid = uids[-1]
    handle = f"sparsebp-{run.run_id} {uid}"  # as earlier versions wrote it
    assert engine.find(run) == handle
    assert engine.status(run, handle).phase is Phase.WAITING
    engine.signal(run, handle, 15)  # it has not begun
    assert names(cluster) == {f"service/sparsebp-{run.run_id}"}
    engine.release(run, handle)
    assert names(cluster) == set()


def test_a_job_set_of_0_5_is_followed_and_deleted(cluster: Path, engine: KubernetesEngine) -> None:
    run = make_run()
    (cluster / "apis").write_text(SET)
    (cluster / SET).mkdir()
    failed = {"type": "Failed", "status": "True", "message": "jobset failed due to reaching max number of restarts"}
    made = {"metadata": {"name": f"sparsebp-{run.run_id}", "uid": "0" * 32}, "status": {"conditions": [failed]}}
    (cluster / SET / f"sparsebp-{run.run_id}.json").write_text(json.dumps(made))
    handle = f"jobset/sparsebp-{run.run_id} {'0' * 32}"
    assert engine.is_handle(handle)
    status = engine.status(run, handle)
    assert (status.phase, status.gone) == (Phase.OVER, True)
    assert status.text == "Kubernetes: jobset failed due to reaching max number of restarts"
    engine.release(run, handle)
    assert names(cluster) == set()


def test_a_dry_run_shows_what_is_made_and_reaches_no_cluster(cluster: Path, engine: KubernetesEngine) -> None:
    run = make_run()
    assert list(engine.files(run)) == ["service.json", "job.json"]
    assert list(make_engine(nodes=1).files(run)) == ["job.json"]
    assert not (cluster / "calls").exists()


@pytest.mark.parametrize(
    ("apis", "options", "said"),
    [
        ("", {"queue": "team-a"}, {("fail", "queue", "team-a: there is no such LocalQueue")}),
        ("kueue.x-k8s.io", {"queue": "team-b"}, {("fail", "queue", "team-b: there is no such LocalQueue")}),
        ("kueue.x-k8s.io", {"queue": "team-a"}, {("ok", "queue", "team-a: a LocalQueue of Kueue")}),
    ],
)
def test_a_check_tells_the_queue(
    cluster: Path, apis: str, options: dict[str, object], said: set[tuple[str, ...]]
) -> None:
    (cluster / "apis").write_text(apis)
    (cluster / "localqueues.kueue.x-k8s.io").mkdir()
    (cluster / "localqueues.kueue.x-k8s.io" / "team-a.json").write_text("{}")
    found = list(make_engine(**options).check())
    for expected in said:
        assert expected in {result[: len(expected)] for result in found}


def test_one_node_stays_a_job_and_asks_for_nothing_new(cluster: Path) -> None:
    run: RunFolder = make_run()
    engine = make_engine(nodes=1)
    (handle,) = engine.start([run], 1)
    assert handle.startswith(f"sparsebp-{run.run_id} ")
    assert engine.find(run) == handle
    engine.release(run, handle)
    assert "/apis/" not in (cluster / "calls").read_text()
