"""What real engines do to runs: rights, kills, restarts, preemption, keys; and the same numbers everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from psutil import process_iter

from sparsebp_cli.errors import SparseBPError, UnreachableError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, State, create_run, list_runs
from sparsebp_cli.target import Target, make_target
from sparsebp_cli.target.docker import DockerEngine, DockerOptions
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.target.slurm import SlurmEngine, SlurmOptions

from . import service
from .conftest import IN_CONTAINER, UNUSABLE, last_end, until, wait_for_step, watcher_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("engines")]  # one daemon, one test at a time
WORKER = "sparsebp_cli.testing.worker"
CANARY = "canary-7f3a91"
Options = dict[str, Any]


def prepare(kind: str, options: Options, fake: str = "slow", **sections: Any) -> tuple[RunFolder, Target]:
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "name": f"{kind}-{fake}",
            "model": {"name": "none"},
            "dataset": {"name": "none"},
            "training": {"max_steps": 12},
            "tracking": {"uri": UNUSABLE, "tags": {"fake": fake}},
            "target": {"kind": kind, "worker": WORKER, **options},
            **sections,
        }
    )
    plan = Plan(recipe=recipe)
    run = create_run(plan.run_id)
    plan.save(run.path)
    return run, make_target(recipe.target)


def docker(*words: str) -> str:
    command = ["docker", "--host", service.DOCKER, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.promise("R15")
def test_a_container_has_no_rights_no_socket_and_no_secret(
    docker_options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, CANARY)
    run, target = prepare("docker", docker_options | {"gpus": 1, "memory": "1g", "env": {"OMP_NUM_THREADS": "1"}})
    job = target.submit(run)
    wait_for_step(run)
    text = docker("inspect", f"sparsebp-{run.run_id}")
    found = json.loads(text)[0]
    host = found["HostConfig"]
    assert found["Config"]["User"] == "10001:10001"
    assert (host["CapDrop"], host["Privileged"], host["Init"]) == (["ALL"], False, True)
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert all(mount["RW"] is False for mount in found["Mounts"])
    assert "docker.sock" not in json.dumps(found["Mounts"])
    assert host["Memory"] == 2**30
    assert host["DeviceRequests"][0]["Count"] == 1
    assert found["Config"]["Labels"]["sparsebp.run"] == run.run_id
    assert found["Image"] == json.loads((run.path / "image.json").read_text())["id"]
    status = docker("exec", f"sparsebp-{run.run_id}", "cat", "/proc/1/status").splitlines()
    fields = dict(line.split(":", 1) for line in status)
    assert (fields["CapEff"].strip(), fields["NoNewPrivs"].strip()) == ("0" * 16, "1")
    assert fields["Uid"].split()[0] == "10001"
    assert job.cancel() is State.CANCELLED
    kept = "".join(p.read_text(errors="replace") for p in run.path.rglob("*") if p.is_file())
    assert CANARY not in text + kept


@pytest.mark.promise("R10")
def test_a_killed_container_is_interrupted_and_the_run_goes_on_later(docker_options: Options) -> None:
    run, target = prepare("docker", docker_options)
    job = target.submit(run)
    wait_for_step(run)
    docker("kill", f"sparsebp-{run.run_id}")
    assert job.wait(60) is State.INTERRUPTED
    assert "SIGKILL" in str(last_end(run)["text"])
    again = target.submit(run)
    until(lambda: len(History.load(run.path).warm) == 2)
    assert again.cancel() is State.CANCELLED


@pytest.mark.promise("R10")
def test_a_container_that_somebody_removed_is_interrupted(docker_options: Options) -> None:
    run, target = prepare("docker", docker_options)
    job = target.submit(run)
    wait_for_step(run)
    docker("rm", "--force", f"sparsebp-{run.run_id}")
    assert job.wait(60) is State.INTERRUPTED
    assert "gone" in str(last_end(run)["text"])
    assert 2 in History.load(run.path).series("train/loss")


def test_a_missing_image_is_a_failure_with_its_name_and_leaves_nothing(docker_options: Options) -> None:
    from sparsebp_cli.errors import RunFailedError

    run, target = prepare("docker", docker_options | {"image": "sparsebp:none"})
    with pytest.raises(RunFailedError, match="no image sparsebp:none"):
        target.submit(run)
    assert run.state() is State.FAILED
    assert docker("ps", "--all", "--quiet", "--filter", f"label=sparsebp.run={run.run_id}") == ""


@pytest.mark.promise("R10")
def test_a_client_and_a_dispatcher_that_are_killed_leave_the_run_at_work(
    docker_options: Options, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yaml"
    section = json.dumps({"kind": "docker", "worker": WORKER, **docker_options})
    recipe.write_text(
        "version: 1\nmodel: {name: none}\ndataset: {name: none}\n"
        f"target: {section}\ntracking: {{uri: '{UNUSABLE}', tags: {{fake: slow}}}}\n"
    )
    words = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()"]
    client = subprocess.Popen([*words, "run", str(recipe)], stdout=subprocess.DEVNULL, start_new_session=True)
    until(lambda: list_runs() and 2 in History.load(list_runs()[0].path).series("train/loss"))
    run = list_runs()[0]
    client.kill()
    client.wait()
    watcher_of(run).kill()
    until(lambda: run.state() is State.UNREACHABLE)
    listed = subprocess.run([*words, "runs", "-o", "json"], check=True, capture_output=True, text=True)
    assert json.loads(listed.stdout)["runs"][0]["state"] == "unreachable"
    seen = max(History.load(run.path).series("train/loss"))
    follower = subprocess.Popen([*words, "logs", "-f", run.run_id], stdout=subprocess.DEVNULL, start_new_session=True)
    wait_for_step(run, seen + 5)
    follower.send_signal(signal.SIGINT)
    assert follower.wait(60) == 130
    done = subprocess.run([*words, "cancel", run.run_id], check=True, capture_output=True, text=True)
    assert done.stdout == f"{run.run_id} cancelled\n"
    steps = list(History.load(run.path).series("train/loss"))
    assert steps == list(range(1, len(steps) + 1))
    assert len(History.load(run.path).environments) == 1


Daemon = tuple[str, Callable[[], None], Callable[[], None]]


@pytest.fixture
def other_daemon(docker_engine: str) -> Iterator[Daemon]:
    """A dockerd of its own, to be stopped and started: its address, how it is stopped, how it is started."""
    folder = Path(tempfile.mkdtemp(prefix="sparsebp-dockerd-"))

    def start() -> None:
        service.script("dockerd.sh", D=str(folder))

    def stop() -> None:
        service.end(folder / "docker.pid")

    address = f"unix://{folder}/docker.sock"
    start()
    service.copy_image(["docker", "--host", docker_engine], ["docker", "--host", address])
    yield address, stop, start
    stop()
    subprocess.run(["umount", "-q", str(folder / "exec" / "netns" / "default")], check=False)  # else it stays for ever
    shutil.rmtree(folder)


@pytest.mark.promise("R10")
def test_a_daemon_that_is_restarted_is_unreachable_until_it_tells_the_end(
    other_daemon: Daemon, docker_options: Options
) -> None:
    address, stop, start = other_daemon
    run, target = prepare("docker", docker_options | {"host": address})
    job = target.submit(run)
    wait_for_step(run)
    stop()  # it stops its containers in order: SIGTERM, so the worker makes a checkpoint
    until(lambda: job.status() is State.UNREACHABLE)
    assert not job.settled()
    start()
    assert job.wait(120) is State.INTERRUPTED
    assert (run.path / "checkpoints").is_dir()
    assert target.engine.find(run) is None  # type: ignore[attr-defined]


@pytest.mark.promise("R14")
def test_a_host_whose_key_is_unknown_or_has_changed_is_refused(
    ssh_hosts: Path, slurm_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    changed = "[127.0.0.1]:2222 " + " ".join((tmp_path / "other.pub").read_text().split()[:2]) + "\n"
    run, _ = prepare("local", {})
    config = (ssh_hosts / "config").read_text()
    (tmp_path / "bin").mkdir()
    for known in ("", changed):
        (tmp_path / "known").write_text(known)
        (tmp_path / "config").write_text(config.replace(f"{ssh_hosts}/known_hosts", str(tmp_path / "known")))
        (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/config "$@"\n')
        (tmp_path / "bin" / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        for engine in (
            DockerEngine(DockerOptions(host="ssh://hosta")),
            SlurmEngine(SlurmOptions(host="ssh://hosta", folder="/tmp/none")),
        ):
            with pytest.raises(UnreachableError, match="Host key verification failed"):
                engine.find(run)
        assert (tmp_path / "known").read_text() == known


def slurm(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def handle_of(run: RunFolder) -> str:
    launch = Launch.load(run)
    assert launch is not None
    return launch.handle


def go_on(run: RunFolder, handle: str) -> None:
    """Wait until a job that was put back works again; the two minutes that Slurm would wait are cut short."""
    script = f"job{int(handle):05d}/slurm_script"  # a node refuses a job whose last script still ends there
    until(lambda: not any(script in " ".join(process.info["cmdline"] or []) for process in process_iter(["cmdline"])))
    words = ["scontrol", "update", f"JobId={handle}", "StartTime=now"]
    time.sleep(3)  # a start in the second in which the job was put back fails: "Job credential revoked"
    for _ in range(20):
        subprocess.run(words, check=False, capture_output=True)  # refused while the job is still being put back
        with suppress(AssertionError):
            until(lambda: len(History.load(run.path).warm) == 2, seconds=6)
            return
    raise AssertionError(slurm("scontrol", "show", "job", handle) + run.log_file.read_text())


def test_a_warned_job_makes_a_checkpoint_is_put_back_and_goes_on_by_itself(slurm_options: Options) -> None:
    noisy = ["which bash", "set -e"]  # prints where a job's number is expected, and would end the script
    run, target = prepare("slurm", slurm_options | {"setup": noisy})
    job = target.submit(run)
    wait_for_step(run, 3)
    handle = handle_of(run)
    slurm("scancel", "--batch", "--signal=USR1", handle)  # as Slurm does before a time limit
    until(lambda: job.status() is State.QUEUED)
    assert last_end(run)["status"] == "interrupted"
    step = last_end(run)["step"]
    go_on(run, handle)
    assert History.load(run.path).warm[1] == (2, step)
    until(lambda: job.status() is State.RUNNING)
    assert handle_of(run) == handle
    assert job.cancel() is State.CANCELLED
    steps = list(History.load(run.path).series("train/loss"))
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.promise("R4")
def test_a_preempted_job_goes_on_when_there_is_room_again(slurm_options: Options) -> None:
    run, target = prepare("slurm", slurm_options | {"cpus": 4, "partition": "main", "arguments": ["--nodelist=n2"]})
    job = target.submit(run)
    wait_for_step(run, 3)
    handle = handle_of(run)
    words = (
        "--partition=high",
        "--cpus-per-task=4",
        "--nodelist=n2",
        "--mem=500m",
        "--wrap=sleep 600",
        "--output=/dev/null",
    )
    intruder = slurm("sbatch", "--parsable", *words, "--wrap=sleep 600")
    until(lambda: slurm("squeue", "-h", "-j", intruder, "-o", "%T") == "RUNNING")
    until(lambda: job.status() is State.QUEUED)
    assert last_end(run)["status"] == "interrupted"
    slurm("scancel", intruder)
    go_on(run, handle)
    assert job.cancel() is State.CANCELLED


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB that a remote host keeps its runs on."""
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.promise("R3")
def test_a_remote_disk_that_is_full_is_one_line_and_the_run_goes_later(
    slurm_ssh_options: Options, small_disk: Path
) -> None:
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    run, target = prepare("slurm", slurm_ssh_options | {"folder": str(small_disk / "runs")}, fake="ok")
    before = run.plan_file.read_bytes()
    with pytest.raises(SparseBPError, match="No space left on device") as failed:
        target.submit(run)
    assert "\n" not in str(failed.value)
    assert run.plan_file.read_bytes() == before
    assert run.state() in {State.QUEUED, State.FAILED, State.INTERRUPTED}
    filler.unlink()
    assert target.submit(run).wait(120) is State.FINISHED
    assert list(History.load(run.path).series("train/loss")) == list(range(1, 13))


