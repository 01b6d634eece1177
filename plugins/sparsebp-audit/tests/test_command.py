"""``sparsebp audit``: recipes, and any command that trains, without a change to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from sparsebp_audit.report import SCHEMA, AuditReport
from sparsebp_audit.verb.audit import print_next
from sparsebp_cli.cli.app import app
from sparsebp_cli.errors import SparseBPError

ROOT = Path(__file__).parents[3]
Audit = Callable[..., subprocess.CompletedProcess[str]]
N = 8


def _refusal(*words: object) -> str:
    """What one line says that a user reads."""
    result = CliRunner().invoke(app, ["audit", *map(str, words)])
    assert isinstance(result.exception, SparseBPError), result.output
    assert result.exception.exit_code == 2
    return str(result.exception)


def test_a_script_is_watched_and_goes_on_and_what_it_wastes_is_told(script: Path, run_audit: Audit) -> None:
    done = run_audit("--", sys.executable, script, "seven")
    assert done.returncode == 7, done.stderr  # its own exit code
    assert [line for line in done.stdout.splitlines() if line.startswith("step")] == [f"step {n}" for n in range(6)]
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert alone.splitlines()[-1] in done.stdout  # it trained to the same weights
    assert "gradients of parameters that no optimizer holds" in done.stdout
    assert "2 parameters: 0.weight, 0.bias" in done.stdout
    assert "sparsebp audit: step 3 of 3" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_json_is_what_the_committed_schema_says_and_alone_on_standard_output(script: Path, run_audit: Audit) -> None:
    done = run_audit("-o", "json", "--fail-if-waste", "0.01", "--stop", "--", sys.executable, script)
    assert done.returncode == 1
    assert "of the FLOPs or bytes is wasted, allowed 1.00%" in done.stderr
    assert "step 3\n" not in done.stderr  # it was ended after its third step
    content = json.loads(done.stdout)
    jsonschema.validate(content, json.loads((ROOT / "docs" / "audit.schema.json").read_text(encoding="utf-8")))
    report = AuditReport.from_dict(content)
    assert (report.schema, report.steps, report.backwards) == (SCHEMA, 3, 3)
    finding = report.finding("unheld")
    assert finding is not None
    assert finding.flops == 2 * N * (16 * 32 + 32 * 4)
    assert report.to_dict() == AuditReport.from_dict(json.loads(json.dumps(report.to_dict()))).to_dict()


def test_a_script_that_crashes_is_told_as_far_as_it_came_with_its_exit_code(script: Path, run_audit: Audit) -> None:
    done = run_audit("--", sys.executable, script, "crash")
    assert done.returncode == 1
    assert "ValueError: no luck" in done.stderr
    assert "watched 2 steps with 2 backward passes" in done.stdout
    assert "the training ended after 2 of the 3 steps that were asked for" in done.stdout


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("os.fork() or os._exit(0); os.wait(); os._exit(5)", 5, "watched 2 steps with 2 backward passes"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "watched 2 steps with 2 backward passes"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "ended with exit code 137 after 2 of 3 steps"),
    ],
)
def test_a_script_that_ends_without_a_word_is_told_as_far_as_it_came(
    script: Path, run_audit: Audit, ending: str, code: int, said: str
) -> None:
    text = script.read_text(encoding="utf-8").replace('raise ValueError("no luck")', ending)
    script.write_text(f"import os, signal\n{text}", encoding="utf-8")
    done = run_audit("--", sys.executable, script, "crash")
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def test_a_script_that_replaces_the_call_of_modules_is_watched_with_its_own_call(
    script: Path, run_audit: Audit
) -> None:
    """As libraries that trace modules do, after torch is imported and before the first step."""
    lines = (
        "import atexit, torch",
        "calls, plain = [], torch.nn.Module.__call__",
        "def traced(module, *args, **kwargs):",
        "    calls.append(module)",
        "    return plain(module, *args, **kwargs)",
        "torch.nn.Module.__call__ = traced",
        "atexit.register(lambda: print('traced', len(calls) > 6))",
    )
    script.write_text("\n".join([*lines, script.read_text(encoding="utf-8")]), encoding="utf-8")
    done = run_audit("--", sys.executable, script, "seven")
    assert done.returncode == 7, done.stderr
    assert "traced True" in done.stdout
    assert "gradients of parameters that no optimizer holds" in done.stdout


def test_an_environment_without_this_package_is_named(script: Path, run_audit: Audit) -> None:
    gone = (
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'sparsebp_audit':\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
    )
    script.write_text(gone + script.read_text(encoding="utf-8"), encoding="utf-8")
    done = run_audit("--", sys.executable, script)
    assert done.returncode == 2
    assert f"{sys.executable} has no sparsebp-audit: install it into that environment as well" in done.stderr


def test_a_script_whose_libraries_looked_for_torch_early_is_watched(script: Path, run_audit: Audit) -> None:
    look = "from importlib.util import find_spec\nassert find_spec('torch') and find_spec('torch')\n"
    script.write_text(look + script.read_text(encoding="utf-8"), encoding="utf-8")
    done = run_audit("--", sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert "sparsebp audit: step 3 of 3" in done.stderr


def test_commands_that_train_nothing_get_one_clear_line(run_audit: Audit) -> None:
    for code, said in (
        ("import torch; print(torch.ones(1).sum())", "the audit saw no backward pass of "),
        ("print(1)", "ran no Python that imports torch"),
    ):
        done = run_audit("--", sys.executable, "-c", code)
        assert done.returncode == 2
        assert done.stderr.strip().splitlines()[-1].startswith("error: ")
        assert said in done.stderr
    done = run_audit("--", sys.executable, "-I", "-c", "import torch; print(torch.ones(1).sum())")
    assert (done.returncode, "-I, -E and -S disable the audit" in done.stderr) == (2, True)
    done = run_audit("--", sys.executable, "-c", "raise SystemExit(3)")
    assert (done.returncode, "ended with exit code 3 before it could be watched" in done.stderr) == (3, True)


def test_a_launcher_with_two_processes_gives_the_report_of_the_first_rank(tmp_path: Path, run_audit: Audit) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(  # which ends at once: destroying a group of gloo may abort the process (torch 2.11 and 2.13)
        "import os, torch\n"
        "from torch import distributed, nn\n"
        "distributed.init_process_group('gloo')\n"
        "model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.randn(4, 8)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "distributed.barrier()\n"
        "os._exit(0)\n",
        encoding="utf-8",
    )
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    done = run_audit("-o", "json", "--", sys.executable, *launch)
    assert done.returncode == 0, done.stderr[-2000:]
    report = AuditReport.from_dict(json.loads(done.stdout))
    assert (report.steps, report.findings) == (3, ())
    assert {"0", "1"} <= {row.module for row in report.modules}  # the wrapper's name is no part of theirs


def test_a_recipe_is_trained_for_a_few_steps_and_leaves_nothing(
    tmp_path: Path, run_audit: Audit, home_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "audit.html"
    done = run_audit(
        ROOT / "recipes" / "training" / "cmudict-completion.yaml",
        *("--steps", 2, "--set", "training.per_device_train_batch_size=2", "--html", page, "-o", "json"),
        *("--fail-if-waste", 0.9),
    )
    assert done.returncode == 0, done.stderr[-2000:]  # less than the gate allows
    report = AuditReport.from_dict(json.loads(done.stdout))
    assert report.steps == 2
    assert {"ignored-logits", "padding"} <= {finding.kind for finding in report.findings}
    assert "SparseBP audit" in page.read_text(encoding="utf-8")
    assert not (home_folder / "runs").exists()
    print_next(report, None, is_recipe=True)
    assert capsys.readouterr().out == "next: write into the recipe:\n   policy: lossless\n"


def test_what_cannot_be_audited_is_refused_before_anything_starts(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "start" / "quickstart.yaml"
    assert "an audit runs only on this machine: set target to local, got docker" in _refusal(
        recipe, "--set", "target={kind: docker, image: x}"
    )
    assert "an audit watches only one process: set target.processes to 1, got 2" in _refusal(
        recipe, "--set", "target={kind: local, processes: 2}"
    )
    assert "audit takes one recipe, got 2" in _refusal(recipe, recipe)
    assert "--steps must be at most" in _refusal(recipe, "--steps", 10_000)
    assert "--threshold must be a fraction in [0, 1), got 2" in _refusal(recipe, "--threshold", 2)
    assert "must end in .html" in _refusal("--html", "report.pdf", recipe)
    assert "there is no folder" in _refusal("--html", "nowhere/report.html", recipe)
    assert "--set changes keys of a recipe" in _refusal("--set", "a=1", "--", sys.executable, "x.py")
    assert "did you mean: python train.py?" in _refusal("train.py")
    assert "did you mean: bash train.sh?" in _refusal("--", "train.sh")
    with pytest.raises(AssertionError):
        _refusal("--help")


def test_an_error_of_the_recipe_or_of_a_script_is_the_only_complaint(run_audit: Audit, tmp_path: Path) -> None:
    done = run_audit(ROOT / "recipes" / "start" / "python-docs.yaml", "--set", "dataset.format=completion")
    errors = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "audit: "))]
    assert (done.returncode, len(errors)) == (2, 1)
    assert errors[0].startswith("error: the dataset has no column 'prompt'")
    script = tmp_path / "train.py"
    script.write_text("import torch\nraise SystemExit(3)\n", encoding="utf-8")
    done = run_audit("--", sys.executable, script)
    assert (done.returncode, done.stderr.splitlines()[-1].partition(" ended ")[2]) == (
        3,
        "with exit code 3 before its first backward pass",
    )
