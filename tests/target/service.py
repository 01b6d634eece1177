"""Starts the real engines that the tests talk to, and stops those that it started.

The scripts that know how lie beside the repository; a machine without them, or without a program, skips the tests and
says why. Several test processes share what is running; the last one stops it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT.parent / "shared" / "services"
STATE = Path(os.environ.get("SERVICES", Path.home() / ".cache" / "sparsebp-services"))
DOCKER = f"unix://{STATE}/dk/docker.sock"
BASE = "sparsebp-base:host"
# Files of this machine that the workers in containers need: the package as it is here, and its environment.
MOUNTS = sorted({f"{path}:{path}" for path in (str(ROOT), sys.prefix)})
os.environ["SPARSEBP_MOUNTS"] = f"{ROOT}:{sys.prefix}"  # wherever this checkout lies


def need(*programs: str) -> None:
    """Skip the test where a program, or the right to start daemons, is missing."""
    if not SCRIPTS.is_dir():
        pytest.skip(f"real engines are started by the scripts in {SCRIPTS}, which are not here")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"this machine cannot run the engine: missing {', '.join(missing) or 'the rights of root'}")


@contextmanager
def shared(name: str) -> Iterator[bool]:
    """Hold the right to start or stop a service; yields whether no living test process uses it yet."""
    users = STATE / "users" / name
    users.mkdir(parents=True, exist_ok=True)
    with FileLock(STATE / f"{name}.lock"):
        for user in users.iterdir():
            if not psutil.pid_exists(int(user.name)):
                user.unlink()
        yield not any(users.iterdir())


def use(name: str) -> None:
    """Note that this process uses a service. Called while the right to start it is held."""
    (STATE / "users" / name / str(os.getpid())).touch()


def leave(name: str) -> bool:
    """Note that this process uses a service no more; return whether nobody does, and tests had started it."""
    (STATE / "users" / name / str(os.getpid())).unlink(missing_ok=True)
    return not any((STATE / "users" / name).iterdir()) and (STATE / f"{name}.started").exists()


def script(name: str, **environ: str) -> str:
    """Run one of the scripts."""
    done = subprocess.run(
        ["bash", str(SCRIPTS / name)],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={**os.environ, "SERVICES": str(STATE), **environ},
    )
    assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}"
    return done.stdout


def is_answering(*command: str, **environ: str) -> bool:
    """Whether a command ends well within ten seconds."""
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, timeout=10, env={**os.environ, **environ}, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def end(pid_file: Path) -> None:
    """End the process that a file names, and wait for it."""
    try:
        process = psutil.Process(int(pid_file.read_text()))
        process.terminate()
        process.wait(30)
    except (OSError, ValueError, psutil.Error):
        return


def start_docker() -> None:
    """Start dockerd with a double for the GPU hook, and make the base image."""
    hook = STATE / "bin" / "nvidia-container-runtime-hook"
    if not is_answering("docker", "version", DOCKER_HOST=DOCKER):
        hook.parent.mkdir(parents=True, exist_ok=True)
        hook.write_text("#!/bin/sh\ncat > /dev/null\nexit 0\n")
        hook.chmod(0o755)
        script(
            "dockerd.sh",
            PATH=f"{hook.parent}:{os.environ['PATH']}",
            EXTRA=f"--add-runtime nvidia={shutil.which('runc') or '/usr/sbin/runc'}",
        )
        (STATE / "docker.started").touch()
    if not is_answering("docker", "image", "inspect", BASE, DOCKER_HOST=DOCKER):
        script("base_image.sh", DOCKER_HOST=DOCKER)


def start_ssh() -> None:
    """Start sshd on two loopback addresses, with throw-away keys."""
    if not is_answering(str(STATE / "ssh" / "bin" / "ssh"), "hosta", "true"):
        script("sshd.sh")
        (STATE / "ssh.started").touch()


def start_slurm() -> None:
    """Start munge, a controller and two nodes."""
    if not is_answering("scontrol", "ping", SLURM_CONF=str(STATE / "slurm" / "slurm.conf")):
        script("slurm.sh")
        (STATE / "slurm.started").touch()


def stop(name: str) -> None:
    """Stop a service that tests had started."""
    if name == "docker":
        end(STATE / "dk" / "docker.pid")
    elif name == "ssh":
        end(STATE / "ssh" / "sshd.pid")
    else:
        script("slurm_stop.sh")
    (STATE / f"{name}.started").unlink(missing_ok=True)


STARTS = {"docker": start_docker, "ssh": start_ssh, "slurm": start_slurm}


@contextmanager
def running(name: str) -> Iterator[None]:
    """Have a service running."""
    with shared(name):
        STARTS[name]()
        use(name)
    yield
    with shared(name):
        if leave(name):
            stop(name)


def copy_image(source: Sequence[str], target: Sequence[str]) -> None:
    """Bring the base image from one engine to another."""
    with subprocess.Popen([*source, "save", BASE], stdout=subprocess.PIPE) as save:
        subprocess.run([*target, "load", "--quiet"], stdin=save.stdout, check=True, capture_output=True)
    assert save.returncode == 0
