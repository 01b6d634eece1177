"""``sparsebp bench`` as a process, with the real worker on a tiny model: one round, every form."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sparsebp_cli.backward.linear import function
from sparsebp_tools.bench import Benchmark, BenchmarkRow

pytestmark = pytest.mark.xdist_group("bench")  # fixtures of this file take long: one process makes them

CLI = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()", "bench"]
RECIPE = """\
version: 1
name: tiny
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
  tokenizer: austen-llama
dataset: {name: austen, max_seq_length: 32}
backward: {exclude: ["lm_head"]}
training: {per_device_train_batch_size: 3}
target: {threads: 1, device: cpu}
"""


def _bench(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [*CLI, *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a recipe, and what was measured of ``topk`` with it."""
    place = tmp_path_factory.mktemp("bench")
    (place / "tiny.yaml").write_text(RECIPE)
    options = ["--recipe", "tiny.yaml", "--rounds", 2, "--out", "topk.json"]
    done = _bench(place, "topk", *options)
    assert done.returncode == 0, done.stderr
    (place / "table.txt").write_text(done.stdout)
    return place


@pytest.fixture(scope="module")
def found(folder: Path) -> Benchmark:
    """The same, read strictly: unknown keys, and numbers that are not finite, are refused."""
    return Benchmark.model_validate_json((folder / "topk.json").read_bytes(), strict=False)


def _row(found: Benchmark, site: str, label: str, keep: float | None = None) -> BenchmarkRow:
    (row,) = (row for row in found.rows if (row.site, row.label, row.keep) == (site, label, keep))
    return row


def test_the_table_fits_a_hundred_columns_and_names_every_form(folder: Path, found: Benchmark) -> None:
    table = (folder / "table.txt").read_text()
    assert max(map(len, table.splitlines())) <= 100
    for row in found.rows:
        assert row.label in table
    for text in ("at linears", "plain PyTorch", "is faster than"):
        assert text in table


def test_every_form_was_measured_at_every_share_in_every_round(found: Benchmark) -> None:
    forms = {(form.site, form.label, keep) for form in found.request.forms for keep in form.keeps}
    rows = [(row.site, row.label, row.keep) for row in found.rows if row.execution != "dense"]
    assert len(rows) == len(set(rows))
    assert set(rows) == forms
    assert {len(row.passes) for row in found.rows} == {2}
    assert [row.label for row in found.rows[:2]] == ["plain PyTorch", "dense, engine"]


def test_the_request_is_the_recipes(found: Benchmark) -> None:
    request = found.request
    assert (request.batch, request.length, request.threads, request.exclude) == (3, 32, 1, ("lm_head",))
    assert found.model["class"] == "LlamaForCausalLM"
    assert found.machine["threads"] == 1
    assert found.command == "sparsebp bench topk --recipe tiny.yaml --rounds 2 --out topk.json"


def test_what_is_executed_falls_with_the_share_and_matches_what_the_ceiling_allows(found: Benchmark) -> None:
    plain = found.rows[0]
    total = plain.forward_flops + plain.backward_flops
    for site, label in (("linears", "rows"), ("linears", "elements csr")):
        rows = [_row(found, site, label, keep) for keep in (0.5, 0.25, 0.1)]
        flops = [row.backward_flops for row in rows]
        assert flops == sorted(set(flops), reverse=True), label
        for row in rows:
            assert row.ceiling is not None
            executed = total / (row.forward_flops + row.backward_flops)
            assert executed == pytest.approx(row.ceiling, rel=0.06), (label, row.keep)
            assert row.realised_share == pytest.approx(
                (1 - row.ratio.median) / (1 - 1 / row.ceiling), rel=1e-2, abs=1e-3
            )


def test_masked_entries_and_the_engine_without_a_policy_leave_nothing(found: Benchmark) -> None:
    for row in found.rows:
        if row.execution == "masked" or row.label == "dense, engine":
            assert row.flops_ratio == pytest.approx(1.0, abs=1e-3)
            assert row.realised_share is None


def test_kept_shares_are_what_was_asked_for(found: Benchmark) -> None:
    for row in found.rows:
        if row.keep is not None:
            rounding = 0.1 if row.label == "blocks" else 0.02  # a gradient of six blocks has no quarter
            assert row.kept_share == pytest.approx(row.keep, abs=rounding), (row.label, row.keep)


