"""Stands in for ``sky`` with its server and its clouds: managed jobs are folders below ``$SKY``, machines are homes.

A machine is a new, empty home folder with the bucket in it, and goes with all that is on it. What the command line does
beyond that is told by files in ``$SKY``:

    noise     text that every command prints first
    down      no command reaches the server
    refuse    a launch is refused with this text
    lose      as many launches are accepted and their answers lost
    hide      accepted jobs are not listed yet
    hold      no job gets a machine
    reason    every job ends without a machine, with this status and reason
    preempt   the machine of this job is taken away; after "warned" its processes get a SIGTERM before
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml

SKY = Path(os.environ.get("SKY", "/nowhere"))
JOBS = SKY / "jobs"
OVER = {"SUCCEEDED", "CANCELLED", "FAILED", "FAILED_SETUP", "FAILED_NO_RESOURCE"}
LOST = "sky.exceptions.ApiServerConnectionError: Could not connect to SkyPilot API server at http://127.0.0.1:46580."
NONE = "sky.exceptions.ClusterDoesNotExist: Cluster 'sky-jobs-controller-fcd1e5cf' does not exist."
POLL_SECONDS = 0.02


def end(text: str, code: int = 1) -> NoReturn:
    print(text, file=sys.stderr)
    raise SystemExit(code)


def told(name: str) -> str:
    file = SKY / name
    return file.read_text().strip() or "yes" if file.exists() else ""


def load(job: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job / "record.json").read_text())
    return found


def change(job: Path, **values: object) -> None:
    """Change a job's record, as one writer of several; what is over stays as it is."""
    with (job / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = load(job) if (job / "record.json").exists() else {}
        if before.get("status") not in OVER:
            part = job / "record.part"
            part.write_text(json.dumps({**before, **values}))
            part.replace(job / "record.json")


def launch(words: list[str]) -> None:
    name, secrets, file = "", {}, words[-1]
    for flag, value in itertools.pairwise(words):
        if flag == "--name":
            name = value
        if flag == "--secret":
            if value not in os.environ:
                end(f"Usage: sky jobs launch\nError: {value} is not set in local environment.", 2)
            secrets[value] = os.environ[value]
    if told("refuse"):
        end(told("refuse"))
    JOBS.mkdir(exist_ok=True)
    number = 1
    while True:
        try:
            (JOBS / str(number)).mkdir()
            break
        except FileExistsError:
            number += 1
    job = JOBS / str(number)
    shutil.copy(file, job / "task.yaml")
    change(job, job_id=number, task_id=0, job_name=name, status="PENDING", recovery_count=0, failure_reason=None)
    none = subprocess.DEVNULL
    subprocess.Popen(  # the controller outlives the command
        [sys.executable, __file__, "control", str(number)],
        env=os.environ | {"SECRETS": json.dumps(secrets)},
        start_new_session=True,
        stdin=none,
        stdout=none,
        stderr=(job / "controller.log").open("wb"),
    )
    if told("lose"):
        left = int(told("lose")) - 1
        (SKY / "lose").write_text(str(left)) if left else (SKY / "lose").unlink()
        end(LOST)
    print(f"Job submitted, ID: {number}")


def show() -> None:
    if not JOBS.exists():
        print("Restarting managed jobs controller...")
        end(NONE)
    jobs = [] if told("hide") else sorted(JOBS.iterdir(), key=lambda job: -int(job.name))
    print(json.dumps([load(job) for job in jobs if (job / "record.json").exists()], indent=2))


def control(job: Path) -> None:
    """What the jobs controller does: gets a machine, and another one when it is taken away."""
    while not finish(job):
        with suppress(FileNotFoundError):
            (SKY / "preempt").unlink()
        change(job, status="RECOVERING", recovery_count=load(job)["recovery_count"] + 1)


def finish(job: Path) -> bool:
    """Carry a job out on one machine; return False if the machine was taken away."""
    while told("hold"):
        if is_cancelled(job):
            return True
        time.sleep(POLL_SECONDS)
    if told("reason"):
        status, _, reason = told("reason").partition(" ")
        change(job, status=status, failure_reason=reason)
        return True
    if load(job)["status"] == "PENDING":
        change(job, status="STARTING")
    task = yaml.safe_load((job / "task.yaml").read_text())
    home = job / f"machine-{load(job)['recovery_count']}"
    home.mkdir()
    (home / "sparsebp-bucket").symlink_to(os.environ["BUCKET"])
    secrets = json.loads(os.environ["SECRETS"])
    (job / "secrets").write_text(" ".join(secrets))
    values = {"HOME": str(home), "SKYPILOT_MANAGED_JOB_ID": job.name, **task.get("envs", {}), **secrets}
    values["SKYPILOT_TASK_ID"] = f"sky-managed-2026-01-01-00-00-00-000000_{task['name']}_{job.name}-0"
    change(job, status="RUNNING")
    if subprocess.run(["bash", "-c", task.get("setup", "")], env=os.environ | values, check=False).returncode:
        change(job, status="FAILED_SETUP", failure_reason="Failed to run setup commands on the cluster.")
        return True
    with (job / "output").open("ab") as output:
        words = ["bash", "-c", task["run"]]
        process = subprocess.Popen(
            words, env=os.environ | values, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            taken = told("preempt").partition(" ")[0] == job.name
            if taken or (job / "cancel").exists():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM if told("preempt").endswith("warned") else signal.SIGKILL)
                process.wait()
                take_away(home)
                if taken:
                    return False
            time.sleep(POLL_SECONDS)
    if not is_cancelled(job):
        change(job, status="FAILED" if process.returncode else "SUCCEEDED")
        take_away(home)
    return True


def take_away(home: Path) -> None:
    """Delete a machine's folder, in which processes that were killed may still write a last file."""
    while home.exists():
        shutil.rmtree(home, ignore_errors=True)


def is_cancelled(job: Path) -> bool:
    if (job / "cancel").exists():
        change(job, status="CANCELLED")
    return (job / "cancel").exists()


def main(words: list[str]) -> None:
    if words[0] == "control":
        control(JOBS / words[1])
        return
    with (SKY / "calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    if told("noise"):
        print(told("noise"))
    if told("down"):
        end(LOST)
    match words:
        case ["--version"]:
            print("skypilot, version 0.14.1")
        case ["jobs", "launch", "--yes", "--detach-run", *rest]:
            launch(rest)
        case ["jobs", "queue", "--all", "--refresh", "--verbose", "--output", "json"]:
            show()
        case ["jobs", "cancel", "--yes", number]:
            change(JOBS / number, status="CANCELLING")
            (JOBS / number / "cancel").touch()
        case _:
            end(f"Usage: sky\nError: No such command or option: {words}", 2)


if __name__ == "__main__":
    main(sys.argv[1:])
