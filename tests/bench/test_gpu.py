"""``benchmarks/gpu.py`` runs from a bare checkout, and would find a form that is wrong or that waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebp_cli.backward import count_flops
from sparsebp_cli.backward.linear import function
from sparsebp_cli.policy import Rows
from sparsebp_tools.bench import BenchmarkRow
from tests.docs.block import ROOT

pytestmark = pytest.mark.xdist_group("gpu script")  # it runs once, for minutes, not once a process

# Of what the package depends on, only this is on the machine: neither sparsebp itself nor the rest.
ABSENT = (
    "sparsebp",
    "__editable__",
    "accelerate",
    "datasets",
    "matplotlib",
    "mlflow",
    "peft",
    "platformdirs",
    "psutil",
)
ABSENT += ("rich", "scikit", "scipy", "sklearn", "typer")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages without those, to which no .pth file adds any."""
    place = tmp_path_factory.mktemp("bare")
    for folder in (Path(torch.__file__).parent.parent, Path(pytest.__file__).parent.parent):
        for entry in folder.iterdir():
            if not entry.name.startswith(ABSENT) and entry.suffix != ".pth" and not (place / entry.name).exists():
                (place / entry.name).symlink_to(entry)
    return place


def _run(bare: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", str(ROOT / "benchmarks" / "gpu.py"), *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(bare), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=500)


@pytest.fixture(scope="module")
def done(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Any]:
    """What it prints, and the JSON that it writes."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    done = _run(bare, "--device", "cpu", "--tiny", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads(out.read_text())


@pytest.mark.slow
def test_it_runs_without_an_installation_and_prints_one_table(done: Any) -> None:
    process, record = done
    lines = process.stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("USDT")) <= 100
    assert f"{len(record['checks'])} of {len(record['checks'])} checks are right" in process.stdout
    assert record["command"].startswith("python benchmarks/gpu.py --device cpu")
    assert str(ROOT) not in json.dumps(record)
    assert record["notes"] == []


@pytest.mark.slow
def test_every_way_that_is_to_be_compared_is_a_row(done: Any) -> None:
    rows = [BenchmarkRow.model_validate(row) for row in done[1]["rows"]]
    found = {(row.site, row.label, row.keep) for row in rows}
    ways = {("", label, None) for label in ("plain PyTorch", "compiled", "full checkpointing")}
    ways |= {("linears", "dense, engine", None)}
    forms = [("linears", along) for along in ("rows", "columns", "blocks")]
    ways |= {(*form, keep) for form in forms for keep in (0.5, 0.25, 0.1)}
    assert found == ways | {("linears", "2:4", 0.5)}
    for row in rows:
        assert (row.ceiling is None) == (row.site == "")
        if row.keep is not None and row.label != "2:4":
            assert row.ceiling is not None
            assert row.ceiling > 1.0


@pytest.mark.slow
def test_steps_and_linears_are_measured(done: Any) -> None:
    steps, linears = done[1]["steps"], done[1]["linears"]
    assert [row["label"] for row in steps][:2] == ["plain PyTorch", "eager update"]
    assert all(row["seconds"] >= row["host_seconds"] > 0 and not row["note"] for row in steps)
    assert [row["keep"] for row in linears] == [0.5, 0.25, 0.1]
    assert all(min(row[key] for key in ("dense", "ideal", "choosing", "with_triton")) > 0 for row in linears)


@pytest.mark.slow
def test_every_form_is_checked_in_both_precisions(done: Any) -> None:
    checks = done[1]["checks"]
    for dtype in ("float32", "bfloat16"):
        forms = {check["form"] for check in checks if check["dtype"] == dtype}
        for part in ("rows,", "columns,", "blocks,", "elements csr,", "elements masked,", "2:4,"):
            assert any(form.startswith(f"random {part}") for form in forms), part
            assert any(form.startswith(f"topk {part}") for form in forms), part
        assert {"dense, linears", "dense, nodes", "nodes: max-child"} <= forms
    assert all(check["error"] < 0.05 for check in checks)
    dense = [c for c in checks if c["form"].startswith("dense") and c["dtype"] == "float32"]
    assert {check["note"] for check in dense} == {"bit for bit as loss.backward()"}


def test_what_is_missing_is_named(bare: Path, tmp_path: Path) -> None:
    for entry in bare.iterdir():
        if not entry.name.startswith("pydantic"):
            (tmp_path / entry.name).symlink_to(entry)
    process = _run(tmp_path, "--device", "cpu", "--tiny")
    assert (process.returncode, process.stderr) == (2, "error: not installed here: pydantic\n")


def test_a_large_model_needs_a_gpu(bare: Path) -> None:
    process = _run(bare)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith("error: there is no CUDA device: --device cpu needs --tiny")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts can be imported."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    yield
    for name in ("checkout", "correct", "measured", "steps", "waiting"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.long
@pytest.mark.usefixtures("benchmarks")
def test_every_way_trains_a_step() -> None:
    import measured  # type: ignore[import-not-found]
    import steps  # type: ignore[import-not-found]

    arguments = SimpleNamespace(size="tiny", length=32, dtype="float32", batch=4)
    subject, _ = measured.make_subject(torch.device("cpu"), arguments)
    found = steps.measure(subject.model, subject.batch, steps.list_ways(), time.monotonic() + 600, 1)
    assert not [one.note for one in found if one.note]
    assert all(len(one.total) == 1 for one in found)
    assert all(parameter.requires_grad for parameter in subject.model.parameters())


@pytest.mark.usefixtures("benchmarks")
def test_a_kernel_that_is_a_little_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import correct  # type: ignore[import-not-found]

    cpu = torch.device("cpu")
    assert all(check.good for check in correct.check_kernels(cpu, "float32"))
    right = function._KERNELS[Rows]

    def wrong(*args: Any) -> Any:
        dgrad, wgrad, bias = right(*args)
        return dgrad * 1.0001, wgrad, bias

    monkeypatch.setitem(function._KERNELS, Rows, wrong)
    found = {check.form: check.good for check in correct.check_kernels(cpu, "float32")}
    assert not any(good for form, good in found.items() if form.startswith("topk rows"))
    assert all(good for form, good in found.items() if not form.startswith("topk rows"))


@pytest.mark.usefixtures("benchmarks")
def test_a_kernel_that_a_device_refuses_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    import correct

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no such kernel\nfor this device")

    monkeypatch.setitem(function._KERNELS, Rows, refuse)
    notes = {check.note for check in correct.check_kernels(torch.device("cpu"), "bfloat16") if not check.good}
    assert notes == {"RuntimeError: no such kernel"}


@pytest.mark.usefixtures("benchmarks")
def test_waiting_more_often_than_plain_pytorch_is_told() -> None:
    import measured  # type: ignore[import-not-found]
    from waiting import Waits  # type: ignore[import-not-found]

    plain = Waits("plain PyTorch", is_engine=False, in_forward=1, calls={"cudaDeviceSynchronize": 1})
    good = replace(plain, label="good", is_engine=True)
    called = replace(good, label="called", calls={"cudaDeviceSynchronize": 1, "cudaStreamSynchronize": 2})
    warned = replace(good, label="warned", in_forward=2)
    raised = replace(good, label="raised", in_backward="called a synchronizing CUDA operation")
    router = replace(warned, label="router", known="a router looks at sizes")
    not_ours = replace(called, label="full checkpointing", is_engine=False)
    lines = measured.find_late([plain, good, called, warned, raised, router, not_ours])
    assert [line.split(":")[0] for line in lines] == ["WAITS  called", "WAITS  warned", "WAITS  raised"]


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_of_fewer_heads_of_keys_is_counted_as_if_they_were_repeated(kind: str) -> None:
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    more = () if kind == "flash" else (None, True)
    counted = []
    for heads in (8, 2):
        query = torch.empty(2, 8, 16, 32, device="meta", dtype=torch.bfloat16)
        key = torch.empty(2, heads, 16, 32, device="meta", dtype=torch.bfloat16)
        with count_flops() as flops:
            operator(query, key, key, *more)
        counted.append(flops.total)
    assert counted == [2 * (2 * 8 * 16 * 16) * (32 + 32)] * 2


@pytest.mark.parametrize("name", ["sparsebp", "sparsebp-tools", "sparsebp-shelf"])
def test_the_metadata_that_stands_in_names_every_entry_point(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import distribution, distributions

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import checkout  # type: ignore[import-not-found]

    checkout._write_metadata(checkout.PACKAGES[name], tmp_path)
    (made,) = distributions(name=name, path=[str(tmp_path)])
    project = distribution(name)
    assert made.version == project.version
    found = {(entry.group, entry.name, entry.value) for entry in made.entry_points}
    installed = {(e.group, e.name, e.value) for e in project.entry_points if e.group.startswith("sparsebp.")}
    assert installed
    assert installed <= found
