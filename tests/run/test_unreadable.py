"""A file that is there and cannot be read is not an absent one: nothing is deleted or trained because of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import RunFolder, State, create_run
from sparsebp_cli.target.launch import Launch

pytestmark = pytest.mark.promise("R28")

DAMAGES = {"emptied": b"", "zeroed": bytes(100), "cut": b'{"after_attempt": 0, "watcher', "a list": b"[]",
           "nested deeply": b"[" * 60_000}  # fmt: skip


def make_run(**target: object) -> RunFolder:
    content = {"version": 1, "name": "r", "model": {"name": "none"}, "dataset": {"name": "none"}, "target": target}
    plan = Plan(recipe=Recipe.model_validate(content))
    run = create_run(plan.run_id)
    plan.save(run.path)
    return run


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_elsewhere_whose_record_is_unreadable_is_unreachable(damage: str) -> None:
    run = make_run(kind="docker", image="x")
    assert run.state() is State.QUEUED
    run.target_file.write_bytes(DAMAGES[damage])
    assert run.state() is State.UNREACHABLE
    launch = Launch.load(run)
    assert launch is not None
    assert (launch.sight, launch.handle, launch.watcher(run)) == ("unreachable", "", None)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_here_whose_record_is_unreadable_is_known_by_its_locks(damage: str) -> None:
    run = make_run(kind="local")
    run.target_file.write_bytes(DAMAGES[damage])
    assert run.state() is State.INTERRUPTED
    with run.lock("worker"):
        assert run.state() is State.RUNNING


@pytest.mark.parametrize("content", [b"", bytes(50), b"{"])
def test_a_plan_that_a_study_can_make_again_counts_as_none(content: bytes, home_folder: Path) -> None:
    from sparsebp_lab.study.store import has_plan

    run = make_run(kind="local")
    assert has_plan(run)
    run.plan_file.write_bytes(content)
    assert not has_plan(run)


@pytest.mark.chaos
def test_no_damage_of_a_record_makes_a_run_elsewhere_over_or_absent(record_property) -> None:
    run, chance, num_trials = make_run(kind="docker", image="x"), random.Random(28), 1000
    Launch(0, 1, handle="sparsebp-0123456789ab engine", sight="working").save(run)
    whole = run.target_file.read_bytes()
    for trial in range(num_trials):
        content, place = bytearray(whole), chance.randrange(len(whole))
        if trial % 4 == 0:
            content = content[:place]
        elif trial % 4 == 1:
            content[place:] = bytes(len(content) - place)
        elif trial % 4 == 2:
            content[place] ^= 1 << chance.randrange(8)
        else:
            content = bytearray(chance.randbytes(place))
        run.target_file.write_bytes(content)
        assert run.state() is State.UNREACHABLE, content
        launch = Launch.load(run)
        assert launch is not None, content
        assert launch.sight != "over", content
    record_property("trials", num_trials)
