"""Data that a recipe names by path have to be where its job runs: that is asked before a job waits in a queue."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import RunFolder, create_run
from sparsebp_cli.target.batch import SlurmOptions
from sparsebp_cli.target.slurm import SlurmEngine
from sparsebp_cli.target.tool import CommandResult
from sparsebp_tools.export.scheduler import export_kubernetes, export_sbatch


def make_plan(data: str, **target: Any) -> Plan:
    recipe = {"version": 1, "name": "own", "model": {"name": "m"}, "dataset": {"name": data}, "target": target}
    return Plan(recipe=Recipe.model_validate(recipe))


def make_run(plan: Plan) -> RunFolder:
    run = create_run(plan.run_id)
    plan.save(run.path)
    return run


@pytest.mark.parametrize("mounts", [["/srv/data:/srv/data"], []])
def test_an_exported_pod_reads_only_what_is_mounted(mounts: list[str]) -> None:
    plan = make_plan("/srv/data/rows.jsonl", kind="kubernetes", mounts=mounts)
    if mounts:
        assert "rows.jsonl" in export_kubernetes([plan])
        return
    with pytest.raises(UsageError, match=r"dataset.name: the container cannot see .*; add '/srv/data:/srv"):
        export_kubernetes([plan])


def test_a_job_in_a_container_reads_only_what_is_mounted() -> None:
    options = {"container": "apptainer", "image": "/images/x.sif"}
    plan = make_plan("/srv/data/rows.jsonl", kind="slurm", **options)
    with pytest.raises(UsageError, match="the container cannot see"):
        SlurmEngine(SlurmOptions.model_validate(options)).check_plan(plan)
    with pytest.raises(UsageError, match="the container cannot see"):
        export_sbatch([plan], 1)
    options["mounts"] = ["/srv:/srv"]  # type: ignore[assignment]
    SlurmEngine(SlurmOptions.model_validate(options)).check_plan(plan)


@pytest.mark.parametrize("is_there", [True, False])
def test_an_exported_job_ends_in_words_without_its_data(tmp_path: Path, *, is_there: bool) -> None:
    rows = tmp_path / "own rows.jsonl"
    if is_there:
        rows.touch()
    script = export_sbatch([make_plan(str(rows), kind="slurm")] * 2, 1)
    (line,) = [line for line in script.splitlines() if line.startswith("[ -e ") and "own rows" in line]
    done = subprocess.run(["bash", "-c", f"{line}\necho goes on"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == ((0, "goes on\n") if is_there else (2, ""))
    assert is_there or done.stderr == f"dataset.name: {rows} is not on this node: copy it to the same path\n"


@pytest.mark.parametrize("code", [0, 1])
def test_data_that_are_not_on_the_login_node_are_named_before_a_job_is_submitted(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    asked: list[str] = []

    def answer(self: SlurmEngine, lines: str, *, given: bytes = b"") -> CommandResult:
        asked.append(lines)
        return CommandResult(code if lines.startswith("[ -e ") else 99, b"", "refused there")

    monkeypatch.setattr(SlurmEngine, "_run_shell", answer)
    run = make_run(make_plan("/srv/rows.jsonl", kind="slurm", host="ssh://me@login", folder="/scratch/me"))
    engine = SlurmEngine(SlurmOptions(host="ssh://me@login", folder="/scratch/me"))
    expected = "refused the run" if code == 0 else "dataset.name: /srv/rows.jsonl is not on ssh://me@login: copy it to"
    with pytest.raises(Exception, match=expected):
        engine.start([run], 1)
    assert not any("sbatch" in lines for lines in asked)
