"""Every target keeps the contract, by the public suite; engines and daemons are real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest
from pydantic import model_validator

from sparsebp_cli.recipe import target as targets
from sparsebp_cli.recipe.target import FoundTarget
from sparsebp_cli.target import LocalTarget, TargetOptions
from sparsebp_cli.testing import check_target
from sparsebp_cli.testing.target import WORKER
from tests.target.fake import FakeTarget

from . import service
from .conftest import until

LONG = pytest.mark.long  # two minutes each; what goes over ssh is also in test_engines.py
KINDS = ("docker", "slurm", pytest.param("docker_ssh", marks=LONG), pytest.param("slurm_ssh", marks=LONG))


def test_local_keeps_the_contract() -> None:
    check_target("local")


class ScratchOptions(TargetOptions):
    """This machine, with a variable that an option sets."""

    scratch: Path

    @model_validator(mode="after")
    def set_variables(self) -> Self:
        self.env.setdefault("TMPDIR", str(self.scratch))
        return self


class ScratchTarget(LocalTarget):
    options_class = ScratchOptions


@pytest.mark.slow
def test_a_target_that_derives_from_the_local_one_keeps_the_contract(tmp_path: Path) -> None:
    check_target(ScratchTarget(ScratchOptions(scratch=tmp_path, worker=WORKER)))


def test_what_a_validator_adds_to_the_variables_is_stored_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = FoundTarget("scratch", "tests", ScratchTarget)
    monkeypatch.setattr(targets, "find_target", lambda _: found)
    for given, expected in (({}, str(tmp_path)), ({"TMPDIR": "/x"}, "/x")):
        section, errors = targets.check_target({"kind": "scratch", "scratch": str(tmp_path), "env": given})
        assert errors == []
        assert section is not None
        assert section.options["env"] == {"TMPDIR": expected}  # which local runner and worker read
        again, _ = targets.check_target(section.model_dump(mode="json"))
        assert again == section


def test_the_fake_keeps_the_contract(tmp_path: Path) -> None:
    check_target(FakeTarget(tmp_path / "there"))


def _list_containers() -> set[str]:
    listed = ["docker", "--host", service.DOCKER, "ps", "--all", "--quiet", "--filter", "label=sparsebp.run"]
    return set(subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.slow
@pytest.mark.xdist_group("engines")
@pytest.mark.parametrize("name", KINDS)
def test_a_real_engine_keeps_the_contract(name: str, request: pytest.FixtureRequest) -> None:
    options = request.getfixturevalue(f"{name}_options")
    before = _list_containers() if name.startswith("docker") else set()  # of a session that was killed, for example
    check_target(name.partition("_")[0], **options)
    if name.startswith("docker"):
        until(lambda: _list_containers() <= before, seconds=60)
    if "folder" in options:
        assert not list((Path(options["folder"]) / "runs").iterdir())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.xdist_group("engines")
def test_podman_keeps_the_contract(docker_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service.need("podman", "catatonit", "runc")
    # Rights that a container asks for by default and that not every machine can give.
    configuration = tmp_path / "containers.conf"
    configuration.write_text(
        '[containers]\ndefault_ulimits = ["nofile=10000:10000", "nproc=10000:10000"]\nnetns = "host"\n'
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    monkeypatch.setenv("CONTAINERS_CONF", str(configuration))
    if not service.is_answering("podman", "image", "exists", service.BASE):
        service.copy_image(["docker", "--host", docker_engine], ["podman"])
    mounts = {"python": sys.executable, "mounts": service.MOUNTS, "network": "host"}
    check_target("docker", command="podman", image=service.BASE, pull="never", **mounts)
    listed = subprocess.run(["podman", "ps", "--all", "--quiet"], check=True, capture_output=True, text=True)
    assert listed.stdout == ""
