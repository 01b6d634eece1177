"""A plan that a study can derive is made again where a power cut emptied it, and nothing else is trained again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import sparsebp_cli.target
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import State, list_runs

from ..cli.conftest import Cli, call
from ..cli.test_advice import AtOnce
from .conftest import Write, count_attempts

__all__ = ["call"]  # a fixture of the command line's tests

STUDY = """\
version: 1
study: tiny
base: base.yaml
arms: {dense: {}, topk: {policy: {name: topk, keep: 0.5}}}
seeds: {report: 0-1}
"""


@pytest.mark.promise("R28")
@pytest.mark.parametrize("content", [b"", bytes(200), b'{"recipe": {"ver'], ids=["emptied", "zeroed", "cut"])
@pytest.mark.parametrize("is_alone", [True, False], ids=["before its start", "after its end"])
def test_a_study_makes_an_unreadable_plan_again_and_goes_on(
    call: Cli, write_study: Write, monkeypatch: pytest.MonkeyPatch, content: bytes, is_alone: bool
) -> None:
    monkeypatch.setattr(sparsebp_cli.target, "make_target", lambda _: AtOnce())
    file: Path = write_study(STUDY)
    assert call("study", file).returncode == 0
    damaged = list_runs()[0]
    plan = Plan.load(damaged.plan_file)
    if is_alone:
        for path in damaged.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    damaged.plan_file.write_bytes(content)
    done = call("study", file)
    assert done.returncode == 0, done.stderr
    assert Plan.load(damaged.plan_file).recipe == plan.recipe
    assert [run.state() for run in list_runs()] == [State.FINISHED] * 4
    attempts = count_attempts()
    assert attempts.pop(damaged.run_id) >= 1  # a worker that finds its run finished trains nothing
    assert set(attempts.values()) == {1}
    assert call("compare", "--study", "tiny").returncode == 0
