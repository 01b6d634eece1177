"""Mounts, users and devices that lead out of a container are refused, alike on every engine."""

from __future__ import annotations

import grp
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from sparsebp_cli.errors import UsageError
from sparsebp_cli.recipe.schema import TargetSection
from sparsebp_cli.run import RunFolder
from sparsebp_cli.target import make_target
from sparsebp_cli.target.batch import SlurmOptions, render_script
from sparsebp_cli.target.confinement import check_remote_mounts, mount_query, read_mount
from sparsebp_cli.target.container import DockerOptions, confinement_options
from sparsebp_cli.target.docker import DockerEngine
from sparsebp_cli.target.manifest import KubernetesOptions, make_job
from sparsebp_cli.target.shell import Shell
from sparsebp_cli.target.tool import CommandResult

pytestmark = pytest.mark.promise("R21")

ENGINES: dict[str, tuple[type[BaseModel], dict[str, object]]] = {
    "docker": (DockerOptions, {}),
    "podman": (DockerOptions, {"command": "podman"}),
    "docker over SSH": (DockerOptions, {"host": "ssh://me@host"}),
    "pyxis": (SlurmOptions, {"container": "pyxis"}),
    "apptainer": (SlurmOptions, {"container": "apptainer"}),
    "kubernetes": (KubernetesOptions, {}),
}
HOSTILE = [
    "/", "//", "///", "/.", "/./", "/..", "//etc", "/srv//data", "/srv/./data", "/srv/../etc", "/srv/data/", "srv/data",
    "~/data", "$HOME", "/srv/$(id)", "/srv/`id`", "/srv/a;b", '/srv/a"b', "/srv/a'b", "/srv/a\\b", "/srv/a\nb",
    "/srv/a,readonly=false", "/srv/\x1b[2J", "/srv/\u202ex", "/srv/\0", "/root", "/root" + "/x", "/etc", "/etc/ssl",
    "/proc", "/proc/1/root", "/sys", "/sys/fs/cgroup", "/dev", "/dev/sda", "/run", "/run/user", "/run/docker.sock",
    "/var", "/var/run", "/var/run/docker.sock", "/var/lib", "/var/lib/docker", "/var/lib/kubelet", "/boot", "/home",
    "/home/bob", "/home/bob/.ssh", "/home/bob/.ssh/id_rsa", "/home/bob/.aws", "/home/bob/.kube/config",
    "/home/bob/.docker/config.json", "/home/bob/.config", "/home/bob/.bashrc", "/home/bob/.netrc", "/tmp", "/var/tmp",
    "/usr", "/usr/bin", "/bin", "/lib", "/snap", "/nix", "/srv/docker.sock", "/tmp/agent.sock", "/unknown/place",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_allowed_beside_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSEBP_MOUNTS", raising=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_mounts_what_leads_out_of_the_container(engine: str) -> None:
    options, more = ENGINES[engine]
    for source in HOSTILE:
        for mode in ("", ":ro", ":rw"):
            with pytest.raises(ValidationError, match=r"cannot be mounted|must be"):
                options.model_validate({"mounts": [f"{source}:/inside{mode}"], **more})
    for mount in (
        "",
        ":",
        "/srv/a",
        "/srv/a:",
        "/srv/a:/b:",
        "/srv/a:/b:rw,z",
        "/srv/a:/b:ro:rw",
        "/srv/a:b",
        "/srv/a:/",
    ):
        with pytest.raises(ValidationError, match="must be"):
            options.model_validate({"mounts": [mount], **more})


@pytest.mark.parametrize("source", HOSTILE)
def test_a_folder_for_downloads_is_judged_like_a_mount(source: str) -> None:
    with pytest.raises(ValidationError):
        DockerOptions(hub_cache=source)


@pytest.mark.parametrize("hostile", ["/etc", "/", "/proc/self/root", "/root", "/var/run"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_link_is_judged_by_where_it_leads(engine: str, hostile: str, tmp_path: Path) -> None:
    (tmp_path / "innocent").symlink_to(hostile)
    (tmp_path / "second").symlink_to(tmp_path / "innocent")
    options, more = ENGINES[engine]
    for source in ("innocent", "second"):
        with pytest.raises(ValidationError, match="cannot be mounted"):
            options.model_validate({"mounts": [f"{tmp_path / source}:/inside"], **more})


def test_a_link_that_appears_after_the_check_is_refused_when_the_container_is_made(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    options = DockerOptions(mounts=[f"{tmp_path}/data:/x:rw"])
    assert any(f"source={tmp_path}/data,target=/x" in word for word in confinement_options(options))
    (tmp_path / "data").rmdir()
    (tmp_path / "data").symlink_to("/etc")
    with pytest.raises(UsageError, match=r"data \(/etc\) cannot be mounted: it is a system folder"):
        confinement_options(options)


@pytest.fixture
def bound_socket() -> Iterator[Path]:
    """A socket under a name that gives nothing away; its path has to be short."""
    folder = Path(f"/tmp/sbp-{os.getpid()}/deep")
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "api"))
        yield folder / "api"
    (folder / "api").unlink()
    folder.rmdir()
    folder.parent.rmdir()


def test_no_folder_with_a_socket_in_it_is_mounted(bound_socket: Path) -> None:
    for source in (bound_socket, bound_socket.parent, bound_socket.parent.parent):
        with pytest.raises(ValueError, match=r"cannot be mounted: (a container could control|it is a socket)"):
            read_mount(f"{source}:/x")


def test_folders_of_data_are_mounted_and_read_only_unless_asked(tmp_path: Path) -> None:
    folder = f"{tmp_path}/data"
    run = RunFolder(Path("/home/me/runs/0123456789ab"))
    for mode, writable in (("", False), (":ro", False), (":rw", True)):
        mounts = [f"{folder}:/inside{mode}"]
        words = " ".join(confinement_options(DockerOptions(mounts=mounts)))
        assert (f"source={folder},target=/inside,readonly" in words) is not writable
        pod = make_job(KubernetesOptions(mounts=mounts), run.run_id)["spec"]["template"]["spec"]
        assert pod["containers"][0]["volumeMounts"][1]["readOnly"] is not writable
        for container in ("pyxis", "apptainer"):
            script = render_script(SlurmOptions(container=container, mounts=mounts), [str(run.path)])
            assert f"{folder}:/inside:{'rw' if writable else 'ro'}" in script
    for source in (
        "/srv/data",
        "/data",
        "/home/bob/project",
        "/home/bob/.cache/huggingface/hub",
        "/mnt/c/a b",
        "/srv/été",
    ):
        assert read_mount(f"{source}:/x").source == source


def test_further_places_are_allowed_by_the_person_and_never_those_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARSEBP_MOUNTS", "/gpfs1:/etc:/:/root" + "/project")
    assert read_mount("/gpfs1/me:/x").source == "/gpfs1/me"
    assert read_mount("/usr/share/dict:/x").source == "/usr/share/dict"
    for source in ("/etc", "/etc/ssl", "/", "/run/user", "/proc/1", "/var", "/root", "/usr"):
        with pytest.raises(ValueError, match=r"cannot be mounted|must be"):
            read_mount(f"{source}:/x")


def test_the_token_of_the_hub_is_not_mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = tmp_path / ".cache" / "huggingface"
    (cache / "hub").mkdir(parents=True)
    assert read_mount(f"{cache}:/x").source == str(cache)
    (cache / "token").write_text("hf_x")
    with pytest.raises(ValueError, match="settings or keys"):
        read_mount(f"{cache}:/x")
    assert read_mount(f"{cache}/hub:/x").source == f"{cache}/hub"


@pytest.mark.parametrize("options", [DockerOptions, KubernetesOptions])
@pytest.mark.parametrize(
    "user",
    ["0:0", "10001:0", "0:10001", "10001:999", "10001:6", "10001:42", "10001:10002", "999:999", "65534:65534", "docker",
     "10001", "10001:docker", "1000:1000\n", " 1:1", "-1:-1", "10001:10001:0", "4294967296:0"],
)  # fmt: skip
def test_no_container_gets_a_group_or_user_with_rights_on_the_host(options: type[BaseModel], user: str) -> None:
    with pytest.raises(ValidationError):
        options.model_validate({"user": user})


def test_the_submitting_user_and_a_number_that_nobody_has_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    monkeypatch.setattr(os, "getgid", lambda: 54322)
    for user in ("54321:54322", "10001:10001", "54399:54399"):
        assert DockerOptions(user=user).user == user
    monkeypatch.setattr(os, "getgid", lambda: 0)
    with pytest.raises(ValidationError, match="give your own user and group ids"):
        DockerOptions(user="54321:54322")


def test_a_group_that_has_an_ordinary_number_but_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    docker = grp.struct_group(("docker", "x", 54400, []))
    monkeypatch.setattr(grp, "getgrgid", lambda number: docker if number == 54400 else grp.struct_group())
    with pytest.raises(ValidationError, match="this user or group id belongs to docker here"):
        DockerOptions(user="54400:54400")


@pytest.mark.parametrize("device", ['0","capabilities=all', "0 --privileged", "", "0\n1"])
def test_a_list_of_devices_holds_names_of_devices_only(device: str) -> None:
    with pytest.raises(ValidationError):
        DockerOptions(gpus=[device])


def test_a_host_that_resolves_a_path_elsewhere_refuses_it() -> None:
    mounts = ["/srv/data:/x", "/srv/more:/y:rw"]
    assert mount_query(mounts).startswith("realpath -m -- /srv/data /srv/more && ")
    table = "Num RefCount Protocol Flags Type St Inode Path\n0: 2 0 10000 1 1 7 /srv/more/deep/x\n1: 2 0 0 1 1 8 @a\n"
    check_remote_mounts(mounts, "/srv/data\n/mnt/more\n==\n" + table)
    check_remote_mounts(mounts, "This account is only for docker.")
    with pytest.raises(ValueError, match=r"/srv/data \(/etc\) cannot be mounted"):
        check_remote_mounts(mounts, "/etc\n/srv/more\n==\n")
    with pytest.raises(
        ValueError, match="a container could control a program of the host through the socket /srv/more/deep/x"
    ):
        check_remote_mounts(mounts, "/srv/data\n/srv/more\n==\n" + table)


@pytest.mark.parametrize("options", [{"mounts": ["/srv/data:/x"]}, {"hub_cache": "/srv/data"}])
def test_the_host_over_ssh_is_asked_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home_folder: Path, options: dict[str, Any]
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\necho ran >> {tmp_path}/docker-ran\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(Shell, "run", lambda *_, **__: CommandResult(0, b"/etc\n==\n", ""))
    engine = DockerEngine(DockerOptions(host="ssh://host", **options))
    with pytest.raises(UsageError, match=r"target.mounts on ssh://host: /srv/data \(/etc\) cannot be mounted"):
        engine.start([RunFolder(home_folder / "runs" / "0123456789ab")], 1)
    assert not (tmp_path / "docker-ran").exists()


@pytest.mark.parametrize("kind", ["docker", "kubernetes", "slurm"])
def test_a_recipe_with_a_hostile_mount_is_refused_where_it_says_so(kind: str) -> None:
    with pytest.raises(UsageError, match="mounts"):
        make_target(TargetSection.model_validate({"kind": kind, "mounts": ["//:/b:rw"]}))
