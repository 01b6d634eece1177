"""The target ``kubernetes`` on a real control plane and kubelet: ``make test-k8s`` builds them once."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsebp_cli.run import History, State
from sparsebp_cli.target.container import container_name
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.target.manifest import KubernetesOptions, make_job, make_reader, to_text
from sparsebp_cli.testing import check_target
from tests.study.conftest import STUDY, count_attempts, count_finishes
from tests.study.study_folder import WORKER, StudyFolder, find_place, list_trials, wait_for_held

from . import service
from .conftest import last_end, until, wait_for_step
from .test_engines import TRAINED, Options, prepare

pytestmark = pytest.mark.k8s
HOST = service.STATE / "kube-docker"
PAUSE = 'ENTRYPOINT ["/bin/busybox","sh","-c","trap exit TERM INT; while :; do /bin/busybox sleep 1000 & wait; done"]'


def kubectl(*words: str, given: str = "") -> str:
    done = subprocess.run(["kubectl", *words], check=True, capture_output=True, text=True, input=given)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    service.need("kubectl", "etcd", "dockerd", "busybox")
    assert (service.STATE / "k8s" / "bin" / "kubelet").exists(), "make test-k8s builds the servers"
    environ = {"SERVICES": str(HOST), "K": str(service.STATE / "k8s"), "DOCKER_HOST": f"unix://{HOST}/dk/docker.sock"}
    HOST.mkdir(parents=True, exist_ok=True)
    wrap = service.SCRIPTS / "runc-wrap"
    service.script("dockerd.sh", EXTRA=f"--add-runtime wrap={wrap} --default-runtime wrap", **environ)
    try:
        service.script("base_image.sh", **environ)
        make_pause_image(environ["DOCKER_HOST"])
        shutil.rmtree(service.STATE / "k8s" / "run", ignore_errors=True)
        service.script("k8s.sh", **environ)
        service.script("kubelet.sh", **environ)
        yield service.STATE / "k8s" / "run" / "kubeconfig"
    finally:
        service.script("k8s_stop.sh", **environ) if (service.STATE / "k8s" / "run").exists() else None
        service.end(HOST / "dk" / "docker.pid")


def make_pause_image(address: str) -> None:
    pack = ["tar", "--create", "--transform", "s,^,bin/,", "--directory", "/bin", "busybox"]
    archive = subprocess.run(pack, check=True, capture_output=True)
    words = ["docker", "--host", address, "import", "--change", PAUSE, "-", "sparsebp/pause:1"]
    subprocess.run(words, input=archive.stdout, check=True, capture_output=True)


@pytest.fixture
def options(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setenv("KUBECONFIG", str(cluster))
    return {
        "image": service.BASE,
        "python": sys.executable,
        "mounts": service.MOUNTS,
        "pull": "never",
        "host_network": True,
        "hold_min": 5,
    }


@pytest.fixture
def claim(options: Options) -> Iterator[str]:
    """A volume of the node, claimed."""
    name = f"runs-{secrets.token_hex(3)}"  # one that is being deleted may still be in use
    folder = HOST / name
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(folder)},
            "storageClassName": "",
            "claimRef": {"name": name, "namespace": "default"},
        },
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "",
            "volumeName": name,
        },
    }
    for manifest in (volume, wanted):
        kubectl("create", "-f", "-", given=json.dumps(manifest))
    yield name
    kubectl("delete", f"pvc/{name}", f"pv/{name}", "--wait=false")


def test_the_server_accepts_every_manifest(options: Options) -> None:
    rich = KubernetesOptions(**options, claim="runs", gpus=2, cpus="500m", memory="2Gi", node_selector={"a": "b"})
    for manifest in (
        make_job(rich, "0123456789ab"),
        make_reader(rich, "0123456789ab"),
        make_job(KubernetesOptions(), "0"),
    ):
        accepted = kubectl("create", "--dry-run=server", "-f", "-", "-o", "json", given=to_text(manifest))
        assert_holds(json.loads(accepted), manifest)


def assert_holds(found: object, wanted: object) -> None:
    """What the server made of a manifest has every key that was in it: none was dropped as unknown."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict)
        for key, value in wanted.items():
            if value not in ({}, ""):  # what is empty is left out
                assert_holds(found[key], value)
    elif isinstance(wanted, list):
        assert isinstance(found, list)
        for one, other in zip(found, wanted, strict=False):
            assert_holds(one, other)
    else:
        assert found == wanted


def test_kubernetes_keeps_the_contract(options: Options) -> None:
    check_target("kubernetes", **options)
    until(lambda: kubectl("get", "jobs,pods", "-o", "name") == "")


def test_a_run_that_finds_no_gpu_waits_and_can_be_cancelled(options: Options) -> None:
    run, target = prepare("kubernetes", options | {"gpus": 1})
    job = target.submit(run)
    until(lambda: "Insufficient nvidia.com/gpu" in kubectl("describe", "pods"))
    assert job.status() is State.QUEUED
    assert job.cancel() is State.CANCELLED
    assert History.load(run.path).environments == []


