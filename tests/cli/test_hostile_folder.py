"""An unpacked folder that wants to run something: no verb that only looks does, and neither does a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..plan.test_provenance import run_git
from .conftest import environment, write_run
from .hostile import CANARY, ROWS, SHELL

pytestmark = pytest.mark.promise("R20")

RECIPE = """\
version: 1
name: hostile
model: {name: none}
dataset: {name: none}
training: {max_steps: 3}
tracking: {uri: "sqlite:////dev/null/mlflow.db", tags: {fake: ok}}
"""
SUCCEED = {"compare", "export", "policies", "run", "runs", "show", "validate"}
MODULES = (
    "sitecustomize",
    "usercustomize",
    "json",
    "pip",
    "runpy",
    "transformers",
    "yaml",
    "filelock",
    "torch",
    "mlflow",
    "sparsebp_cli",
    "psutil",
    "conftest",
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """The working folder, full of traps; each leaves a line in the file ``canary``."""
    canary = tmp_path / CANARY
    (tmp_path / "r.yaml").write_text(RECIPE)
    run_git(tmp_path, "init", "-q")
    run_git(tmp_path, "add", "r.yaml")
    run_git(tmp_path, "commit", "-qm", "m")
    command = f"echo git >> {canary}; cat"
    for key in ("core.fsmonitor", "diff.external", "diff.x.textconv", "diff.x.command", "filter.x.clean", "core.pager"):
        run_git(tmp_path, "config", key, command)
    (tmp_path / ".gitattributes").write_text("* diff=x filter=x\n")
    for hook in ("post-index-change", "post-checkout", "pre-commit"):
        (tmp_path / ".git" / "hooks" / hook).write_text(f"#!/bin/sh\necho hook >> {canary}\n")
        (tmp_path / ".git" / "hooks" / hook).chmod(0o755)
    for module in MODULES:
        trap = f"open({str(canary)!r}, 'a').write('{module}\\n')\n"
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(trap)
    dist = tmp_path / "trap-1.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Name: trap\nVersion: 1\n")
    (dist / "entry_points.txt").write_text("[sparsebp.policies]\ntrap = torch:x\n[sparsebp.targets]\nt = yaml:x\n")
    for name in ("git", "python", "python3", "docker", "ssh", "nvidia-smi"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {canary}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".env").write_text("MLFLOW_TRACKING_URI=http://canary.invalid\nSPARSEBP_HOME=/canary\n")
    (tmp_path / "targets.yaml").write_text("local: {kind: nonsense\n")
    (tmp_path / "pyvenv.cfg").write_text("home = /canary\n")
    (tmp_path / "trap.pth").write_text(f"import os; open({str(canary)!r}, 'a').write('pth')\n")
    (tmp_path / "r.yaml").write_text(RECIPE + "# changed\n")
    return canary


# The first line of each verb of the table, and what goes further than that.
WORDS = {"FAKE": "r.yaml", "RUN": "@1", "OTHER": "@2", "STUDY": "study.yaml", "TEXT": "text"}
LINES = {
    *(" ".join(WORDS.get(word, word) for word in row[0].split()) for row in ROWS.values()),
    *("run r.yaml", "compare @1", "policies", "bench topk --model nothing", "validate r.yaml --probe"),
    *("fetch movie-snippets", "audit r.yaml"),
}


@pytest.mark.parametrize("line", sorted(LINES))
def test_nothing_of_an_unpacked_folder_is_run(line: str, hostile: Path, tmp_path: Path) -> None:
    words = line.split()
    (tmp_path / "study.yaml").write_text(
        "{version: 1, study: s, base: r.yaml, arms: {a: {}, b: {}}, seeds: {report: '0'}}"
    )
    for _ in range(sum("@" in word for word in words)):
        write_run(tmp_path / "r.yaml")
    # The command itself is a console script, which takes no module from the working folder; -P stands for that here.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fake_sparsebp", *words],
        check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path,
        # Relative entries of the search paths are a user's mistake that a child need not repeat.
        env=environment() | {"PATH": f"{os.environ['PATH']}::.", "PIP_NO_INDEX": "1"}
        | SHELL["variables of git"] | SHELL["programs of the user"],
    )  # fmt: skip
    assert not hostile.exists(), hostile.read_text()
    assert "canary" not in (done.stdout + done.stderr).replace(str(tmp_path), "")
    assert "Traceback" not in done.stdout + done.stderr
    if words[0] in SUCCEED and "--probe" not in words:
        assert done.returncode == 0, done.stderr
