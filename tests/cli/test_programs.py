"""Every verb answers programs: one document on standard output that keeps its schema, whatever happens."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import sparsebp_cli.cli.epochs
import sparsebp_cli.cli.validate
import sparsebp_cli.cli.worker_answer
import sparsebp_cli.cli.worker_process
import sparsebp_cli.target
import sparsebp_cli.tracking
from benchmarks import house
from sparsebp_audit.report import AuditReport
from sparsebp_audit.verb import audit_process
from sparsebp_cli.cli.answer import wants_json
from sparsebp_cli.cli.answer.kind import KINDS
from sparsebp_cli.cli.app import VERBS
from sparsebp_cli.cli.exit_code import EXIT_CODES
from sparsebp_cli.errors import SparseBPError, did_you_mean, find_nearest
from sparsebp_cli.run import RunFolder, manifest
from sparsebp_cli.source.bundled import austen_llama
from sparsebp_tools.bench import Benchmark
from tests.judge.here import HereDriver
from tests.judge.here import write_recipe as write_judged

from .conftest import Cli, Write, environment, write_run
from .document import read_document, validator
from .fake_sparsebp import make_fake
from .test_rerun import seal_run

ROOT = Path(__file__).parents[2]
NAMES = [verb.__name__ for group in VERBS.values() for verb in group]
SPLIT = {"rows": 4, "examples": 4, "dropped": {}, "cut": 0, "cut_reasons": {}, "tokens": 40, "targets": 20}
SPLIT |= {"target_share": 0.5, "duplicates": 0, "classes": {}, "left_over_tokens": 0, "unused_examples": 0}
SPLIT |= {"lengths": dict.fromkeys(("shortest", "quarter", "median", "three_quarters", "longest"), 10)}
CENSUS = {"splits": {"train": SPLIT}, "shared": {}, "warnings": [["info", "data: fine"]]}
CENSUS |= {"first": {"train": [{"ids": [1], "tokens": ["a"], "trained": [True], "parts": [["a", True]]}]}}
INTERVAL = {"value": 1.0, "low": float("-inf"), "high": 1.5}
POLICY = {
    "name": "topk",
    "verdict": "could",
    "dense_batch": 2.0,
    "dense_batch_curved": None,
    "remembers": False,
    "as_at_step": None,
    "by_part": {},
}
POLICY |= dict.fromkeys(
    ("price", "noise", "noise_plain", "bias", "product", "noise_curved", "product_all_directions", "rate"), INTERVAL
)
WORTH = {"format": 1, "recipe": "fake", "steps": [1], "batch": 4, "batches": 6, "examples": 4, "metric": "adam"}
WORTH |= {"dense_step_flops": 1e9, "policies": [POLICY], "left_out": [{"name": "vcas", "why": "needs rows"}]}
TASK = {"version": 1.0, "hash": "ab", "examples": 4, "values": {"acc": {"value": 0.5, "better": "higher"}}}
EVALUATION = {"version": "0.4.13", "tasks": {"colours": TASK | {"scores": {"acc": [1.0]}}}}
BENCHMARK = ROOT / "benchmarks" / "results" / "elements-cpu.json"
AUDIT = dict.fromkeys(
    (
        *("steps", "wanted_steps", "backwards", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "num_below"),
        *("forward_flops", "backward_flops", "recomputed_flops", "ungraded_flops", "saved_bytes", "step_seconds"),
        *("threshold", "wasted_flops_share", "wasted_bytes_share"),
    ),
    1,
) | {"findings": [], "notes": ["nothing"], "modules": []}
# Each verb with a kind that it answers with. `forecast` and `rebuilt` need more, which is there in
# test_forecast.py and study/test_rebuild.py.
CASES: list[tuple[str, str]] = [
    ("quickstart --set tracking.uri=sqlite:////dev/null/m.db --set training.max_steps=3", "outcomes"),
    ("init folder --task completion", "files"),
    ("new policy peak-rows", "files"),
    ("recipes", "recipes"),
    ("recipes copy topk-rows copied", "files"),
    ("run fake.yaml", "outcomes"),
    ("run fake.yaml --dry-run", "plans"),
    ("study study.yaml --dry-run", "study"),
    ("resume one", "outcomes"),
    ("rerun one", "outcomes"),
    ("cancel one", "outcomes"),
    ("logs one", "log"),
    ("tag one good", "labels"),
    ("archive one two --to two.tar.gz", "archive"),
    ("prune --dry-run", "freed"),
    ("compare one two", "comparison"),
    ("judge topk --set policy.0.keep=0.25 --against base.yaml --budget 1e15", "judgement"),
    ("evaluate two --lm-eval colours", "evaluation"),
    ("model two", "model"),
    ("runs --columns training.learning_rate", "runs"),
    ("show one", "run"),
    ("sync one", "sent"),
    ("validate fake.yaml nowhere.yaml", "checked-recipes"),
    ("worth fake.yaml", "worth"),
    ("data fake.yaml", "data"),
    ("export fake.yaml -f sbatch", "export"),
    ("schema --all", "schemas"),
    ("policies", "policies"),
    ("models", "assets"),
    ("datasets", "assets"),
    ("fetch movie-snippets", "fetched"),
    ("doctor", "checks"),
    ("audit fake.yaml", "audit"),
    ("bench topk --rounds 1", "benchmark"),
    ("targets", "targets"),
    ("targets check local", "checks"),
    ("rm one --yes", "freed"),
    ("show nosuch", "error"),
]


STARTING = {"quickstart", "run", "rerun", "doctor"}  # processes


@pytest.fixture
def machine(write_recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunFolder]:
    """Two finished runs and a study; a worker that trains nothing, and one that measures what is written here."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setattr(sparsebp_cli.target, "make_target", make_fake)
    measured = {"sparsebp_lab.worth": WORTH, "sparsebp_tools.harness": EVALUATION}
    measured["sparsebp_tools.bench"] = Benchmark.model_validate_json(BENCHMARK.read_text(encoding="utf-8")).model_dump()
    monkeypatch.setattr(sparsebp_cli.cli.worker_process, "measure_apart", lambda module, _: dict(measured[module]))
    # Each module that has a name of its own for it, or else takes this one for good when it is imported first here.
    for module in (sparsebp_cli.cli.worker_answer, sparsebp_cli.cli.validate, sparsebp_cli.cli.epochs):
        monkeypatch.setattr(module, "ask_worker", lambda *_: dict(CENSUS))
    monkeypatch.setattr(audit_process, "run_audited", give_report)
    monkeypatch.setattr("sparsebp_tools.asset.fetched.fetch", lambda asset: tmp_path / asset.name)
    write_recipe()
    (tmp_path / "study.yaml").write_text(
        "version: 1\nstudy: tiny\nbase: fake.yaml\narms: {dense: {}, topk: {policy: [{name: topk, keep: 0.5}]}}\n"
        "vary: {training.learning_rate: [5e-4, 1e-3]}\nseeds: {tune: [0], report: 1-2}\n"
    )
    runs = [seal_run(write_run(write_recipe(name="one"))), write_run(write_recipe(name="two"), "policy=dense")]
    (runs[1].path / "model").mkdir()
    return runs


