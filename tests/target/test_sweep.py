"""What the command line does with several runs, with targets and with their names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.target import find_targets, named_target_section, named_targets
from sparsebp_cli.run import History, State, list_runs
from sparsebp_cli.target.local import share_gpus

from .conftest import until

Sparsebp = Callable[..., "subprocess.CompletedProcess[str]"]

RECIPE = """\
version: 1
name: sparse
model: {name: none}
dataset: {name: none}
policy: [{name: topk, keep: 0.1}]
training: {max_steps: 5}
target: {kind: local, worker: sparsebp_cli.testing.worker}
tracking: {uri: "sqlite:////dev/null/mlflow.db"}
"""


@pytest.fixture
def sparsebp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sparsebp:
    monkeypatch.setenv("SPARSEBP_TARGETS", str(tmp_path / "targets.yaml"))
    (tmp_path / "r.yaml").write_text(RECIPE)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()", *words]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path)

    return run


def test_with_baseline_takes_turns_and_shares_what_is_the_same(sparsebp: Sparsebp, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(RECIPE.replace("keep: 0.1", "keep: 0.2").replace("name: sparse", "name: half"))
    done = sparsebp("run", "r.yaml", "s.yaml", "--with-baseline", "--seeds", "0-2")
    assert done.returncode == 0, done.stderr
    plans = [Plan.load(run.plan_file).recipe for run in list_runs()[::-1]]
    assert [(plan.name, plan.training.seed) for plan in plans] == [
        ("sparse-dense", 0),
        ("sparse", 0),
        ("sparse", 1),
        ("sparse-dense", 1),
        ("sparse-dense", 2),
        ("sparse", 2),
        ("half", 0),
        ("half", 1),
        ("half", 2),
    ]
    ends = [History.load(run.path).ends[-1]["time"] for run in list_runs()[::-1]]
    assert ends == sorted(ends)


def test_with_baseline_and_parallel_runs_are_refused_together(sparsebp: Sparsebp) -> None:
    done = sparsebp("run", "r.yaml", "--with-baseline", "--max-parallel", "2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "leave out --max-parallel" in done.stderr


def test_a_dense_recipe_has_no_baseline(sparsebp: Sparsebp) -> None:
    done = sparsebp("run", "r.yaml", "--set", "policy=dense", "--with-baseline")
    assert done.returncode == 2
    assert "dense" in done.stderr


def test_runs_on_one_target_work_beside_each_other(sparsebp: Sparsebp) -> None:
    slow = ("--set", "tracking.tags.fake=slow")
    done = sparsebp("run", "r.yaml", "--seeds", "0-1", "--max-parallel", "2", *slow, "--detach")
    assert done.returncode == 0, done.stderr
    runs = list_runs()
    until(lambda: all(run.state() is State.RUNNING for run in runs))
    assert [run.state() for run in runs] == [State.RUNNING] * 2
    assert sparsebp("cancel", "@2").returncode == 0
    assert [run.state() for run in runs] == [State.CANCELLED] * 2


def test_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5")
    assert share_gpus(1) == [{}]
    assert share_gpus(2) == [{"CUDA_VISIBLE_DEVICES": "0,5"}, {"CUDA_VISIBLE_DEVICES": "2"}]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in share_gpus(4)] == ["0", "2", "5", "0"]


def test_a_named_target_is_a_section_that_a_recipe_can_add_to(sparsebp: Sparsebp, tmp_path: Path) -> None:
    (tmp_path / "targets.yaml").write_text("gpu1: {kind: docker, host: 'ssh://gpu1', gpus: 1, threads: 2}\n")
    done = sparsebp("run", "r.yaml", "--target", "gpu1", "--set", "target.threads=4", "--dry-run")
    assert done.returncode == 0, done.stderr
    target = yaml.safe_load(done.stdout)["recipe"]["target"]
    assert (target["kind"], target["host"], target["gpus"], target["threads"]) == ("docker", "ssh://gpu1", 1, 4)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("# docker --host ssh://gpu1 create --name sparsebp-")
    assert not list_runs()


def test_targets_lists_kinds_and_names_and_checks_one(sparsebp: Sparsebp, tmp_path: Path) -> None:
    (tmp_path / "targets.yaml").write_text("here: {kind: local, threads: 2}\n")
    listed = json.loads(sparsebp("targets", "-o", "json").stdout)["targets"]
    assert {line["name"]: line["kind"] for line in listed}["here"] == "local"
    assert {line["name"] for line in listed} >= set(find_targets())
    checked = json.loads(sparsebp("targets", "check", "here", "-o", "json").stdout)["checks"]
    assert [finding["what"] for finding in checked["here"]] == ["python", "GPUs", "disk"]
    wrong = sparsebp("targets", "check", "her")
    assert wrong.returncode == 2
    assert "did you mean here?" in wrong.stderr
    table = sparsebp("targets").stdout
    assert max(map(len, table.splitlines())) <= 100 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("local: {kind: local}", "targets.yaml:1:1: local: is the name of a kind of target; choose another name"),
        ("a: docker", "targets.yaml:1:4: a: must be a mapping such as {kind: docker}, got text"),
        ("[a]", "targets.yaml:1:1: the file must map names to targets, got a list"),
    ],
)
def test_a_wrong_targets_file_is_one_line_with_its_place(
    sparsebp: Sparsebp, tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "targets.yaml").write_text(text + "\n")
    done = sparsebp("targets")
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}/{problem}\n")


def test_names_are_read_from_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEBP_TARGETS", str(tmp_path / "none.yaml"))
    assert named_targets() == {}
    assert named_target_section("local").kind == "local"


def test_a_file_that_a_container_does_not_see_is_refused_before_anything_is_written(
    sparsebp: Sparsebp, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("x")
    words = ("run", "r.yaml", "-t", "docker", "--set", "dataset.name=text.txt")
    for more in ((), ("--dry-run",)):
        done = sparsebp(*words, *more)
        assert done.returncode == 2
        assert f"dataset.name: the container cannot see {tmp_path}/text.txt" in done.stderr
    assert not list_runs()
    seen = sparsebp(*words, "--set", f"target.mounts=['{tmp_path}:{tmp_path}']", "--dry-run")
    assert seen.returncode == 0, seen.stderr
