"""A hundred runs in containers, some of them killed or cancelled, leave nothing behind on the engine."""

from __future__ import annotations

import random

import pytest

from sparsebp_cli.run import State
from tests.target.conftest import wait_for_step
from tests.target.test_engines import docker, prepare

NUM_RUNS = 100
pytestmark = [pytest.mark.chaos, pytest.mark.promise("R15"), pytest.mark.xdist_group("engines")]


@pytest.mark.timeout(3000)
def test_a_hundred_runs_in_containers_leave_nothing_behind(docker_options, record_property) -> None:
    chance, ended, names = random.Random(15), [], set()
    for number in range(NUM_RUNS):
        fate = chance.choice(["finished", "finished", "finished", "killed", "cancelled"])
        run, target = prepare("docker", docker_options, fake="ok" if fate == "finished" else "slow")
        names.add(f"sparsebp-{run.run_id}")
        job = target.submit(run)
        if fate == "finished":
            state = job.wait(120)
        else:
            wait_for_step(run)
            if fate == "killed":
                docker("kill", f"sparsebp-{run.run_id}")
                state = job.wait(120)
            else:
                state = job.cancel()
        wanted = {"finished": State.FINISHED, "killed": State.INTERRUPTED, "cancelled": State.CANCELLED}[fate]
        assert state is wanted, (number, fate)
        ended.append(fate)
    record_property("trials", len(ended))
    for fate in ("killed", "cancelled"):
        record_property("of which", (fate, ended.count(fate)))
    assert not names & set(docker("ps", "--all", "--format", "{{.Names}}").split())
