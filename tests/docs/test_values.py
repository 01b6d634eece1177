"""What git keeps of the results is small, and archives, tables and statistics come again from it."""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from sparsebp_cli.compare.statistics import paired_difference, spread
from tests.docs.block import ROOT

RESULTS = ROOT / "docs" / "results"
MOST_BYTES = 3_000_000
VALUES = sorted(RESULTS.rglob("*.parquet"))
TAG = "git checkout a6c6be72 -- "


@pytest.fixture
def thin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("thin")
    sys.modules.pop("thin", None)


def list_kept() -> list[Path]:
    """The files of the results that git has or would take."""
    words = ["ls-files", "--cached", "--others", "--exclude-standard", "--", "docs/results"]
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    found = [ROOT / line for line in done.stdout.splitlines()]
    return [file for file in found if file.exists()]


def test_the_results_that_git_keeps_are_at_most_3_megabytes_without_an_archive() -> None:
    kept = list_kept()
    assert sum(file.stat().st_size for file in kept) <= MOST_BYTES
    assert [file for file in kept if file.name.endswith(".tar.gz")] == []


@pytest.mark.parametrize("file", VALUES, ids=lambda file: str(file.relative_to(RESULTS)))
def test_values_name_the_archive_that_they_are_of_by_its_digest(file: Path) -> None:
    metadata = pq.read_schema(file).metadata
    assert metadata[b"archive"].decode() == f"{file.stem}.tar.gz"
    assert re.fullmatch(rb"[0-9a-f]{64}", metadata[b"sha256"])


def test_pages_that_name_an_archive_name_the_tag_that_has_it() -> None:
    pages = [*RESULTS.rglob("*.md"), *RESULTS.rglob("*.html"), ROOT / "benchmarks" / "README.md"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for name in {*re.findall(r"docs/results/[\w/-]+\.tar\.gz", text)}:
            assert f"{TAG}{name}" in text, page


def test_an_archive_made_of_values_has_these_values(thin: ModuleType, tmp_path: Path) -> None:
    first, again = tmp_path / "priced.tar.gz", tmp_path / "again.parquet"
    thin.restore(RESULTS / "priced.parquet", first)
    thin.thin(first, again, thin.KEPT["report"])
    before, after = pq.read_table(RESULTS / "priced.parquet"), pq.read_table(again)
    rows = [
        sorted(table.select([name]).to_pylist(), key=json.dumps)
        for table in (before, after)
        for name in ("kind", "step", "flops/step", "eval/loss", "time/step_seconds")
    ]
    assert rows[:5] == rows[5:]


def test_of_tuning_evaluations_alone_are_kept_and_rehearsals_to_the_last_bit(thin: ModuleType, tmp_path: Path) -> None:
    roles = {"a": "tune", "b": "rehearse", "c": "report"}
    values = {"eval/loss": 1.25, "flops/step": 1000.0000001, "time/step_seconds": 0.123456789, "train/loss": 2.0}
    journal = "".join(
        json.dumps({"kind": kind, "attempt": 1, "time": 5.5} | more) + "\n"
        for kind, more in (("metrics", {"step": 1, "values": values}), ("end", {"status": "finished", "step": 1}))
    )
    trials = [{"run_id": run, "role": role} for run, role in roles.items()]
    members = {"studies/s.json": json.dumps({"study": "s", "trials": trials, "digests": {}})}
    members |= {
        f"runs/{run}/{name}": text for run in roles for name, text in (("plan.json", "{}"), ("journal.jsonl", journal))
    }
    with tarfile.open(tmp_path / "s.tar.gz", "w:gz") as packed:
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text.encode()))
    thin.thin(tmp_path / "s.tar.gz", tmp_path / "s.parquet", thin.KEPT["report"])
    thin.restore(tmp_path / "s.parquet", tmp_path / "t.tar.gz")
    with tarfile.open(tmp_path / "t.tar.gz") as packed:
        read = {one.name: packed.extractfile(one).read() for one in packed}  # type: ignore[union-attr]
    found = {run: json.loads(read[f"runs/{run}/journal.jsonl"].splitlines()[0])["values"] for run in roles}
    assert found["a"] == {"eval/loss": 1.25}
    assert found["b"] == {"eval/loss": 1.25, "flops/step": 1000.0000001}
    assert found["c"] == {"eval/loss": 1.25, "flops/step": 1000.0, "time/step_seconds": 0.1234568}
    digests = json.loads(read["studies/s.json"])["digests"]
    assert digests == {run: hashlib.sha256(read[f"runs/{run}/journal.jsonl"]).hexdigest() for run in roles}


@pytest.mark.parametrize("name", ["study", "masked"])
def test_means_and_differences_of_a_report_come_again_from_its_rows(name: str) -> None:
    lines = (RESULTS / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(rf"# {name}\.json, sha256 [0-9a-f]{{64}}; quality: test/loss", lines[0])
    values: dict[str, dict[int, float]] = {}
    for row in csv.DictReader(lines[1:]):
        if row["counts"] == "True":
            values.setdefault(row["label"], {})[int(row["seed"])] = float(row["quality"])
    baseline = next(iter(values))
    text = (RESULTS / f"{name}.txt").read_text(encoding="utf-8")
    table = next(part for part in text.split("\n\n") if part.startswith("Quality:"))
    for label, own in values.items():
        line = next(line for line in table.splitlines() if line.startswith(f"{label} "))
        said = [float(number) for number in re.findall(r"[-+]?\d+\.\d+(?:e-?\d+)?", line.removeprefix(label))]
        mean = spread([*own.values()])
        assert mean is not None
        assert said[0] == pytest.approx(mean.mean, rel=1e-2)
        if label != baseline:
            difference = paired_difference(own, values[baseline])
            assert difference is not None
            assert said[2] == pytest.approx(difference.mean, rel=6e-2, abs=5e-4)
