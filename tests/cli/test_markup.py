"""Names that look like rich's markup are printed as they are, by every verb that prints a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.table import Table

from sparsebp_audit.report import AuditReport, Finding
from sparsebp_audit.report.report import ModuleWork
from sparsebp_audit.verb.audit_table import print_audit
from sparsebp_cli.cli.display import LiveDisplay
from sparsebp_cli.cli.follow import print_end
from sparsebp_cli.cli.progress import Progress
from sparsebp_cli.cli.screen import console
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.target.contract import CheckResult as Check
from sparsebp_cli.target.local import LocalJob, LocalTarget
from sparsebp_tools.bench import Benchmark, BenchmarkRow
from sparsebp_tools.bench.request import Request
from sparsebp_tools.bench.result import BreakEven
from sparsebp_tools.bench.table import print_benchmark

from .conftest import Cli, Write, write_run

NAMES = {"closes nothing, an error of rich": "[/]", "vanishes or changes": r"[red]x[/red]:skull:\[bold]"}


@pytest.fixture(params=NAMES.values(), ids=NAMES.keys())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell is folded."""
    monkeypatch.setenv("COLUMNS", "500")


@pytest.fixture
def runs(write_recipe: Write, name: str) -> list[RunFolder]:
    """Two runs whose plans and journals hold the name wherever they can."""
    found = [write_run(write_recipe()), write_run(write_recipe(), "policy=dense")]
    proof = {"columns": ["backward_flops"], "modules": {f"{name}.mlp": [1e6]}}
    for number, run in enumerate(found):
        plan = json.loads(run.plan_file.read_bytes())
        plan["recipe"]["name"] = name
        plan["recipe"]["policy"][0] |= {"name": f"p{number}{name}", f"o{name}": name}
        run.plan_file.write_text(json.dumps(plan))
        with JournalWriter(run.path) as journal:
            journal.write("proof", step=3, values=proof)
            journal.write("note", level="warning", text=f"note {name}")
            journal.write("end", status="finished", step=3, text=f"end {name}")
    return found


def test_a_title_a_heading_and_a_cell_are_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    console().print(table)
    console().print(name)
    assert capsys.readouterr().out.count(name) == 4


def test_runs_and_show_print_the_names_in_plans_and_journals(runs: list[RunFolder], name: str, call: Cli) -> None:
    done = call("runs")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f" {name} ") == 2
    assert f"p0{name} " in done.stdout
    assert f"p1{name} " in done.stdout
    done = call("show", runs[0].run_id, "--all")
    assert done.returncode == 0, done.stderr
    for text in (f" {name}.mlp ", f"note {name}", f"end {name}", f"p0{name} "):
        assert text in done.stdout


def test_compare_prints_the_names_in_plans(runs: list[RunFolder], name: str, call: Cli) -> None:
    for run in runs:  # compare reads no plan whose recipe has a name that no recipe can have
        plan = json.loads(run.plan_file.read_bytes())
        plan["recipe"]["name"] = "x"
        run.plan_file.write_text(json.dumps(plan))
    done = call("compare", *(run.run_id for run in runs), "--all")
    assert done.returncode == 0, done.stderr
    assert f"p0{name}" in done.stdout
    assert f"p1{name}" in done.stdout