def test_what_a_kept_unit_must_be_worth_is_its_cost_over_the_share_kept(folder: Path, found: Benchmark) -> None:
    plain = found.rows[0]
    for row in found.rows:
        executed = row.forward_flops + row.backward_flops
        assert row.cost_ratio == pytest.approx(executed / (plain.forward_flops + plain.backward_flops), abs=1e-3)
        if row.execution == "dense":
            assert row.unit_worth is None
        else:
            assert row.kept_share is not None
            assert row.unit_worth == pytest.approx(row.cost_ratio / row.kept_share, rel=1e-2)
    quarter = _row(found, "linears", "rows", 0.25)
    assert quarter.unit_worth is not None
    table = (folder / "table.txt").read_text()
    assert re.search(rf"^ *linears +rows +.* {quarter.unit_worth:.3g} at 0\.25", table, re.MULTILINE)
    assert "sparsebp validate --probe RECIPE" in table


def test_memory_is_counted_both_ways(found: Benchmark) -> None:
    assert {row.saved_ratio for row in found.rows if row.execution == "dense"} == {1.0}
    gradients = 4 * found.model["trained"]
    for row in found.rows:
        assert row.peak_bytes is not None
        assert row.peak_bytes > gradients


def test_break_evens_stand_against_plain_pytorch_and_between_executions(found: Benchmark) -> None:
    pairs = [(one.label, one.against) for one in found.break_evens]
    assert pairs[-1:] == [("elements csr", "elements masked")]
    assert {against for _, against in pairs[:-1]} == {"plain PyTorch"}
    assert [label for label, _ in pairs[:-1]] == [form.label for form in found.request.forms]


def test_json_for_programs_is_alone_on_standard_output(folder: Path) -> None:
    done = _bench(folder, "max-child", "--recipe", "tiny.yaml", "--rounds", 1, "-o", "json", "--batch", 1)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    head = {key: content.pop(key) for key in ("schema", "kind", "warnings")}
    assert head == {"schema": 1, "kind": "benchmark", "warnings": []}
    found = Benchmark.model_validate(content)
    assert found.request.batch == 1
    assert {row.site for row in found.rows} == {"", "nodes"}
    assert all(row.ceiling is None for row in found.rows if row.label != "dense, engine")
    assert _row(found, "nodes", "max-child").flops_ratio < 0.9
    assert found.break_evens == []


def test_csr_is_forced_without_touching_the_engines_own_share(found: Benchmark) -> None:
    assert _row(found, "linears", "elements csr", 0.5).flops_ratio < 0.9
    assert 0.0 < function.CSR_BELOW < 0.5


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["topk", "--keep", "0.5,1.5"], "--keep: each fraction must be in (0, 1), got '1.5'"),
        (["topk", "--keep", "1.0"], "1.0 is dense, which is always measured"),
        (
            ["topk", "--sites", "linear"],
            "--sites: got 'linear', allowed: linears, nodes; did you mean linears?",
        ),
        (["topk", "--set", "within"], "--set must be OPTION=VALUE"),
        (["topk", "--set", "blok=[8, 8]"], "unknown key 'blok'"),
        (["tpok"], "did you mean topk?"),
        (["topk", "--recipe", "tiny.yaml", "--model", "x"], "give either --recipe or --model, not both"),
        (["topk", "--out", "no/folder.json"], "the folder 'no' for the JSON does not exist"),
        (["topk", "--model", "./no-such-model", "--rounds", 1], "no file or folder"),
        (["topk", "--length", 100000, "--rounds", 1], "--length must be at most"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(folder: Path, words: list[object], text: str) -> None:
    done = _bench(folder, *words)
    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert text in line


@pytest.mark.always("2-130")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_both_processes(folder: Path, number: signal.Signals, code: int) -> None:
    command = [*CLI, "topk", "--recipe", "tiny.yaml", "--rounds", "100000", "--out", f"{code}.json"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "loading the model" in process.stderr.readline()
    (worker,) = psutil.Process(process.pid).children()
    os.kill(process.pid, number)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert errors.splitlines()[-1] == "interrupted: nothing was written"
    assert not worker.is_running()
    assert not (folder / f"{code}.json").exists()


def test_the_worker_does_not_outlive_who_asked(folder: Path) -> None:
    command = [*CLI, "topk", "--recipe", "tiny.yaml", "--rounds", "100000"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    assert "loading the model" in process.stderr.readline()
    (worker,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_worker_that_breaks_is_told_in_one_line(folder: Path) -> None:
    recipe = RECIPE.replace("num_attention_heads: 4", "num_attention_heads: 5")
    (folder / "broken.yaml").write_text(recipe)
    done = _bench(folder, "topk", "--recipe", "broken.yaml", "--rounds", 1)
    assert done.returncode in (2, 100)
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


def test_the_schema_of_the_file_names_every_key(found: Benchmark, folder: Path) -> None:
    schema = Benchmark.model_json_schema()
    content = json.loads((folder / "topk.json").read_text())
    assert set(content) == set(schema["properties"])
    assert set(content["rows"][0]) == set(schema["$defs"]["BenchmarkRow"]["properties"])