def test_a_lost_pod_is_replaced_and_goes_on_from_its_checkpoint_on_the_claim(options: Options, claim: str) -> None:
    run, target = prepare("kubernetes", options | {"claim": claim})
    job = target.submit(run)
    wait_for_step(run, 3)
    kubectl("delete", "pod", "-l", f"sparsebp.run={run.run_id}", "--wait=false")  # SIGTERM, then another pod
    until(lambda: len(History.load(run.path).warm) == 2)
    history = History.load(run.path)
    assert history.warm[1][1] == history.ends[0]["step"] >= 3
    assert job.cancel() is State.CANCELLED
    steps = list(History.load(run.path).series("train/loss"))
    assert steps == list(range(1, len(steps) + 1))


def test_a_pod_that_nobody_fetched_from_in_time_is_read_through_another_one(options: Options, claim: str) -> None:
    run, target = prepare("kubernetes", options | {"claim": claim})
    job = target.submit(run)
    kubectl("patch", "job", container_name(run.run_id), "--type=merge", "-p", '{"spec": {"backoffLimit": 0}}')
    wait_for_step(run, 3)
    launch = Launch.load(run)
    assert launch is not None
    dispatcher = launch.watcher(run)
    assert dispatcher is not None
    dispatcher.kill()
    pod = kubectl("get", "pods", "-l", f"sparsebp.run={run.run_id}", "-o", "name")
    folder = f"/data/runs/{run.run_id}"
    kubectl("exec", pod, "--", "sh", "-c", f"touch {folder}/.fetched; kill -TERM $(cat {folder}/.pid)")
    until(lambda: kubectl("get", pod, "-o", "jsonpath={.status.phase}") == "Failed")
    assert run.state() is State.UNREACHABLE
    job = target.reattach(run)
    assert job.wait(120) is State.INTERRUPTED
    assert job.exit_code() == 143
    assert list((run.path / "checkpoints").iterdir())
    until(lambda: kubectl("get", "jobs,pods", "-o", "name") == "")


def test_a_deleted_job_is_interrupted(options: Options) -> None:
    run, target = prepare("kubernetes", options)
    job = target.submit(run)
    wait_for_step(run)
    kubectl("delete", "job", f"sparsebp-{run.run_id}", "--wait=false")
    assert job.wait(60) is State.INTERRUPTED
    assert "gone" in str(last_end(run)["text"])


def test_one_small_training_gives_the_same_numbers_as_on_this_machine(options: Options) -> None:
    found = []
    places: list[tuple[str, Options]] = [("local", {}), ("kubernetes", options | {"env": {"OMP_NUM_THREADS": "1"}})]
    for kind, chosen in places:
        worker = {"worker": "sparsebp_cli.worker", "threads": 1, "device": "cpu"}
        run, target = prepare(kind, chosen | worker, **TRAINED)
        job = target.submit(run)
        assert job.wait(300) is State.FINISHED, list(job.logs())[-5:]
        history = History.load(run.path)
        model = hashlib.sha256((run.path / "model" / "model.safetensors").read_bytes()).hexdigest()
        found.append((history.series("train/loss"), history.series("eval/loss"), model))
    print(f"losses on both: {found[0][0]}")
    assert found[0] == found[1]
    assert os.environ["KUBECONFIG"]


def test_trials_of_a_study_are_jobs_beside_each_other_each_trained_once(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = HOST / f"gate-{secrets.token_hex(3)}"  # of the node
    gate.mkdir(mode=0o755)
    monkeypatch.setenv("SPARSEBP_MOUNTS", str(gate))
    (gate / "hold").touch()
    there = {**options, **WORKER, "kind": "kubernetes", "mounts": [*service.MOUNTS, f"{gate}:/gate"]}
    study = StudyFolder(tmp_path)
    study.write(STUDY, ["local", {"target": "pods", "max_parallel": 2}], {"pods": there}, hold="/gate/hold")
    client = study.start()
    held = wait_for_held("kubernetes", 2)
    jobs = kubectl("get", "jobs", "-o", "jsonpath={range .items[*]}{.metadata.name} {.status.active}{'\\n'}{end}")
    assert sorted(jobs.split("\n")) == sorted(f"sparsebp-{run.run_id} 1" for run in held)
    (gate / "hold").unlink()
    out, err = client.communicate(timeout=300)
    assert client.returncode == 0, err
    assert "tiny: 8 of 8 trials have finished" in out
    assert set(count_attempts().values()) == set(count_finishes().values()) == {1}
    dealt = ["local", "kubernetes", "kubernetes"] * 3
    assert [find_place(run) for run in list_trials()] == dealt[:8]
    until(lambda: kubectl("get", "jobs,pods", "-o", "name") == "")
    before = count_attempts()
    assert study.run()[0] == 0
    assert count_attempts() == before