def give_report(*arguments: Any, quiet: bool) -> audit_process.AuditedCommand:
    assert quiet  # the command's output is no part of the document
    print("the trained command says something")
    report = AuditReport.from_dict(dict(AUDIT))
    arguments[-1](report)
    return audit_process.AuditedCommand(0, report)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case[0].split()[0] in STARTING else [], id=case[0])
        for case in CASES
    ],
)
def test_every_verb_answers_with_one_document_that_keeps_its_schema(
    call: Cli, machine: list[RunFolder], words: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if words.startswith("judge"):
        write_judged(tmp_path)
        monkeypatch.setattr("sparsebp_lab.judge.recipe_arms.Driver", HereDriver)
    elif words.startswith("model"):
        shutil.copytree(austen_llama(), machine[1].path / "model", dirs_exist_ok=True)
        manifest.write_manifest(machine[1].path / "model")
    done = call(*words.split(), "-o", "json")
    document = read_document(done.stdout)
    assert document["kind"] == kind, done.stderr
    assert done.returncode in EXIT_CODES
    assert done.returncode == 0 or kind in {"error", "sent", "checked-recipes", "checks", "judgement"}, done.stderr


@pytest.mark.inventory
def test_no_verb_and_no_kind_is_left_out() -> None:
    assert {words.split()[0] for words, _ in CASES} == set(NAMES)
    told = {(words.split()[0], kind) for words, kind in CASES if kind != "error"}
    told |= {
        ("validate", "forecast"),
        ("study", "rebuilt"),
        ("run", "outcomes"),
    }
    assert told == {(verb, kind.name) for kind in KINDS for verb in kind.verbs}


@pytest.mark.parametrize("verb", NAMES)
def test_a_mistake_is_a_document_too(call: Cli, verb: str) -> None:
    done = call(verb, "--no-such-option", "-o", "json")
    assert done.returncode == 2
    assert read_document(done.stdout)["error"]["type"] == "UsageError"
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("show topk-row", {"type": "RunNotFoundError", "exit_code": 102, "nearest": "topk-rows"}),
        ("compare @2 --metric eval/los", {"exit_code": 2, "nearest": "eval/loss"}),
        ("policies topq", {"type": "PolicyError", "nearest": "topk"}),
        ("run dense.yaml --set trainig.seed=1", {"key": "trainig", "nearest": "training"}),
        ("run dense.yaml --set policy.0.name=topkk", {"key": "policy.0.name", "nearest": "topk"}),
        ("run dense.yaml --sedes 1", {"nearest": "--seeds"}),
        ("compar", {"nearest": "compare"}),
        ("targets check loca", {"nearest": "local"}),
        ("rm dense", {"nearest": None, "exit_code": 2}),
        ("init somewhere", {"exit_code": 2}),
    ],
)
def test_an_error_has_its_facts_apart(call: Cli, two_runs: None, words: str, expected: dict[str, object]) -> None:
    done = call(*words.split(), "-o", "json")
    error = read_document(done.stdout)["error"]
    assert {key: error[key] for key in expected} == expected
    assert done.returncode == error["exit_code"]