def test_targets_prints_the_names_and_options_of_the_users_file(
    name: str, call: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "targets.yaml"
    monkeypatch.setenv("SPARSEBP_TARGETS", str(file))
    file.write_text(yaml.safe_dump({f"{number}{name}": {"kind": "local", "worker": name} for number in (1, 2)}))
    done = call("targets")
    assert done.returncode == 0, done.stderr
    for text in (f"1{name} ", f"2{name} ", f"worker: {name}"):
        assert text in done.stdout
    file.write_text(yaml.safe_dump({f"{number}{name}": {"kind": "local"} for number in (1, 2)}))
    found = [Check("ok", f"what {name}", f"text {name}", f"hint {name}")]
    monkeypatch.setattr(LocalTarget, "check", lambda _: found)
    done = call("targets", "check", f"1{name}", f"2{name}")
    assert done.returncode == 0, done.stderr
    for text in (f"1{name}", f"2{name}", f"what {name}", f"text {name}", f"-> hint {name}"):
        assert text in done.stdout


def test_doctor_prints_what_it_found(name: str, call: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Check("warn", f"what {name}", f"text {name}", f"hint {name}")]
    monkeypatch.setattr("sparsebp_cli.cli.checkup.check_all", lambda: found)
    done = call("doctor")
    assert done.returncode == 0, done.stderr
    for text in (f"what {name}", f"text {name}", f"-> hint {name}"):
        assert text in done.stdout


def test_policies_prints_the_words_of_plugins(
    name: str, call: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin_with_markup.py").write_text(f"raise ValueError({f'reason {name}'!r})\n")
    info = tmp_path / "markup-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: markup{name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[sparsebp.policies]\nnamed{name} = plugin_with_markup:Thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = call("policies")
    assert done.returncode == 0, done.stderr
    for text in (f"named{name} ", f"markup{name} 0.1.0", f"reason {name}"):
        assert text in done.stdout


def test_a_refused_resume_prints_the_fields(
    runs: list[RunFolder], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with JournalWriter(runs[0].path) as journal:
        journal.write("attempt", from_step=3, environment={})
        journal.write("end", status="failed", step=3, text="", changes=[[f"f{name}", f"t{name}", f"n{name}"]])
    assert print_end(LocalJob(runs[0])) == 2
    err = capsys.readouterr().err
    for text in (f"f{name} ", f"t{name} ", f"n{name}"):
        assert text in err


def test_an_audit_prints_the_names_of_modules(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = dict.fromkeys(("forward_flops", "backward_flops", "recomputed_flops", "ungraded_flops"), 1e9)
    sizes = dict.fromkeys(("saved_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes"), 10**6)
    shares = dict.fromkeys(("wasted_flops_share", "wasted_bytes_share"), 0.5)
    finding = Finding(
        "frozen", f"title {name}", f"detail {name}", f"advice {name}", True, (f"m{name}",), 1e9, 0.5, 0, 0
    )
    report = AuditReport(
        steps=1, wanted_steps=1, backwards=1, step_seconds=0.5, threshold=0.005, num_below=0, findings=(finding,),
        notes=(f"about {name}",), modules=(ModuleWork(f"m{name}", 1e9, 1e9, 1e9, saved_bytes=1e6),),
        **counts, **sizes, **shares,
    )  # fmt: skip
    print_audit(report)
    out = capsys.readouterr().out
    for text in (f"title {name}: detail {name}", f"where: m{name}", f"to do: advice {name}", f"about {name}"):
        assert text in out
    assert out.count(f"m{name}") == 1


def test_a_benchmark_prints_sites_and_forms(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    quartiles = dict.fromkeys(("median", "low", "high"), 1.0)
    ratios = ("seconds", "ratio", "backward_ratio", "step_ratio", "processor_ratio")
    plain: dict[str, Any] = dict.fromkeys(ratios, quartiles)
    plain |= dict.fromkeys(("forward_flops", "backward_flops", "saved_bytes"), 1)
    plain |= dict.fromkeys(("flops_ratio", "saved_ratio"), 1.0)
    plain |= dict.fromkeys(("ceiling", "realised_share", "peak_bytes", "peak_ratio", "kept_share"))
    row = plain | {"site": f"s{name}", "label": f"l{name}", "execution": "csr", "keep": 0.5, "unit_worth": 2.0}
    even = {
        "site": f"e{name}",
        "label": f"b{name}",
        "against": f"a{name}",
        "kind": "never",
        "smallest": 0.1,
        "largest": 1,
    }
    found = Benchmark(
        request=Request.model_validate({"policy": "topk", "model": {"name": name}, "forms": []}),
        model={"parameters": 1, "dtype": "float32", "device": "cpu"},
        machine={"cpu": name, "threads": 1, "packages": {"torch": "2"}, "load_average": [0.0]},
        rows=[
            BenchmarkRow(**plain, site="", label="plain", execution="dense"),
            BenchmarkRow(**row | {"note": f"note {name}"}),
        ],
        break_evens=[BreakEven.model_validate(even)],
    )
    print_benchmark(found)
    out = capsys.readouterr().out
    for text in (f" at s{name} ", f" l{name} ", f" e{name} ", f" b{name} ", f" a{name} ", f" s{name} "):
        assert text in out


def test_the_picture_of_a_running_run_is_text(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    progress = Progress(name, "0123456789ab", 3)
    with LiveDisplay(progress) as display:
        display.print_text(f"said {name}")
        display.refresh(f"waits {name}")
        console().print(progress.picture(display._spinner))
    out = capsys.readouterr().out
    for text in (f"said {name}", f"waits {name}", name):
        assert text in out
