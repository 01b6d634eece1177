"""Hostile values through the real shell of each generated script: nothing but the worker runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.target.batch import SlurmOptions, render_script
from sparsebp_cli.target.container import ContainerOptions
from sparsebp_tools.export.scheduler import export_dstack, export_kubernetes, export_sbatch, export_sky

pytestmark = pytest.mark.promise("R19")

# A program that notes its name, its words and what it finds in the variable A.
STUB = r"""#!/bin/sh
{{ printf '%s\0' {name} "$@"; printf 'A=%s\0<end>\0' "${{A-}}"; }} >> "$STUB_LOG"
"""
PROGRAMS = ("python", "srun", "sbatch", "apptainer", "docker", "scontrol", "touch", "id", "curl", "sh-canary")
KEPT = ("cat", "rm", "mkdir", "sleep", "cp")
HOSTILE = [
    "$(touch pwned)", "`touch pwned`", "; touch pwned", "\ntouch pwned\n", "' ; touch pwned; '", '" ; touch pwned; "',
    "\\'; touch pwned #", "&& touch pwned", "| touch pwned", "> pwned", "${IFS}touch pwned", "-rf", "--help", "$A",
    "a\r\ntouch pwned", "END_OF_PLAN\ntouch pwned", "\nEND_OF_PLAN\ntouch pwned\n", "#SBATCH --wrap=touch", "!!",
    "~root", "*", "\u202etouch", "\x1b[2J", "$(HOME)", "$$(HOME)", "{{ secrets.x }}", "%j", "a b",
    "'", '"', "\\", "", "=",
    "- !!python/object/apply:os.system [touch pwned]", ": &a [*a]", "on", "0x10", "~",
]  # fmt: skip
TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20), st.text("'\"\\$`;&|<>(){}\n\r \t#!-=~*", max_size=12))
VALUES = TEXTS.filter(lambda text: ("\0" not in text and text.isascii()) or text.isprintable())


def make_plan(**target: Any) -> Plan:
    recipe = {"version": 1, "name": "x", "model": {"name": "m"}, "dataset": {"name": "d"}, "target": target}
    return Plan(run_id="0123456789ab", recipe=Recipe.model_validate(recipe))


def run_script(script: str, shell: str, *, is_found: bool = True, **environ: str) -> tuple[list[list[str]], list[str]]:
    """Run a script where programs are stubs; return what was called, and which files appeared beside it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "bin").mkdir()
        (folder / "work").mkdir()
        for name in PROGRAMS:
            (folder / "bin" / name).write_text(STUB.format(name=name))
            (folder / "bin" / name).chmod(0o755)
        for name in KEPT:
            (folder / "bin" / name).symlink_to(shutil.which(name) or name)
        (folder / "script").write_text(script.replace("/FOLDER", made), encoding="utf-8", newline="")
        path = shutil.which(shell)
        assert path is not None
        done = subprocess.run(
            [path, str(folder / "script")], cwd=folder / "work", capture_output=True, timeout=60, check=False,
            stdin=subprocess.DEVNULL,
            env={"PATH": str(folder / "bin"), "STUB_LOG": str(folder / "log"), "HOME": made, "SLURM_JOB_ID": "1"}
            | environ,
        )  # fmt: skip
        assert done.returncode == 0 or not is_found, done.stderr
        log = (folder / "log").read_bytes().decode(errors="surrogateescape") if (folder / "log").exists() else ""
        calls = [call.split("\0") for call in log.split("\0<end>\0")[:-1]]
        left = [path.name for path in (folder / "work").iterdir()]
        return [[word.replace(made, "/FOLDER") for word in call] for call in calls], left


WORKER = ["-P", "-m", "sparsebp_cli.worker", "/FOLDER/runs/0123456789ab/plan.json"]
CHEAP = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@CHEAP
@given(VALUES, st.sampled_from(["none", "pyxis", "apptainer"]))
@example("'; touch pwned; '", "none")
@example("$(touch pwned)", "pyxis")
def test_a_batch_script_starts_the_worker_and_nothing_else(value: str, container: str) -> None:
    options = SlurmOptions(env={"A": value}, container=container, mounts=["/srv/a b:/in"])  # type: ignore[arg-type]
    script = render_script(options, ["/FOLDER/runs/0123456789ab"])
    calls, left = run_script("mkdir -p /FOLDER/runs/0123456789ab\n" + script, "bash")
    (call,) = calls
    assert call[-1] == f"A={value}"
    run = "/FOLDER/runs/0123456789ab"
    before = {
        "none": ["python"],
        "pyxis": [
            "srun",
            "--container-image=sparsebp:latest",
            f"--container-mounts={run}:{run},/srv/a b:/in:ro",
            "python",
        ],
        "apptainer": ["apptainer", "exec", "--bind", run, "--bind", "/srv/a b:/in:ro", "sparsebp:latest", "python"],
    }
    assert call[:-1] == [*before[container], *WORKER]
    assert left == []


