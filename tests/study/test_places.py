"""A study over several places with real daemons: each trial is trained once, where it was dealt; a place that goes away
takes its own trials with it and nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder, State, list_runs
from sparsebp_cli.target.launch import Launch
from tests.target import service
from tests.target.conftest import IN_CONTAINER, until

from .conftest import STUDY, count_attempts, count_finishes
from .study_folder import IMPATIENT, WORKER, StudyFolder, find_place, list_trials, wait_for_held

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("engines"),  # one daemon, one test at a time
    pytest.mark.timeout(3600),  # a study takes minutes where ten processes share a processor
]

FOUR_RATES = STUDY.replace("[5e-4, 1e-3]", "[1e-4, 5e-4, 1e-3, 1e-2]").replace("report: 1-2", "report: 1-3")
CONTAINER = {"kind": "docker", "image": service.BASE, "pull": "never", **IN_CONTAINER, **WORKER}
BATCH = {"kind": "slurm", "python": sys.executable, "cpus": 1, "memory": "500m", **WORKER}
AWAY = "unreachable: ssh://hostc "  # it cannot be reached, or its tunnel does not answer as docker does


@pytest.fixture
def study(tmp_path: Path) -> StudyFolder:
    return StudyFolder(tmp_path)


def test_trials_work_where_they_were_dealt_and_slurm_sees_one_array_a_stage(
    study: StudyFolder,
    docker_engine: str,
    ssh_hosts: Path,
    slurm_cluster: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("PATH", f"{ssh_hosts}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster))
    slots = {"local": 2, "hosta": 1, "hostb": 1, "slurm": 3}
    names = {"slurm": "cluster"}
    where: list[object] = [{"target": names.get(one, one), "max_parallel": count} for one, count in slots.items()]
    hosts = {name: CONTAINER | {"host": f"ssh://{name}"} for name in ("hosta", "hostb")}
    study.write(FOUR_RATES, where, {"cluster": BATCH, **hosts})
    code, out, err = study.run()
    assert code == 0, err
    assert out.endswith("tiny: 14 of 14 trials have finished\nnext: sparsebp compare --study tiny\n")
    assert len(list_runs()) == 14
    assert set(count_attempts().values()) == {1}
    assert set(count_finishes().values()) == {1}

    dealt = cycle(name for name, count in slots.items() for _ in range(count))
    assert [find_place(run) for run in list_trials()] == list(islice(dealt, 14))
    tasks = [find_tasks(role) for role in ("tune", "report")]
    for found in tasks:
        array = found[0].partition("_")[0]
        assert found == [f"{array}_{number}" for number in range(3)]
    assert list_jobs(study.folder) == {f"{task} COMPLETED" for found in tasks for task in found}

    compared = json.loads(study.run("compare", "--study", "tiny", "-o", "json")[1])
    assert {group["label"]: group["seeds"] for group in compared["groups"]} == {"dense": [1, 2, 3], "topk": [1, 2, 3]}
    assert {Plan.load(run.plan_file).recipe.training.learning_rate for run in list_trials("report")} == {1e-3}
    before = count_attempts()
    assert study.run()[0] == 0
    assert count_attempts() == before
    assert len(list_jobs(study.folder)) == 6


def find_tasks(role: str) -> list[str]:
    """Return what a stage's trials are called in Slurm."""
    launches = [Launch.load(run) for run in list_trials(role) if find_place(run) == "slurm"]
    return [launch.handle for launch in launches if launch is not None]


def list_jobs(folder: Path) -> set[str]:
    """Return the tasks that the scheduler has had from clients in a folder, each with its state."""
    words = ["squeue", "--noheader", "--states=all", "--array", "--format=%F_%K %T %Z"]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return {job for job, _, place in (line.rpartition(" ") for line in lines) if place == str(folder)}


@dataclass
class Host:
    """A host behind a real sshd of its own, which a test stops and starts."""

    folder: Path

    def start(self) -> None:
        config = self.folder / "sshd_config"
        subprocess.run(["/usr/sbin/sshd", "-f", str(config), "-E", str(self.folder / "sshd.log")], check=True)
        until((self.folder / "sshd.pid").exists)

    def stop(self) -> None:
        service.end(self.folder / "sshd.pid")
        (self.folder / "sshd.pid").unlink(missing_ok=True)


