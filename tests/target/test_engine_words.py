"""What an engine refuses is told in its own words and ours beside them; `targets check` finds it before a run does."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from sparsebp_cli.errors import RunFailedError
from sparsebp_cli.target.container import DockerOptions
from sparsebp_cli.target.contract import CheckResult
from sparsebp_cli.target.docker import DockerEngine
from sparsebp_cli.target.engine_word import DOCKER, SLURM, explain
from sparsebp_cli.target.slurm import SlurmEngine, SlurmOptions

from .conftest import make_run

# Lines of Docker 20.10 to 28, podman 4.3, the NVIDIA toolkit, and Slurm 22.05, with a word of ours that has to follow.
WORDS = {
    'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].': "toolkit",
    "Error response from daemon: unknown or invalid runtime name: nvidia": "toolkit",
    'docker: Error response from daemon: could not select device driver "cdi" ... '
    'unresolvable CDI devices nvidia.com/gpu=0': "nvidia-ctk cdi",
    "nvidia-container-cli: device error: 7: unknown device: unknown.": "target.gpus",
    "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown.": "NVIDIA driver",
    "exec /usr/local/bin/python: exec format error": "another CPU architecture",
    "The requested image's platform (linux/arm64) does not match the detected host platform (linux/amd64)": "another",
    "no matching manifest for linux/arm64/v8 in the manifest list entries": "another CPU architecture",
    "Got permission denied while trying to connect to the Docker daemon socket at "
    "unix:///var/run/docker.sock": "group docker",
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the "
    "docker daemon running?": "start docker",
    "Cannot connect to Podman. Please verify your connection to the Linux system": "start podman",
    "pull access denied for nosuch, repository does not exist or may require 'docker login'": "docker login",
    "toomanyrequests: You have reached your pull rate limit.": "docker login",
    "manifest for python:nosuch not found: manifest unknown: manifest unknown": "target.image",
    'Get "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1.docker.io: no such host': "docker load",
    "Error: No such image: sparsebp:latest": "target.pull",
    'OCI runtime create failed: exec: "nopython": executable file not found in $PATH: unknown.': "target.python",
    'invalid mount config for type "bind": bind source path does not exist: /nosuch': "target.mounts",
    "Error response from daemon: network nosuch not found": "target.network",
    "Error response from daemon: Minimum memory limit allowed is 6MB": "target.memory",
    "write /var/lib/docker/tmp/x: no space left on device": "docker system prune",
    'error during connect: malformed HTTP status code "to"': "login shell",
    "sbatch: error: Batch job submission failed: Invalid partition name specified": "target.partition",
    "sbatch: error: Batch job submission failed: Invalid account or "
    "account/partition combination specified": "target.account",
    "sbatch: error: Batch job submission failed: Invalid qos specification": "target.arguments",
    "sbatch: error: Batch job submission failed: Requested time limit is invalid "
    "(missing or exceeds some limit)": "timeout_min",
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)": "target.account",
    "sbatch: error: Batch job submission failed: Memory specification can not be satisfied": "target.memory",
    "sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification": "target.gpus",
    "sbatch: error: Batch job submission failed: Requested node configuration is not available": "target.gpus",
    "sbatch: error: Batch job submission failed: More processors requested than permitted": "target.cpus",
    "sbatch: error: Batch job submission failed: Node count specification invalid": "target.nodes",
    "sbatch: error: Batch job submission failed: User's group not permitted to use "
    "this partition": "target.partition",
    "sbatch: error: Batch job submission failed: Access/permission denied": "target.account",
    "sbatch: error: Batch job submission failed: Invalid feature specification": "target.arguments",
    "sbatch: error: Batch job submission failed: Requested partition configuration "
    "not available now": "partition is down",
    "sh: 1: sbatch: not found": "target.setup",
    "slurm_load_partitions: Unable to contact slurm controller (connect failure)": "scontrol ping",
}  # fmt: skip


@pytest.mark.parametrize("words", WORDS)
def test_the_words_of_an_engine_have_ours_beside_them(words: str) -> None:
    told = explain(words)
    assert told.startswith(words.rstrip("."))
    assert WORDS[words] in told.removeprefix(words.rstrip("."))
    assert "\n" not in told


def test_every_pattern_has_words_of_an_engine_and_unknown_ones_stay_as_they_are() -> None:
    unused = [p for p, _ in DOCKER + SLURM if not any(re.search(p, words, re.IGNORECASE) for words in WORDS)]
    assert unused == []
    assert explain("ssh: connect to host login port 22: Connection refused") == (
        "ssh: connect to host login port 22: Connection refused"
    )


def pack(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def failures(results: list[CheckResult]) -> dict[str, str]:
    return {result.what: f"{result.text} {result.hint}" for result in results if result.level == "fail"}


SLURM_WRONG: dict[str, tuple[dict[str, object], str]] = {
    "partition": ({"partition": "nosuch"}, "target.partition"),
    "gpus": ({"gpus": 9}, "target.gpus"),
    "memory": ({"memory": "900g"}, "target.memory"),
    "cpus": ({"cpus": 99}, "target.cpus"),
    "feature": ({"arguments": ["--constraint=nosuch"]}, "target.arguments"),
}


def test_a_real_slurm_refuses_in_our_words_too_and_the_check_finds_it_before(slurm_options: dict[str, object]) -> None:
    assert failures(list(SlurmEngine(SlurmOptions(**slurm_options)).check())) == {}  # type: ignore[arg-type]
    for wrong, ours in SLURM_WRONG.values():
        engine = SlurmEngine(SlurmOptions(**(slurm_options | wrong)))  # type: ignore[arg-type]
        found = failures(list(engine.check()))
        if "partition" in wrong:
            assert found == {"partitions": "there is no nosuch "}
        else:
            assert ours in found["job"]
        if "cpus" not in wrong:  # such a job waits for ever
            with pytest.raises(RunFailedError, match=re.escape(ours)):
                engine.start([make_run()], 1)
    engine = SlurmEngine(SlurmOptions(**(slurm_options | {"python": "/nosuch/python"})))  # type: ignore[arg-type]
    [text] = failures(list(engine.check())).values()
    assert "/nosuch/python does not work there" in text
    assert "target.setup" in text


def test_a_python_without_sparsebp_is_named_by_the_check(slurm_options: dict[str, object], tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {Path(sys.executable).resolve()} -I -S "$@"\n')
    bare.chmod(0o755)
    engine = SlurmEngine(SlurmOptions(**(slurm_options | {"python": str(bare)})))  # type: ignore[arg-type]
    assert "sparsebp is not installed there" in failures(list(engine.check()))["packages"]


def test_a_real_docker_refuses_in_our_words_too_and_the_check_finds_it_before(
    docker_options: dict[str, object],
) -> None:
    assert failures(list(DockerEngine(DockerOptions(**docker_options)).check())) == {}  # type: ignore[arg-type]
    for wrong, ours in (
        ({"gpus": 1}, "install nvidia-container-toolkit"),
        ({"python": "nopython"}, "target.python"),
        ({"network": "nosuch"}, "target.network"),
        ({"memory": "1m"}, "target.memory"),
        ({"image": "sparsebp-nosuch:1"}, "target.pull"),
    ):
        engine = DockerEngine(DockerOptions(**(docker_options | wrong)))  # type: ignore[arg-type]
        found = failures(list(engine.check()))
        assert ours in " ".join(found.values()), (wrong, found)
        if not {"gpus", "python"} & wrong.keys():  # an engine of the tests may take GPUs; a container that fails ends
            with pytest.raises(RunFailedError, match=re.escape(ours)):
                engine.start([make_run()], 1)


def test_an_image_of_another_architecture_is_named_by_the_check(docker_options: dict[str, object]) -> None:
    name, other = "sparsebp-other:1", "arm64" if os.uname().machine == "x86_64" else "amd64"
    layer = pack({"python": b"\x7fELF"})
    config = {"architecture": other, "os": "linux", "config": {}}
    config |= {"rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    subprocess.run(["docker", "load"], input=pack(files | {"layer.tar": layer}), check=True, capture_output=True)
    try:
        wrong = {"image": name, "python": "/python", "mounts": []}
        results = list(DockerEngine(DockerOptions(**(docker_options | wrong))).check())  # type: ignore[arg-type]
    finally:
        subprocess.run(["docker", "rmi", name], check=False, capture_output=True)
    assert [r.what for r in results if r.level == "warn"] == ["architecture"]
    assert f"the image is for linux/{other}" in next(r.text for r in results if r.what == "architecture")
    assert failures(results).keys() == {"container"}


@pytest.mark.parametrize("is_chatty", [False, True])
def test_what_a_login_shell_prints_is_named_by_the_check(
    docker_ssh_options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_chatty: bool
) -> None:
    real = shutil.which("ssh")
    chatty = tmp_path / "chatty"
    chatty.mkdir()
    (chatty / "ssh").write_text(f'#!/bin/sh\n{"echo Maintenance on Friday" if is_chatty else ":"}\nexec {real} "$@"\n')
    (chatty / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{chatty}:{os.environ['PATH']}")
    results = list(DockerEngine(DockerOptions(**docker_ssh_options)).check())  # type: ignore[arg-type]
    told = [result.text for result in results if result.level != "ok" and "login shell" in result.text]
    assert len(told) == is_chatty, results
