"""``sparsebp evaluate``: what the harness says of a model is what its own command says, and the run keeps it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.compare import compare_runs
from sparsebp_cli.errors import RunNotFoundError, SparseBPError, UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter, RunFolder, State, create_run
from sparsebp_cli.run.journal import find_outline
from sparsebp_cli.source.bundled import austen_llama
from sparsebp_tools.harness import judge
from sparsebp_tools.verb.evaluate import describe_kept, record
from tests.cli.conftest import Cli

ROWS = [
    {"q": "The sky is", "choices": [" blue", " quick", " it"], "gold": 0},
    {"q": "She was a", "choices": [" woman", " the of", " and"], "gold": 0},
    {"q": "It is a truth", "choices": [" and", " universally acknowledged", " of"], "gold": 1},
    {"q": "He was", "choices": [" the the", " happy", " of it the"], "gold": 1},
]
TASK = """\
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


# The command line as if the harness shipped the tasks of a folder: those that it ships have their data on the hub.
WITH_TASKS = """\
import functools, sys
import lm_eval.tasks
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_path=sys.argv.pop(1))
import sparsebp_cli.cli.worker_process
from sparsebp_cli.cli.app import main
from sparsebp_tools.harness import judge
sparsebp_cli.cli.worker_process.measure_apart = lambda _, request: judge(request, lambda *_: None)
main()
"""


def make_run(seed: int = 0) -> RunFolder:
    values = {"version": 1, "name": "made", "model": {"name": "austen-llama"}, "dataset": {"name": "austen"}}
    plan = Plan(recipe=Recipe.model_validate(values | {"training": {"max_steps": 2, "seed": seed}}))
    run = create_run(plan.run_id)
    plan.save(run.path)
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=0, environment={})
        journal.write("facts", values={"metrics": {"eval/wer": {"unit": "", "better": "lower"}}})
        for step in (1, 2):
            journal.write("metrics", step=step, values={"train/loss": 1.0})
        journal.write("end", status="finished", step=2, text="")
    return run


def made(value: float, better: str = "higher") -> dict[str, Any]:
    judged = {"version": 1.0, "hash": "ab", "examples": 4, "values": {"acc": {"value": value, "better": better}}}
    return {"version": "0.4.13", "tasks": {"colours": judged}}