@pytest.fixture
def docker_on_small_disk(ssh_hosts: Path, docker_engine: str, tmp_path: Path) -> Iterator[tuple[Options, Path]]:
    """Options of a docker behind a real sshd whose daemon keeps everything on a disk of its own; where that is."""
    disk = Path(tempfile.mkdtemp(prefix="sparsebp-disk-"))
    image = disk.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(2 << 30)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    try:
        service.script("dockerd.sh", D=str(disk))
        address = f"unix://{disk}/docker.sock"
        service.copy_image(["docker", "--host", docker_engine], ["docker", "--host", address])
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "ssh").write_text(  # this daemon, in place of the one that the host has for everybody
            f"""#!/bin/sh
for word; do shift; [ "$word" != docker ] || set -- "$@" env DOCKER_HOST={address}; set -- "$@" "$word"; done
exec /usr/bin/ssh -F {ssh_hosts}/config "$@"
"""
        )
        (tmp_path / "bin" / "ssh").chmod(0o755)
        yield IN_CONTAINER | {"image": service.BASE, "pull": "never", "host": "ssh://hosta"}, disk
    finally:
        service.end(disk / "docker.pid")
        subprocess.run(["umount", "-q", str(disk / "exec" / "netns" / "default")], check=False)
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
        image.unlink()
        disk.rmdir()