@pytest.mark.parametrize("shell", ["bash", "dash"])
@pytest.mark.parametrize("form", ["k8s", "sky", "dstack", "sbatch"])
def test_an_export_starts_the_worker_and_nothing_else(form: str, shell: str) -> None:
    if shutil.which(shell) is None or (form == "sbatch" and shell == "dash"):
        pytest.skip(f"{shell} is not here, or not what reads this form")
    for value in HOSTILE:
        kind = {"k8s": "kubernetes", "sbatch": "slurm"}.get(form, "docker")
        plan = make_plan(kind=kind, env={"A": value})
        environ, script = UNPACK[form](plan, value)
        calls, left = run_script(script, shell, **environ)
        (call,) = calls
        assert call[0] == "python"
        assert call[1:4] == WORKER[:3]
        assert call[-1] == f"A={value}"
        assert left == []


@CHEAP
@given(VALUES.filter(bool), st.sampled_from(["none", "pyxis", "apptainer"]))
@example("python; touch pwned", "none")
@example("$(touch pwned)", "apptainer")
def test_the_program_that_is_python_is_one_word_of_a_batch_script(value: str, container: str) -> None:
    options = SlurmOptions(python=value, container=container)  # type: ignore[arg-type]
    run = "/FOLDER/runs/0123456789ab"
    calls, left = run_script(f"mkdir -p {run}\n" + render_script(options, [run]), "bash", is_found=False)
    assert left == []
    if container == "none":  # the shell itself looks for the program
        assert [call for call in calls if call[0] != "python"] == []
    else:
        (call,) = calls
        assert call[call.index("sparsebp:latest" if container == "apptainer" else call[2]) + 1 :][:2] == [value, "-P"]


@pytest.mark.parametrize("shell", ["bash", "dash"])
@pytest.mark.parametrize("form", ["k8s", "sky", "dstack", "sbatch"])
def test_the_program_that_is_python_is_one_word_of_an_export(form: str, shell: str) -> None:
    if shutil.which(shell) is None or (form == "sbatch" and shell == "dash"):
        pytest.skip(f"{shell} is not here, or not what reads this form")
    for value in HOSTILE:
        if not value:
            continue
        kind = {"k8s": "kubernetes", "sbatch": "slurm"}.get(form, "docker")
        environ, script = UNPACK[form](make_plan(kind=kind, env={"A": "x"}, python=value), "x")
        calls, left = run_script(script, shell, is_found=False, **environ)
        assert (calls, left) == ([], [])


def unpack_k8s(plan: Plan, value: str) -> tuple[dict[str, str], str]:
    documents = list(yaml.safe_load_all(export_kubernetes([plan])))
    pod = documents[1]["spec"]["template"]["spec"]["containers"][0]
    (found,) = (entry["value"] for entry in pod["env"] if entry["name"] == "A")
    assert found == value.replace("$", "$$")
    assert json.loads(documents[0]["data"]["plan.json"])["run_id"] == plan.run_id
    line = pod["command"][2].replace("$$", "$").replace("/data", "/FOLDER").replace("/plan/plan.json /", "/dev/null /")
    return {"A": found.replace("$$", "$")}, line


def unpack_yaml(
    export: Callable[[list[Plan]], str], env: str, run: str
) -> Callable[[Plan, str], tuple[dict[str, str], str]]:
    def unpack(plan: Plan, value: str) -> tuple[dict[str, str], str]:
        task = yaml.safe_load(export([plan]))
        assert task[env] == {"A": value}
        script = task[run] if isinstance(task[run], str) else task[run][0]
        return {"A": value}, script

    return unpack


def unpack_sbatch(plan: Plan, _value: str) -> tuple[dict[str, str], str]:
    return {}, export_sbatch([plan], 1).replace(os.environ["SPARSEBP_HOME"], "/FOLDER")


UNPACK = {
    "k8s": unpack_k8s,
    "sky": unpack_yaml(export_sky, "envs", "run"),
    "dstack": unpack_yaml(export_dstack, "env", "commands"),
    "sbatch": unpack_sbatch,
}


@pytest.mark.parametrize(
    "name", ["A=1; touch pwned; B", "A B", "1A", "", "A-B", "A\n", "A$(id)", "\u00c4", "A.B", "-A", "A=", "\u202eA"]
)
def test_a_variable_has_the_name_of_one(name: str) -> None:
    with pytest.raises(ValidationError, match="must consist of letters, digits and _"):
        ContainerOptions(env={name: "x"})
    with pytest.raises(ValidationError, match="NUL"):
        ContainerOptions(env={"A": "x\0"})


@pytest.mark.parametrize("value", ["a\n#SBATCH --wrap=x", "a b", "a\rb", "a\tb", "--x\n"])
def test_no_option_of_sbatch_takes_a_second_line_or_word(value: str) -> None:
    for options in (
        {"partition": value},
        {"account": value},
        {"arguments": [f"--comment={value}"]},
        {"folder": f"/{value}"},
    ):
        with pytest.raises(ValidationError):
            SlurmOptions.model_validate(options)
    if "\n" in value or "\r" in value or "\t" in value:
        with pytest.raises(UsageError, match="one line of printable characters"):
            render_script(SlurmOptions(), [f"/home/{value}/runs/0123456789ab"])


def test_lines_of_setup_and_the_module_of_the_worker_are_one_line_and_one_word() -> None:
    with pytest.raises(ValidationError, match="each item must be one line"):
        SlurmOptions(setup=["a\nb"])
    for worker in ("a;b", "a b", "-c", "a\n", "$(id)", "../x", ""):
        with pytest.raises(ValidationError):
            SlurmOptions(worker=worker)