@pytest.mark.slow
def test_the_results_are_those_of_the_harness_itself(tmp_path: Path, home_folder: Path) -> None:
    file = tmp_path / "colours.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "colours.yaml").write_text(TASK.format(file=file))
    run = make_run()
    (run.path / "model").symlink_to(austen_llama())
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    words = ["evaluate", run.run_id, "--lm-eval", "colours", "-o", "json"]
    ours = subprocess.run(
        [sys.executable, "-c", WITH_TASKS, str(tmp_path), *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert ours.returncode == 0, ours.stderr
    found = json.loads(ours.stdout[ours.stdout.index("{\n") :])
    options = ["--model", "hf", "--model_args", f"pretrained={austen_llama()},dtype=auto", "--device", "cpu"]
    options += ["--tasks", "colours", "--include_path", str(tmp_path), "--batch_size", "8", "--log_samples"]
    theirs = subprocess.run(
        [sys.executable, "-m", "lm_eval", *options, "--output_path", str(tmp_path / "out")],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr
    (results,) = (json.loads(path.read_text()) for path in (tmp_path / "out").rglob("results_*.json"))
    judged = found["tasks"]["colours"]
    assert judged["values"] == {"acc": {"value": results["results"]["colours"]["acc,none"], "better": "higher"}}
    assert judged["hash"] == results["task_hashes"]["colours"]
    assert (judged["version"], judged["examples"]) == (results["versions"]["colours"], 4)
    history = History.load(run.path)
    assert history.last("lm_eval/colours/acc") == judged["values"]["acc"]["value"]
    (samples,) = (tmp_path / "out").rglob("samples_colours_*.jsonl")
    each = [json.loads(line)["acc"] for line in samples.read_text().splitlines()]
    assert history.scores == {2: {"lm_eval/colours/acc": each}}
    assert "scores" not in judged


def test_a_run_keeps_the_results_and_stays_as_it_was(home_folder: Path) -> None:
    run = make_run()
    record(run, made(0.75))
    later = made(0.5)
    later["tasks"]["colours"]["hash"] = "cd"
    assert describe_kept(run, record(run, later)).startswith("not stored: ")  # the first value stays, with its own hash
    history = History.load(run.path)
    assert dict(history.series("lm_eval/colours/acc")) == {2: 0.75}
    assert history.facts["metrics"].keys() == {"eval/wer", "lm_eval/colours/acc"}
    assert history.facts["lm_eval"] == {  # type: ignore[typeddict-item]
        "version": "0.4.13",
        "tasks": {"colours": {"version": 1.0, "hash": "ab", "examples": 4}},
    }
    assert (run.state(), find_outline(run.path).attempts, len(history.warm)) == (State.FINISHED, 1, 1)


def test_what_the_harness_declares_is_compared_in_its_direction(home_folder: Path) -> None:
    runs = [make_run(seed) for seed in range(2)]
    for run, value in zip(runs, (0.5, 0.7), strict=True):
        record(run, made(value))
    found = compare_runs(runs, metric="lm_eval/colours/acc")
    assert (found.better, found.groups[0].quality.final and found.groups[0].quality.final.mean) == ("higher", 0.6)


def test_the_line_after_a_judgement_names_a_comparison_that_works(home_folder: Path) -> None:
    run = make_run()
    (command,) = re.findall("`(.+)`", describe_kept(run, record(run, made(0.75))))
    words = shlex.split(command)
    words[0] = str(Path(sys.executable).with_name(words[0]))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "lm_eval/colours/acc" in done.stdout
    assert "0.75" in done.stdout


@pytest.mark.parametrize("output", ["table", "json"])
def test_results_that_a_run_cannot_keep_are_shown(
    call: Cli, home_folder: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    run = make_run()
    locks = []

    def judge_meanwhile(*_: object) -> dict[str, Any]:
        """Another process begins to write to the run while the harness is at work."""
        locks.extend([run.lock("worker")] if not locks else [])
        return made(0.75)

    monkeypatch.setattr("sparsebp_cli.cli.worker_process.measure_apart", judge_meanwhile)
    try:
        done = call("evaluate", run.run_id, "--lm-eval", "colours", "-o", output)
    finally:
        locks[0].release()
    assert done.returncode == 101
    assert "0.75" in done.stdout
    assert f"error: these results were not stored in run {run.run_id}: another process is already" in done.stderr
    if output == "json":
        assert json.loads(done.stdout)["kept"] == []
    assert call("evaluate", run.run_id, "--lm-eval", "colours").returncode == 0
    assert "lm_eval/colours/acc" in History.load(run.path).facts["metrics"]


def test_weights_that_could_run_code_are_refused_before_the_harness_reads_them(tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    shutil.copy(austen_llama() / "config.json", folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    request = {"folder": str(folder), "tasks": ["colours"], "limit": None}
    with pytest.raises(SparseBPError, match="safetensors"):
        judge(json.dumps(request | {"batch_size": 1, "device": "cpu"}), lambda *_: None)


def test_what_has_no_model_is_refused(home_folder: Path, tmp_path: Path) -> None:
    from sparsebp_tools.verb.evaluate import _find

    run = make_run()
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=2, environment={})
        journal.write("end", status="failed", step=2, text="")
    with pytest.raises(UsageError, match="is failed, and has no model"):
        _find(run.run_id)
    (tmp_path / "none").mkdir()
    with pytest.raises(
        UsageError, match=r"none is neither a run nor the folder of a model, because it has no config\.json"
    ):
        _find(str(tmp_path / "none"))
    with pytest.raises(RunNotFoundError):
        _find(str(tmp_path / "nowhere"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="has only adapters"):
        _find(str(tmp_path))