def test_an_error_of_a_recipe_has_file_line_and_key(call: Cli, write_recipe: Write) -> None:
    bad = write_recipe(name="bad")
    bad.write_text(bad.read_text() + "extra: 1\n")
    error = read_document(call("run", bad, "-o", "json").stdout)["error"]
    assert (error["file"], error["line"], error["column"], error["key"]) == (str(bad), 8, 1, "extra")


def test_a_run_that_is_no_longer_the_same_says_in_what(call: Cli, write_recipe: Write) -> None:
    run = seal_run(write_run(write_recipe()), torch="1.0")
    error = read_document(call("rerun", run.run_id, "-o", "json").stdout)["error"]
    assert [change["field"] for change in error["changes"]] == ["code.torch"]
    assert error["changes"][0]["then"] == '"1.0"'


def test_a_defect_is_a_document_too(call: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ValueError("the moon\nis full")

    monkeypatch.setattr("sparsebp_cli.cli.runs.list_runs", broken)
    done = call("runs", "-o", "json")
    assert done.returncode == 100
    error = read_document(done.stdout)["error"]
    assert error["type"] == "Crash"
    assert error["text"].startswith("ValueError: the moon is full (the traceback is in ")


@pytest.mark.slow
def test_several_runs_have_an_outcome_each_and_the_first_failure_decides(
    call: Cli, machine: list[RunFolder], write_recipe: Write
) -> None:
    good, bad = write_recipe(name="good"), write_recipe("fail", name="bad")
    done = call("run", good, bad, "-o", "json")
    outcomes = read_document(done.stdout)["runs"]
    assert [(one["run"]["name"], one["run"]["state"], one["exit_code"]) for one in outcomes] == [
        ("good", "finished", 0),
        ("bad", "failed", 100),
    ]
    assert done.returncode == 100
    assert "the fake broke" in outcomes[1]["text"]


@pytest.mark.slow
def test_what_an_answer_says_next_works(call: Cli, machine: list[RunFolder], write_recipe: Write) -> None:
    write_recipe("slow", name="slow")
    started = read_document(call("run", "slow.yaml", "--detach", "-o", "json").stdout)
    (command,) = started["next"]
    run = started["runs"][0]["run"]["run_id"]
    assert command == f"sparsebp logs {run} --follow"
    assert read_document(call("cancel", run, "-o", "json").stdout)["runs"][0]["run"]["state"] == "cancelled"
    assert read_document(call(*command.split()[1:], "-o", "json").stdout)["run"]["state"] == "cancelled"
    (command,) = read_document(call("run", "fake.yaml", "-o", "json").stdout)["next"]
    assert read_document(call(*command.split()[1:], "-o", "json").stdout)["kind"] == "run"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("runs -o json", True),
        ("runs --output json", True),
        ("runs --output=json", True),
        ("runs -ojson", True),
        ("logs @last -fo json", True),
        ("runs", False),
        ("runs -o table", False),
        ("runs -o json --help", False),
        ("audit -- train.py -o json", False),
        ("audit -o json -- train.py", True),
        ("archive @last --to o json", False),
        ("note @last json", False),
    ],
)
def test_words_that_ask_for_json(words: str, wanted: bool) -> None:
    assert wants_json(words.split()) is wanted


