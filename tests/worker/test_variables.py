"""The environment of a worker is declared: what another program left in the shell changes no bit of a run."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import History, RunFolder, interpreter
from sparsebp_cli.run.journal import read
from sparsebp_cli.target.local import LocalTarget
from tests.worker.conftest import work

LIBRARIES = ("accelerate", "transformers", "torch", "datasets", "peft", "huggingface_hub")
# Ways in which these libraries name a variable that they read: a call, an index, or a prefix of several.
READS = re.compile(
    r"""(?:environ(?:\.get|\.pop|\.setdefault)?|getenv|get_env|_from_env|env_name_default|Config)\w*\s*[(\[]\s*\[?
    (?:\s*[rf]?["'](\w+)["']\s*,?)""",
    re.VERBOSE,
)
CONSTANT = re.compile(r"""^\s*\w*ENV\w*\s*(?::\s*\w+)?=\s*["']([A-Z][A-Z0-9_]+)["']""", re.MULTILINE)
NAME = re.compile(r"[A-Z][A-Z0-9_]{2,}")
# What other programs of this field leave in a shell.
LEFT_BEHIND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
LEFT_BEHIND |= {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "2"}


@functools.cache
def collect_names() -> frozenset[str]:
    """Return the variables that the libraries read, by their sources."""
    found = set[str]()
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library)
        assert spec is not None
        assert spec.origin is not None
        for file in Path(spec.origin).parent.rglob("*.py"):
            source = file.read_text(encoding="utf-8", errors="replace")
            found.update(NAME.findall(" ".join((*READS.findall(source), *CONSTANT.findall(source)))))
    return frozenset(found)


def train_by_itself(run: RunFolder, left: dict[str, str]) -> dict[str, Any]:
    """Start a worker as a cluster does, in a shell where others left variables; return its numbers and weights."""
    command = LocalTarget(TargetOptions()).command(run)
    done = subprocess.run(
        command, env=left | os.environ, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        **load_file(run.path / "model" / "model.safetensors"),
        "losses": History.load(run.path).series("train/loss"),
    }


def hostile(value: str, names: Iterable[str]) -> dict[str, str]:
    return {name: value for name in names if not interpreter.is_declared(name)} | LEFT_BEHIND


@pytest.mark.inventory
def test_the_sources_of_the_libraries_name_variables_that_are_known_to_change_a_run() -> None:
    found = collect_names()
    known = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_DEEPSPEED"}
    known |= {"ACCELERATE_USE_FSDP", "TORCHINDUCTOR_CACHE_DIR", "LOCAL_RANK", "RANK", "WORLD_SIZE", "HF_HUB_OFFLINE"}
    known |= {"TORCH_COMPILE_DISABLE", "HF_DATASETS_CACHE", "TRANSFORMERS_VERBOSITY", "PYTORCH_ENABLE_MPS_FALLBACK"}
    assert known - found == set()
    assert len(found) > 300


@pytest.mark.slow
def test_a_run_has_the_same_bits_under_every_variable_that_the_libraries_read(tiny_recipe: Any, prepared: Any) -> None:
    recipe, names = tiny_recipe(training={"max_steps": 2}, checkpoint={"every": 9}), collect_names()
    plain = train_by_itself(prepared(recipe), {})
    for value in ("4", "true"):
        found = train_by_itself(prepared(recipe), hostile(value, names))
        assert found.keys() == plain.keys()
        assert found.pop("losses") == plain["losses"]
        assert all(torch.equal(tensor, plain[name]) for name, tensor in found.items())


def test_the_local_target_starts_workers_with_declared_variables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = interpreter.worker_environment({"A": "1"})
    for name, value in hostile("4", collect_names()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("A", "2")
    found = interpreter.worker_environment({"A": "1"})
    assert found == expected
    assert {"PATH", "HOME", "PYTHONSAFEPATH"} <= found.keys()


def test_a_worker_keeps_what_its_target_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONE", "TWO", "THREE", "FOUR"):
        monkeypatch.setenv(name, "from the shell")
    interpreter.keep_declared({"ONE": "1", "FIVE": "5"}, ["TWO"], ["module load x", "export THREE=3; cd /"])
    assert [os.environ.get(name) for name in ("ONE", "TWO", "THREE", "FOUR", "FIVE")] == [
        *["from the shell"] * 3,
        None,
        "5",
    ]


def test_a_run_records_which_variables_it_had(tiny_recipe: Any, prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    described = interpreter.describe_variables()
    assert described["variables"]["NCCL_ALGO"] == "Ring"  # type: ignore[index]
    assert "HF_TOKEN" in str(described["other_variables"]).split()
    assert "hf_secret" not in json.dumps(described)
    assert "ACCELERATE_MIXED_PRECISION" not in json.dumps(described)
    run = prepared(tiny_recipe(training={"max_steps": 1}))
    assert work(run) == 0
    (environment,) = (record["environment"] for record, _ in read(run.path) if record["kind"] == "attempt")
    assert environment["variables"]["OMP_NUM_THREADS"] == "1"
    assert "PATH" in environment["other_variables"]


def test_a_local_worker_gets_what_its_recipe_gives_and_nothing_else(
    tiny_recipe: Any, prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_process_left: None
) -> None:
    worker = "import json, os, pathlib, sys\nplace = pathlib.Path(sys.argv[1]).with_name('env')\n"
    (tmp_path / "names_variables.py").write_text(f"{worker}place.write_text(json.dumps({{**os.environ}}))\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:relative")
    for name in ("RANK", "MASTER_ADDR", "ACCELERATE_USE_DEEPSPEED", "GIVEN", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, "from the shell")
    run: RunFolder = prepared(tiny_recipe(target={"env": {"GIVEN": "by the recipe"}}))
    (job,) = LocalTarget(TargetOptions(worker="names_variables")).submit_all([run])
    job.wait(60)
    found = json.loads((run.path / "env").read_text())
    assert (found["GIVEN"], found["PYTHONPATH"], found["PYTHONUNBUFFERED"]) == ("by the recipe", str(tmp_path), "1")
    undeclared = {name for name in found if not interpreter.is_declared(name)}
    assert undeclared <= {"GIVEN"} | {name for name in found if name.startswith("__")}
