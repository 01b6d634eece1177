"""A real engine: what leads out of a container is refused before anything starts, and what is started cannot leave."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import RunFolder, create_run
from sparsebp_cli.target import make_target
from sparsebp_cli.target.container import DockerOptions, confinement_options

from . import service
from .test_engines import docker

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("engines"), pytest.mark.promise("R15")]
Options = dict[str, Any]


def make_plan(options: Options) -> RunFolder:
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "name": "hostile",
            "model": {"name": "none"},
            "dataset": {"name": "none"},
            "target": {"kind": "docker", **options},
        }
    )
    plan = Plan(recipe=recipe)
    run = create_run(plan.run_id)
    plan.save(run.path)
    return run


def test_hostile_mounts_and_groups_are_refused_before_anything_starts(
    docker_options: Options, docker_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_socket = Path(docker_engine.removeprefix("unix://"))
    # The person allows the folder that the socket is in; it is refused all the same.
    monkeypatch.setenv("SPARSEBP_MOUNTS", f"{os.environ['SPARSEBP_MOUNTS']}:{engine_socket.parents[1]}")
    (tmp_path / "link").symlink_to(engine_socket.parent)
    before = docker("ps", "--all", "--quiet", "--no-trunc")
    hostile: list[Options] = [
        {"mounts": [mount]}
        for mount in (
            "//:/b:rw", f"{engine_socket}:/s", f"{engine_socket.parent}:/s", f"{engine_socket.parents[1]}:/s",
            f"{tmp_path}/link:/s", "/root:/r", "/run/user:/r", "/var/run:/r",
        )
    ]  # fmt: skip
    hostile += [{"user": f"10001:{engine_socket.stat().st_gid}"}, {"user": "10001:0"}, {"user": "0:0"}]
    for options in hostile:
        run = make_plan(docker_options | options)
        with pytest.raises(UsageError, match=r"target\.(mounts|user)"):
            make_target(Plan.load(run.plan_file).recipe.target).submit(run)
        assert not run.target_file.exists()
    assert docker("ps", "--all", "--quiet", "--no-trunc") == before


def test_a_container_sees_no_socket_no_capability_and_no_further_group(docker_options: Options) -> None:
    made = DockerOptions.model_validate(docker_options)
    look = (
        "import json, os; t = open('/proc/self/status').read().splitlines(); "
        "print(json.dumps([os.getuid(), os.getgid(), os.getgroups(), "
        "[l.split()[1] for l in t if l.startswith(('CapEff', 'CapBnd', 'NoNewPrivs'))], "
        "[l.split()[-1] for l in open('/proc/net/unix') if 'docker.sock' in l and os.path.exists(l.split()[-1])]]))"
    )
    words = [
        "run",
        "--rm",
        *confinement_options(made),
        "--workdir",
        "/",
        "--entrypoint",
        made.python,
        service.BASE,
        "-c",
        look,
    ]
    user, group, groups, rights, sockets = json.loads(docker(*words))
    assert (user, group) == (10001, 10001)
    assert set(groups) <= {10001}
    assert sorted(rights) == ["0000000000000000", "0000000000000000", "1"]
    assert sockets == []