@pytest.fixture
def host(docker_engine: str, ssh_hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """The host ``hostc``, with the same engine of docker as the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "hostc"
    (folder / "bin").mkdir(parents=True)
    public = " ".join((ssh_hosts / "hostkey.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}\n")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {ssh_hosts}/hostkey\nPidFile {folder}/sshd.pid\n"
        f"AuthorizedKeysFile {ssh_hosts}/authorized_keys\nStrictModes no\nPermitRootLogin prohibit-password\n"
        f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nSetEnv DOCKER_HOST={docker_engine}\n"
    )
    (folder / "config").write_text(
        f"Host hostc\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentityFile {ssh_hosts}/id\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n  BatchMode yes\n  ConnectTimeout 5\n"
    )
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    found = Host(folder)
    found.start()
    yield found
    found.stop()
    for run in list_runs():
        docker("rm", "--force", run, check=False)


def docker(verb: str, *words: str | RunFolder, check: bool = True) -> None:
    """Do something to the container of a run, on its machine."""
    named = [f"sparsebp-{word.run_id}" if isinstance(word, RunFolder) else word for word in words]
    subprocess.run(["docker", "--host", service.DOCKER, verb, *named], check=check, capture_output=True)


@pytest.fixture
def hold(study: StudyFolder, host: Host) -> Path:
    """A study over this machine and ``hostc``. While the file that this returns exists, no trial at ``hostc`` goes
    beyond its second step."""
    gate = study.folder / "gate"
    gate.mkdir(mode=0o755)
    (gate / "hold").touch()
    there = CONTAINER | {"host": "ssh://hostc", "mounts": [*service.MOUNTS, f"{gate}:/gate"]}
    study.write(STUDY + "search: {extend: 0}\n", ["local", {"target": "hostc"}], {"hostc": there}, hold="/gate/hold")
    return gate / "hold"


def leave_alone(run: RunFolder) -> None:
    """The worker goes on while nobody can reach it."""


def kill(run: RunFolder) -> None:
    """The worker dies while nobody can reach it."""
    docker("kill", run)


@pytest.mark.parametrize("end", [leave_alone, pytest.param(kill, marks=pytest.mark.long)])
def test_a_place_that_goes_away_loses_its_trials_and_the_same_command_ends_the_study(
    study: StudyFolder, host: Host, hold: Path, end: Callable[[RunFolder], None]
) -> None:
    client = study.start(before=IMPATIENT)
    (held,) = wait_for_held("hostc")
    host.stop()
    out, err = client.communicate()
    assert client.returncode == 101, err
    assert "tiny: 2 of 8 trials have finished" in out  # those of this machine; neither arm has its best yet
    assert [AWAY in line for line in err.splitlines()] == [True, True]
    assert held.state() is State.UNREACHABLE

    end(held)
    hold.unlink()
    host.start()
    code, out, err = study.run()
    assert code == 0, err
    assert "tiny: 8 of 8 trials have finished" in out
    assert set(count_finishes().values()) == {1}
    assert [find_place(run) for run in list_trials("tune")] == ["local", "hostc"] * 2
    assert count_attempts() == {run.run_id: 2 if run == held and end is kill else 1 for run in list_trials()}


def test_ctrl_c_does_not_wait_for_a_place_that_is_away(study: StudyFolder, host: Host, hold: Path) -> None:
    client = study.start()
    (held,) = wait_for_held("hostc")
    host.stop()
    until(lambda: held.state() is State.UNREACHABLE)
    client.send_signal(signal.SIGINT)
    _, err = client.communicate()
    assert client.returncode == 130, err
    assert held.state() is State.UNREACHABLE
    assert held.request_file.read_text() == "stop"  # which its dispatcher sees to as soon as the host answers


def test_trials_of_a_place_that_the_study_no_longer_names_go_to_another(
    study: StudyFolder, host: Host, hold: Path
) -> None:
    host.stop()
    code, out, err = study.run()
    assert code == 101, err
    assert "tiny: 2 of 8 trials have finished" in out
    assert [find_place(run) for run in list_trials()] == ["local", "hostc"] * 2
    file = study.folder / "study.yaml"
    file.write_text(file.read_text().replace(', {"target": "hostc"}', ""))
    code, out, err = study.run()
    assert code == 0, err
    assert set(count_attempts().values()) == {1}
    assert {find_place(run) for run in list_trials()} == {"local"}