@pytest.mark.parametrize(
    "name", ["topk", "eval/loss", "--seeds", "my run", "a;b", "training.max_steps", "so?", "who? me"]
)
def test_the_nearest_name_is_read_as_it_was_written(name: str) -> None:
    assert find_nearest(f"unknown 'x'{did_you_mean(name + 'x', [name, 'quite another'])}; and more") == name
    assert find_nearest("unknown 'x'") is None


@pytest.mark.inventory
def test_every_exit_code_of_the_code_is_in_the_table() -> None:
    def walk(kind: type[SparseBPError]) -> set[int]:
        return {kind.exit_code}.union(*map(walk, kind.__subclasses__()))

    found = walk(SparseBPError)
    verbs = [ROOT / package / place for package in house.PACKAGES for place in ("cli", "verb")]
    for file in (file for folder in verbs for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and re.search(r"\b(Exit|exit|SystemExit)$", ast.unparse(node.func)):
                given = (one.value for one in node.args if isinstance(one, ast.Constant))
                found |= {value for value in given if isinstance(value, int)}
    assert found <= set(EXIT_CODES)
    assert found >= {2, 100, 102, 104}  # the search finds them


@pytest.mark.inventory
def test_every_schema_describes_every_field() -> None:
    for kind in KINDS:
        schema = validator(kind.name).schema
        assert isinstance(schema, dict)
        assert schema.get("description"), kind.name
        if kind.record.startswith("sparsebp_cli.cli.answer"):
            fields = schema["properties"].items()
            assert [name for name, field in fields if name != "kind" and not field.get("description")] == [], kind.name


# A client that knows a page, and nothing else.

ROW = re.compile(r"^\| `(sparsebp .*)` \| `([\w-]+)` \| (\d+) \| (?:`(\w+)`)? ?\| (?:`(.+)`)? ?\|$", re.MULTILINE)
PAGES = ("docs/guide/tracking.md", "sparsebp_cli/cli/starter/skill/SKILL.md")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_client_that_knows_nothing_but_the_page_gets_through(
    call: Cli, write_recipe: Write, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setattr(sparsebp_cli.target, "make_target", make_fake)
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = ROW.findall(text)
    assert len(rows) == text.count("| `sparsebp ") > 10  # every row is read
    values: dict[str, Any] = {}
    for command, kind, code, name, path in rows:
        words = command.replace("RECIPE", str(write_recipe())).format(**values).split()
        done = call(*words[1:])
        assert done.returncode == int(code), (command, done.stderr)
        document = read_document(done.stdout)
        assert document["kind"] == kind, command
        if name:
            values[name] = follow(document, path)
    assert values.get("state", "finished") == "finished"
    assert values.get("meant") in {"training", "--seeds"}


def follow(document: Any, path: str) -> Any:
    """Return the value at a path: keys with dots between them, numbers for places in lists."""
    for part in path.split("."):
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def test_the_skill_has_the_front_matter_that_agents_read(call: Cli) -> None:
    import yaml

    assert call("schema", "--skill", "-o", "json").returncode == 2
    shown = call("schema", "--skill").stdout
    assert shown == (ROOT / PAGES[1]).read_text(encoding="utf-8")
    _, front, body = shown.split("---\n", 2)
    matter = yaml.safe_load(front)
    assert set(matter) == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9-]{1,64}", matter["name"])
    assert 0 < len(matter["description"]) <= 1024
    assert len(body.splitlines()) < 500