def fill(disk: Path) -> list[Path]:
    """Leave no room on a disk; return what to delete for some."""
    fillers = [disk / "filler", disk / "rest"]
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    subprocess.run(["fallocate", "-l", str(free - (16 << 20)), str(fillers[0])], check=True)
    with suppress(OSError), fillers[1].open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return fillers


@pytest.mark.promise("R3")
def test_a_docker_host_whose_disk_is_full_is_one_line_and_the_run_goes_later(
    docker_on_small_disk: tuple[Options, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, disk = docker_on_small_disk
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    run, target = prepare("docker", options, "ok")
    fillers = fill(disk)
    with pytest.raises(SparseBPError, match=r"(?i)no space left on device|disk is full") as failed:
        target.submit(run)
    assert "\n" not in str(failed.value)
    assert run.state() in {State.QUEUED, State.FAILED, State.INTERRUPTED}
    for filler in fillers:
        filler.unlink()
    assert target.submit(run).wait(300) is State.FINISHED
    assert list(History.load(run.path).series("train/loss")) == list(range(1, 13))
    again, target = prepare("docker", options, "slow")  # and at work
    job = target.submit(again)
    wait_for_step(again, 3)
    fillers = fill(disk)
    seen = max(History.load(again.path).series("train/loss"))
    until(lambda: job.status().over or max(History.load(again.path).series("train/loss")) > seen + 40)
    for filler in fillers:
        filler.unlink()
    assert (job.status() if job.status().over else job.cancel()).over
    steps = list(History.load(again.path).series("train/loss"))
    assert steps == list(range(1, len(steps) + 1))


def test_a_job_that_waits_for_room_is_queued_and_can_be_cancelled(slurm_options: Options) -> None:
    run, target = prepare("slurm", slurm_options | {"arguments": ["--hold"]})
    job = target.submit(run)
    until(lambda: bool(handle_of(run)))
    assert job.status() is State.QUEUED
    assert job.cancel() is State.CANCELLED
    assert History.load(run.path).environments == []
    assert slurm("squeue", "-h", "-t", "PENDING,RUNNING", "-j", handle_of(run), "-o", "%T") == ""


def test_seeds_are_one_array_of_which_so_many_work_at_once(slurm_options: Options) -> None:
    prepared = [prepare("slurm", slurm_options) for _ in range(3)]
    runs, target = [run for run, _ in prepared], prepared[0][1]
    jobs = target.submit_all(runs, max_parallel=2)
    until(lambda: [job.status() for job in jobs] == [State.RUNNING, State.RUNNING, State.QUEUED])
    handles = [handle_of(run) for run in runs]
    first = handles[0].partition("_")[0]
    assert handles == [f"{first}_0", f"{first}_1", f"{first}_2"]
    assert jobs[0].cancel() is State.CANCELLED
    until(lambda: jobs[2].status() is State.RUNNING)
    jobs[1].stop()
    assert [job.wait(60) for job in jobs[1:]] == [State.INTERRUPTED] * 2


@pytest.mark.promise("R10")
def test_a_controller_that_is_away_is_unreachable(
    slurm_options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = Path(os.environ["SLURM_CONF"]).read_text().replace("SlurmctldPort=16817", "SlurmctldPort=16899")
    (tmp_path / "slurm.conf").write_text(conf + "\nSlurmctldTimeout=2\nMessageTimeout=2\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    run, _ = prepare("local", {})
    with pytest.raises(UnreachableError):
        SlurmEngine(SlurmOptions()).status(run, "1")


def read_store(file: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(file) as store:
        rows = store.execute("select key, step, value, timestamp from metrics order by key, step").fetchall()
        rows += store.execute("select status, name from runs").fetchall()
    store.close()
    return rows


def test_what_a_dispatcher_tracked_equals_what_sync_sends_afterwards(
    docker_options: Options, home_folder: Path
) -> None:
    run, target = prepare("docker", docker_options, "ok", tracking={})
    assert target.submit(run).wait(120) is State.FINISHED
    live = read_store(home_folder / "mlflow.db")
    assert len([row for row in live if row[0] == "train/loss"]) == 12
    other = home_folder / "other.db"
    # In a process of its own: what mlflow imports warns of much.
    code = "from sparsebp_cli.run import *; from sparsebp_cli.tracking import sync; import sys; "
    code += "assert sync(find_run(sys.argv[1])[0], sys.argv[2] or None).complete"
    subprocess.run([sys.executable, "-c", code, run.run_id, f"sqlite:///{other}"], check=True)
    assert read_store(other) == live
    subprocess.run([sys.executable, "-c", code, run.run_id, ""], check=True)
    assert read_store(home_folder / "mlflow.db") == live


TRAINED = {
    "model": {"name": "austen-llama"},
    "dataset": {"name": "python-docs", "max_seq_length": 32, "max_examples": 40, "eval_split": "test"},
    "policy": [{"name": "random", "keep": 0.5, "along": "rows"}],
    "backward": {"exclude": ["*lm_head"]},
    "training": {"max_steps": 4, "per_device_train_batch_size": 2},
    "measure": {"eval_every": 2, "eval_examples": 8, "probe_every": None, "warmup_steps": 1},
}


def test_one_small_training_gives_the_same_numbers_on_every_target(
    docker_options: Options,
    slurm_cluster: Path,
    ssh_hosts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", f"{ssh_hosts}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster))
    monkeypatch.delenv("MKL_CBWR", raising=False)  # a container does not have it, and it changes last bits
    batch = {"python": sys.executable, "cpus": 1, "memory": "2g", "env": {"OMP_NUM_THREADS": "1"}}
    there = {"host": "ssh://hostb", "folder": str(tmp_path / "there"), "setup": [f"export SLURM_CONF={slurm_cluster}"]}
    in_container = docker_options | {"env": {"OMP_NUM_THREADS": "1"}}
    places: list[tuple[str, Options]] = [
        ("local", {}),
        ("docker", in_container),
        ("docker", in_container | {"host": "ssh://hosta"}),
        ("slurm", batch),
        ("slurm", batch | there),
    ]
    found = []
    for kind, options in places:
        worker = {"worker": "sparsebp_cli.worker", "threads": 1, "device": "cpu"}
        run, target = prepare(kind, options | worker, **TRAINED)
        job = target.submit(run)
        assert job.wait(300) is State.FINISHED, (kind, list(job.logs())[-5:])
        history = History.load(run.path)
        names = ("train/loss", "train/grad_norm", "eval/loss", "policy/kept_share")
        model = hashlib.sha256((run.path / "model" / "model.safetensors").read_bytes()).hexdigest()
        found.append(([history.series(name) for name in names], history.facts["dataset_digest"], model))
    assert len(found[0][0][0]) == 4
    assert found[1:] == [found[0]] * 4
