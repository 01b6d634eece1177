"""``archive`` writes runs into one file, as a whole or not at all; ``compare`` and ``show`` read it."""

from __future__ import annotations

import gzip
import json
import random
import resource
import tarfile
from pathlib import Path

import pytest

from sparsebp_cli.compare import archive as store
from sparsebp_cli.errors import SparseBPError, UsageError
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run.label import Labels

from .conftest import Cli, Write, write_run


@pytest.fixture
def two(write_recipe: Write) -> list[RunFolder]:
    return [write_run(write_recipe(name="topk-rows")), write_run(write_recipe(name="dense"), "policy=dense")]


def test_an_archive_is_compared_and_shown_as_its_runs_were(call: Cli, two: list[RunFolder], tmp_path: Path) -> None:
    ids = [run.run_id for run in two]
    Labels(("best",), "a note").save(two[0].path)
    here = call("compare", *ids, "-o", "json").stdout
    done = call("archive", *ids, "--to", "two.tar.gz")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("two.tar.gz: 2 runs, ")
    shown = call("show", ids[0], "-o", "json").stdout
    call("rm", *ids, "--yes")
    assert call("compare", *ids, "--from", "two.tar.gz", "-o", "json").stdout == here
    there = json.loads(call("show", ids[0], "--from", "two.tar.gz", "-o", "json").stdout)
    for key in ("plan", "metrics", "labels", "state", "environments"):
        assert there[key] == json.loads(shown)[key]
    assert call("show", "@best", "--from", "two.tar.gz", "-o", "yaml").returncode == 0
    assert call("compare", "dense", "topk-rows", "--from", "two.tar.gz", "--where", "tag=best").returncode == 0
    assert call("show", "other", "--from", "two.tar.gz").returncode == 102


def test_an_archive_holds_plans_journals_environment_and_report(
    call: Cli, two: list[RunFolder], tmp_path: Path
) -> None:
    (two[0].path / "model").mkdir()
    (two[0].path / "model" / "weights.bin").write_bytes(b"weights")
    call("archive", "@2", "--to", "two.tgz")
    with tarfile.open(tmp_path / "two.tgz") as archive:
        names = set(archive.getnames())
        environment = json.loads(archive.extractfile("environment.json").read())  # type: ignore[union-attr]
        report = archive.extractfile("report.html").read().decode()  # type: ignore[union-attr]
    runs = {f"runs/{run.run_id}/{name}" for run in two for name in ("plan.json", "journal.jsonl")}
    assert names == {*runs, "environment.json", "report.html"}
    assert environment[two[0].run_id] == [{"python": "3", "packages": {}}]
    assert "topk-rows" in report
    assert "sparsebp compare --from two.tgz" in report


@pytest.mark.parametrize("role", ["worker", "target"])
def test_a_living_run_is_refused_by_name(call: Cli, two: list[RunFolder], tmp_path: Path, role: str) -> None:
    (two[1].path / "journal.jsonl").write_text("")
    with two[1].lock(role):
        done = call("archive", "@2", "--to", "two.tar.gz")
    assert done.returncode == 101
    assert f"run {two[1].run_id} is " in done.stderr
    assert "nothing was written" in done.stderr
    assert not list(tmp_path.glob("*two*"))


def test_a_run_elsewhere_that_does_not_answer_is_refused(call: Cli, two: list[RunFolder], tmp_path: Path) -> None:
    two[0].target_file.write_text(json.dumps({"after_attempt": 0, "sight": "working"}))
    done = call("archive", "@2", "--to", "two.tar.gz")
    assert done.returncode == 101
    assert f"run {two[0].run_id} is unreachable" in done.stderr
    assert not list(tmp_path.glob("*two*"))


def test_a_damaged_plan_is_refused_and_a_damaged_line_is_kept(call: Cli, two: list[RunFolder], tmp_path: Path) -> None:
    journal = two[0].path / "journal.jsonl"
    journal.write_text("garbage\n" + journal.read_text())
    done = call("archive", two[0].run_id, "--to", "one.tar.gz")
    assert done.returncode == 0
    assert "line 1 of its event log cannot be read" in done.stderr
    assert call("show", two[0].run_id, "--from", "one.tar.gz").returncode == 0
    two[1].plan_file.write_text("{")
    done = call("archive", "topk-rows", two[1].run_id, "--to", "two.tar.gz")
    assert (done.returncode, done.stderr.count("\n")) == (102, 1)
    assert two[1].run_id in done.stderr
    assert not (tmp_path / "two.tar.gz").exists()


def test_a_file_with_anything_that_would_be_lost_is_not_replaced(
    call: Cli, two: list[RunFolder], tmp_path: Path
) -> None:
    first, second = (run.run_id for run in two)
    file = tmp_path / "a.tar.gz"
    assert call("archive", first, second, "--to", file).returncode == 0
    for content in (file.read_bytes(), b"data of mine", b""):
        file.write_bytes(content)
        done = call("archive", first, "--to", file)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "name another file; nothing was written" in done.stderr
        assert file.read_bytes() == content
    file.unlink()
    assert call("archive", first, "--to", file).returncode == 0
    assert call("archive", first, second, "--to", file).returncode == 0  # with more runs than before


def test_a_full_disk_leaves_the_old_file_and_no_half_one(call: Cli, two: list[RunFolder], tmp_path: Path) -> None:
    call("archive", two[0].run_id, "--to", "kept.tar.gz")
    before = (tmp_path / "kept.tar.gz").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # larger files fail, as on a full disk
    try:
        with pytest.raises(SparseBPError, match=r"kept.tar.gz was not written: File too large"):
            store.write_archive(tmp_path / "kept.tar.gz", [("runs/b/plan.json", random.Random(0).randbytes(100_000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "kept.tar.gz").read_bytes() == before
    assert [file.name for file in tmp_path.glob("*.part")] + [file.name for file in tmp_path.glob(".*.part")] == []


def test_the_password_of_a_store_is_not_in_an_archive(call: Cli, write_recipe: Write, tmp_path: Path) -> None:
    run = write_run(write_recipe())
    plan = json.loads(run.plan_file.read_bytes())
    plan["recipe"]["tracking"]["uri"] = "http://me:secret@mlflow.example"
    run.plan_file.write_text(json.dumps(plan))
    assert call("archive", run.run_id, "--to", "a.tar.gz").returncode == 0
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        contents = [archive.extractfile(member).read() for member in archive]  # type: ignore[union-attr]
    assert not any(b"secret" in content for content in contents)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["archive", "@2", "--to", "two.zip"], "an archive must end in .tar.gz or .tgz, got 'two.zip'"),
        (["archive", "@2", "--to", "no/two.tgz"], "there is no folder"),
        (["show", "@last", "--from", "nowhere"], "--from must be a folder of runs or an archive, got 'nowhere'"),
    ],
)
def test_a_wrong_place_is_answered_in_one_line(call: Cli, two: list[RunFolder], words: list[str], text: str) -> None:
    done = call(*words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert text in done.stderr


def test_a_cut_or_changed_archive_and_another_file_are_refused(two: list[RunFolder], tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    store.write_archive(path, store.list_members(two[0]))
    whole = path.read_bytes()
    flipped = bytes([whole[-8] ^ 1])  # in the checksum
    for content in (b"", b"text", whole[:40], whole[:-1], whole[:-8] + flipped + whole[-7:], gzip.compress(b"text")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"is not an archive of `sparsebp archive`, or it is damaged"):
            store.open_archive(path)
