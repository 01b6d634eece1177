"""What every verb promises: exit codes, errors in one line, and nothing heavy imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from sparsebp_cli.cli.app import VERBS as PANELS
from sparsebp_cli.cli.verb_help import REMOVED
from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.run import State, interpreter, list_runs

from .conftest import Cli, Write, write_run

WIDTH = 100
VERBS = (
    *("run", "study", "resume", "cancel", "logs", "compare", "runs", "show", "sync", "prune", "rm"),
    *(
        "validate",
        "schema",
        "policies",
        "doctor",
        "quickstart",
        "init",
        "new",
        "recipes",
        "models",
        "datasets",
        "fetch",
    ),
)
HEAVY = ("torch", "mlflow", "transformers", "scipy", "matplotlib", "pandas", "numpy")
PROBE = """
import sys
from sparsebp_cli.cli.app import main
sys.argv = ["sparsebp", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    code = end.code
heavy = [name for name in {heavy!r} if name in sys.modules]
print("HEAVY", heavy, "CODE", code, file=sys.stderr)
"""


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_within_100_columns(call: Cli, verb: str) -> None:
    done = call(verb, "--help")
    assert done.returncode == 0
    assert f"Usage: sparsebp {verb}" in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= WIDTH


def test_help_lists_the_eight_verbs_of_everyday_work_first_and_the_rest_as_more(call: Cli) -> None:
    first, *others = PANELS
    assert len(PANELS[first]) == 8
    assert all(panel.startswith("More") for panel in others)
    shown = call("--help").stdout
    assert shown.index(first) < min(shown.index(panel) for panel in others)


def test_help_names_every_verb_and_the_exit_codes(call: Cli) -> None:
    shown = call("--help").stdout
    assert [verb for verb in VERBS if f" {verb} " not in shown] == []
    codes = " ".join(shown.replace("│", " ").split()).partition("Exit codes: ")[2]
    known = {kind.exit_code for kind in _errors(SparseBPError)}
    assert {int(number) for number in re.findall(r"\b\d+\b", codes)} == known | {0, 1, 10, 12, 103, 130, 143}


def _errors(kind: type[SparseBPError]) -> list[type[SparseBPError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _errors(child))]


@pytest.mark.parametrize("verb", [verb.__name__ for group in PANELS.values() for verb in group])
def test_help_shows_no_type_of_python(call: Cli, verb: str) -> None:
    shown = call(verb, "--help").stdout
    assert "inspect" not in shown
    assert not re.search(r"<(class|bool|str|int|float|path|Path|list\b)|\b(TEXT|INTEGER|FLOAT|PATH)\b", shown)


@pytest.mark.parametrize(
    ("verb", "option", "default"),
    [("compare", "--metric", "eval/loss"), ("init", "--model", "austen-llama"), ("new", "DIR", "sparsebp-NAME")],
)
def test_help_shows_a_default_that_is_found_later(call: Cli, verb: str, option: str, default: str) -> None:
    rest = call(verb, "--help").stdout.partition("Arguments")[2].partition(option)[2]
    assert f"[default: ({default})]" in " ".join(rest.replace("│", " ").split())


@pytest.mark.parametrize("words", [["policies"], ["recipes"], ["targets"], ["runs"], ["show", "@last"]])
def test_no_line_of_a_listing_is_too_long(call: Cli, two_runs: None, words: list[str], tmp_path: Path) -> None:
    shown = call(*words).stdout.replace(str(tmp_path), "")  # a path is as long as it is
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= WIDTH


def test_no_word_in_the_table_of_policies_is_broken(call: Cli) -> None:
    assert {"memory,", "selective-backprop", "ParameterSelector"} <= set(call("policies").stdout.split())


def test_the_list_says_of_each_policy_what_it_can_promise_and_save(call: Cli) -> None:
    listed = json.loads(call("policies", "-o", "json").stdout)["policies"]
    lines = {line["name"]: line for line in listed}
    assert {name: lines[name]["exact"] for name in ("lossless", "tokens", "topk", "gact")} == {
        "lossless": True, "tokens": None, "topk": False, "gact": False,
    }  # fmt: skip
    assert lines["gact"]["unbiased"] is not False
    assert (lines["gact"]["kind"], lines["gact"]["card"]["year"]) == ("InputSaver", 2022)
    assert "memory" in lines["gact"]["card"]["saves"]


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).with_name("sparsebp")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"sparsebp {version('sparsebp')}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["validate", "fake.yaml"],
        ["run", "fake.yaml", "--dry-run"],
        ["runs"],
        ["show", "@last"],
        ["schema"],
        ["policies"],
        ["recipes"],
        ["new", "policy", "peak-rows"],
        ["init", "--task", "completion"],
        ["logs", "@last"],
        ["cancel", "@last"],
        ["resume", "@last"],
    ],
    ids=lambda words: words[0],
)
def test_nothing_heavy_is_imported(write_recipe: Write, tmp_path: Path, words: list[str]) -> None:
    recipe = write_recipe()
    write_run(recipe)
    probe = PROBE.format(heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", probe, *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stderr.splitlines()[-1] == "HEAVY [] CODE 0"


def test_help_loads_no_recipe_and_no_policy(tmp_path: Path) -> None:
    """Their records take a third of the time of `--help`, and of every verb that reads none."""
    probe = PROBE.format(heavy=(*HEAVY, "sparsebp_cli.recipe", "sparsebp_cli.policy", "sparsebp_cli.source"))
    done = subprocess.run(
        [sys.executable, "-c", probe, "--help"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stderr.splitlines()[-1] == "HEAVY [] CODE 0"


def test_compare_imports_neither_torch_nor_mlflow(two_runs: None, tmp_path: Path) -> None:
    probe = PROBE.format(heavy=("torch", "mlflow", "transformers", "matplotlib", "pandas"))
    done = subprocess.run(
        [sys.executable, "-c", probe, "compare", "@2"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stderr.splitlines()[-1] == "HEAVY [] CODE 0"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["show", "topk-row"], 102, "did you mean topk-rows?"),
        (["show", "@9"], 102, "@9: there are 2 runs; use @last or @N with N from 1 to 2"),
        (["logs", "zzz"], 102, "no run matches 'zzz'"),
        (["cancel", "zzz"], 102, "no run matches 'zzz'"),
        (["resume", "zzz"], 102, "no run matches 'zzz'"),
        (["compare", "zzz"], 102, "no run matches 'zzz'"),
        (["sync", "zzz"], 102, "no run matches 'zzz'"),
        (["compare", "@2", "--metric", "eval/los"], 2, "did you mean eval/loss?"),
        (["compare", "@2", "--baseline", "dens"], 2, "did you mean dense?"),
        (["sync"], 2, "sync needs runs, or --all"),
        (["sync", "@last", "--all"], 2, "sync needs runs, or --all"),
        (["run", "none.yaml"], 2, "none.yaml: no such file"),
        (["run", "dense.yaml", "training.seed=1"], 2, "no such file; to set a key give --set training.seed=1"),
        (["train", "dense.yaml"], 2, "No such command: train; `sparsebp --help` lists the commands; did you mean run?"),
        (["status"], 2, "did you mean runs?"),
        (["run", "dense.yaml", "--seeds", "4-0"], 2, "did you mean 0-4?"),
        (["run", "dense.yaml", "--set", "trainig.seed=1"], 2, "did you mean training"),
        (["run", "dense.yaml", "--set", "policy.0.name=topkk"], 2, "did you mean topk?"),
        (["validate", "dense.yaml", "--set", "policy.0.keep=2"], 2, "got 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_an_exit_code(
    call: Cli, two_runs: None, words: list[str], code: int, text: str
) -> None:
    done = call(*words)
    assert done.returncode == code
    assert text in done.stderr
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("words", [["run"], ["fly"], ["runs", "--limit", "0"], ["runs", "-o", "xml"]])
def test_wrong_usage_ends_with_2(call: Cli, words: list[str]) -> None:
    done = call(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", REMOVED)
def test_a_removed_verb_names_what_does_its_work_now(call: Cli, verb: str) -> None:
    done = call(verb, "one", "two")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: `sparsebp {verb}` was removed: {REMOVED[verb]}\n"


def test_an_unforeseen_error_is_one_line_and_its_traceback_is_kept(cli: Cli, home_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sparsebp_cli.cli.runs as verb\n"
        "def broken():\n    raise ValueError('the moon\\nis full')\n"
        "verb.list_runs = broken\n"
    )
    done = cli("runs", real=True, PYTHONPATH=str(tmp_path))
    assert done.returncode == 100
    log = home_folder / "error.log"
    assert done.stderr == (
        f"error: ValueError: the moon is full (the traceback is in {log}; `--debug` before the verb shows it)\n"
    )
    assert "Traceback" in log.read_text()
    assert "Traceback" in cli("--debug", "runs", real=True, PYTHONPATH=str(tmp_path)).stderr


@pytest.mark.parametrize("use", ["raise MemoryError", "bytearray(1 << 62)", "import numpy; numpy.empty(1 << 57)"])
def test_memory_that_is_used_up_is_one_line_without_a_traceback(
    cli: Cli, home_folder: Path, tmp_path: Path, use: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sparsebp_cli.cli.runs as verb\ndef use():\n    {use}\nverb.list_runs = use\n"
    )
    done = cli("runs", real=True, PYTHONPATH=str(tmp_path))
    assert done.returncode == 100
    assert re.fullmatch(r"error: out of memory(: [^\n]+)?; end other programs, [^\n]*\n", done.stderr)
    assert not (home_folder / "error.log").exists()
    assert "Traceback" in cli("--debug", "runs", real=True, PYTHONPATH=str(tmp_path)).stderr


def test_a_working_folder_that_was_deleted_is_named(cli: Cli, write_recipe: Write, tmp_path: Path) -> None:
    recipe = write_recipe()
    main = "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); "
    main += "from sparsebp_cli.cli.app import main; main()"
    for words, code in ((["run", str(recipe)], 100), (["runs"], 0)):
        done = subprocess.run(
            [sys.executable, "-c", main, *words], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert done.returncode == code
        told = "error: the working folder of this shell was deleted: cd to another folder\n"
        assert done.stderr == (told if code else "")


def test_a_home_that_cannot_be_written_is_one_line(cli: Cli, write_recipe: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = cli("run", write_recipe(), SPARSEBP_HOME=str(tmp_path / "file" / "home"))
    assert done.returncode == 100
    assert re.fullmatch(r"error: [^\n]*Not a directory[^\n]*\n", done.stderr)


def test_output_into_a_closed_pipe_is_no_traceback(two_runs: None, tmp_path: Path) -> None:
    line = f"{sys.executable} -c 'from sparsebp_cli.cli.app import main; main()' schema | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_runs_lists_the_newest_first_within_100_columns(call: Cli, two_runs: None) -> None:
    done = call("runs")
    assert next(word for word in done.stdout.split() if word in {"topk-rows", "dense"}) == "dense"
    assert "topk keep=0.1" in done.stdout
    assert "3/3" in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= WIDTH
    assert "1 older runs are not shown" in call("runs", "--limit", "1").stdout


def test_runs_as_json_can_be_read_by_a_program(call: Cli, two_runs: None) -> None:
    lines = json.loads(call("runs", "-o", "json").stdout)["runs"]
    assert [line["name"] for line in lines] == ["dense", "topk-rows"]
    assert {line["state"] for line in lines} == {State.FINISHED.value}


def test_no_runs_yet_says_what_to_do(call: Cli) -> None:
    assert "`sparsebp run RECIPE` makes one" in call("runs").stdout
    assert json.loads(call("runs", "-o", "json").stdout)["runs"] == []


def test_a_damaged_plan_does_not_hide_the_other_runs(call: Cli, two_runs: None) -> None:
    list_runs()[0].plan_file.write_text("{")
    states = {line["state"] for line in json.loads(call("runs", "-o", "json").stdout)["runs"]}
    assert states == {"damaged", "finished"}


def test_validate_says_what_a_recipe_would_do(call: Cli, write_recipe: Write) -> None:
    good, bad = write_recipe(name="good"), write_recipe(name="bad")
    bad.write_text(bad.read_text() + "extra: 1\n")
    done = call("validate", good, bad, "--seeds", "0-4")
    assert done.returncode == 2
    policy = "policy topk keep=0.1"
    first, *unknown = done.stdout.splitlines()
    assert first == f"ok {good}: good: model none, data none, {policy}, 30 steps, 5 runs"
    assert [line.partition("; searched")[0] for line in unknown] == [
        f"   not checked here: {key}: none is not on this machine; the hub may have it"
        for key in ("model.name", "dataset.name")
    ]
    assert done.stderr.startswith(f"error: {bad}:8:1: extra: ")


def test_validate_says_that_the_gpu_is_not_here(
    call: Cli, write_recipe: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsebp_cli.target.local.list_gpus", list)
    done = call("validate", write_recipe(), "--set", "target.device=cuda")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].endswith("nvidia-smi lists no GPU on this machine: the run would fail")
    monkeypatch.setattr("sparsebp_cli.target.local.list_gpus", lambda: ["one"])
    assert "nvidia-smi" not in call("validate", write_recipe(), "--set", "target.device=cuda").stdout


def test_validate_with_probe_prints_what_a_step_costs_and_what_choosing_may_gain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sparsebp_cli.cli.validate import validate

    file = tmp_path / "probed.yaml"
    file.write_text("version: 1\nmodel: {name: austen-llama}\ndataset: {name: python-docs}\n")
    of_data = "print('{\"warnings\": []}')"
    for told, shown in (
        ({"lines": ["cost: 0.45 dense steps"], "values": {}}, "\n   cost: 0.45 dense steps\n"),
        ({"error": "no such split", "code": 2}, "probed.yaml: no such split\n"),
    ):
        said = f"print('a library'); print({json.dumps(told)!r})"
        monkeypatch.setattr(
            interpreter,
            "command",
            lambda *words, said=said: [sys.executable, "-c", said if words[1].endswith(".preview") else of_data],
        )
        if "error" in told:
            with pytest.raises(typer.Exit):
                validate([file], probe=True)
        else:
            validate([file], probe=True)
        captured = capsys.readouterr()
        assert shown in captured.out + captured.err


@pytest.mark.parametrize(("word", "told"), [("runs", ""), ("policies", "topk"), ("--version", "sparsebp ")])
def test_the_command_itself_starts_in_a_home_that_is_not_there_yet(
    cli: Cli, tmp_path: Path, word: str, told: str
) -> None:
    """In a process of its own: what this one has imported may hide that the command cannot start."""
    done = cli(word, real=True, SPARSEBP_HOME=str(tmp_path / "fresh"))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert told in done.stdout
