"""The choices of a study follow from an archive of its trials, and whatever was changed in it is named."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.run import home, list_runs
from sparsebp_lab.study.thin import NOTE, thin_journal
from tests.cli.document import read_document
from tests.study.conftest import STUDY, Cli, Write
from tests.study.study_folder import list_trials

EXTENDED = STUDY + "search: {extend: 1}\nbudget: {same: cost, as: dense, steps: 20}\n"
Change = Callable[[dict[str, bytes]], None]


KEPT: list[bytes] = []  # the archive, made once


@pytest.fixture
def archived(cli: Cli, write_study: Write, tmp_path: Path) -> Path:
    """An archive of a study that was rehearsed, tuned, extended and reported, elsewhere; this home is empty."""
    write_study(EXTENDED)
    archive = tmp_path / "tiny.tar.gz"
    if not KEPT:
        done = cli("study", "study.yaml")
        assert done.returncode == 0, done.stderr
        assert cli("archive", "@tiny", "--to", archive.name).returncode == 0
        shutil.rmtree(home())
        KEPT.append(archive.read_bytes())
    archive.write_bytes(KEPT[0])
    return archive


def read_members(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as file:
        return {one.name: file.extractfile(one).read() for one in file}  # type: ignore[union-attr]


def change(archive: Path, edit: Change) -> None:
    members = read_members(archive)
    edit(members)
    with gzip.open(archive, "wb") as packed, tarfile.open(fileobj=packed, mode="w|") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


def find(members: dict[str, bytes], role: str, arm: str, combination: str = "") -> str:
    listed = json.loads(members["studies/tiny.json"])["trials"]
    (found,) = [t for t in listed if (t["role"], t["arm"], t["combination"]) == (role, arm, combination)]
    return f"runs/{found['run_id']}/journal.jsonl"


def test_a_thin_archive_says_of_choices_and_report_what_a_whole_one_says(
    cli: Cli, write_study: Write, tmp_path: Path
) -> None:
    """Of its tuning single steps are left out, other than their price; all else has the same bytes."""
    write_study(EXTENDED)
    assert cli("study", "study.yaml").returncode == 0
    assert cli("archive", "@tiny", "--to", "whole.tar.gz").returncode == 0
    assert cli("archive", "@tiny", "--thin", "--to", "thin.tar.gz").returncode == 0
    refused = cli("archive", list_runs()[0].run_id, "--thin", "--to", "one.tar.gz")
    assert (refused.returncode, refused.stderr.partition(":")[0]) == (2, "error")
    shutil.rmtree(home())
    whole, thin = (read_members(tmp_path / f"{name}.tar.gz") for name in ("whole", "thin"))
    listed = json.loads(thin["studies/tiny.json"])["trials"]
    tuned = {f"runs/{trial['run_id']}/journal.jsonl" for trial in listed if trial["role"] == "tune"}
    assert {name for name in whole if whole[name].replace(b"whole.tar", b"thin.tar") != thin[name]} == tuned | {
        "studies/tiny.json"
    }
    assert all(b"train/loss" not in thin[name] and b"eval/loss" in thin[name] for name in tuned)
    assert all(thin[name].count(b'"flops/step"') == whole[name].count(b'"flops/step"') for name in tuned)
    assert all(thin[name].count(NOTE.encode()) == 1 and thin_journal(thin[name]) == thin[name] for name in tuned)
    run_id = next(iter(tuned)).split("/")[1]
    assert NOTE in " ".join(cli("show", run_id, "--from", "thin.tar.gz").stdout.split())
    answers = []
    for name in ("whole", "thin"):
        rebuilt = cli("study", "study.yaml", "--from", f"{name}.tar.gz")
        compared = cli("compare", "--study", "tiny", "--from", f"{name}.tar.gz", "--all")
        assert (rebuilt.returncode, compared.returncode) == (0, 0)
        answers.append((rebuilt.stdout.replace(name, ""), compared.stdout))
    assert answers[0] == answers[1]


def test_a_line_that_cannot_be_read_stays_in_a_thin_journal() -> None:
    broken = b'{"kind": "metrics", "step": 3, "val\n'
    assert thin_journal(b'{"kind": "layers"}\n' + broken + b"[1]\n") == broken + b"[1]\n"


def test_a_metric_of_a_package_stays_in_a_thin_journal() -> None:
    line = b'{"kind": "metrics", "time": 1.0, "values": {"train/loss": 2.0, "rouge/l": 0.5, "flops/step": 3.0}}\n'
    assert json.loads(thin_journal(line))["values"] == {"rouge/l": 0.5, "flops/step": 3.0}


def test_choices_follow_from_the_archive_in_an_empty_home(cli: Cli, archived: Path) -> None:
    document = read_document(cli("study", "study.yaml", "--from", archived, "-o", "json").stdout)
    assert (document["kind"], document["is_as_chosen"], document["faults"]) == ("rebuilt", True, [])
    done = cli("study", "study.yaml", "--from", archived)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert first.startswith("tiny: choices rebuilt from ")
    assert "dense: 20 steps, learning_rate=0.001, as the study chose" in lines
    assert "topk: 40 steps, learning_rate=0.001, as the study chose" in lines
    assert not list_runs()
    compared = cli("compare", "--study", "tiny", "--from", archived, "--all")
    assert compared.returncode == 0
    assert "Tuning of dense: eval/loss" in compared.stdout
    assert "does not contain the study tini" in cli("compare", "--study", "tini", "--from", archived).stderr


def test_a_trial_that_was_changed_is_named(cli: Cli, archived: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        name = find(members, "tune", "topk", "learning_rate=0.0005")
        members[name] = members[name].replace(b'"eval/loss": 3.', b'"eval/loss": 1.')

    change(archived, edit)
    done = cli("study", "study.yaml", "--from", archived)
    assert done.returncode == 1
    assert "fault: tune topk learning_rate=0.0005 seed 0: the event log of run " in done.stdout
    assert "dense: 20 steps, learning_rate=0.001, as the study chose" not in done.stdout  # one arm's edge extends all
    assert "; the study reported 40 steps, learning_rate=0.001" in done.stdout


def test_a_trial_that_is_left_out_is_named(cli: Cli, archived: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        run = Path(find(members, "tune", "dense", "learning_rate=0.0005")).parent
        for name in [name for name in members if name.startswith(f"{run}/")]:
            del members[name]

    change(archived, edit)
    done = cli("study", "study.yaml", "--from", archived)
    assert done.returncode == 1
    assert "fault: tune dense learning_rate=0.0005 seed 0: run " in done.stdout
    assert "dense: no choice follows from these trials; the study reported 20 steps, learning_rate=0.001" in done.stdout


def test_another_price_of_a_step_is_another_number_of_steps(cli: Cli, archived: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        name = find(members, "rehearse", "topk")
        lines = [json.loads(line) for line in members[name].splitlines()]
        for line in lines:
            if "flops/step" in line.get("values", {}):
                line["values"]["flops/step"] *= 0.9
        members[name] = "".join(json.dumps(line) + "\n" for line in lines).encode()

    change(archived, edit)
    done = cli("study", "study.yaml", "--from", archived)
    assert done.returncode == 1
    assert "topk: no choice follows from these trials; the study reported 40 steps, learning_rate=0.001" in done.stdout
    assert "fault: rehearse topk seed 0: the event log of run " in done.stdout


def test_an_archive_of_runs_alone_says_how_to_make_one(cli: Cli, write_study: Write) -> None:
    write_study(STUDY)
    assert cli("study", "study.yaml").returncode == 0
    cli("archive", *[run.run_id for run in list_trials("report")], "--to", "report.tar.gz")
    done = cli("study", "study.yaml", "--from", "report.tar.gz")
    assert done.returncode != 0
    assert "`sparsebp archive @tiny --to FILE` writes an archive" in done.stderr
    assert cli("study", "study.yaml", "--from", "report.tar.gz", "--again").returncode != 0
    assert "must be an archive" in cli("study", "study.yaml", "--from", "none.tar.gz").stderr


def test_the_choices_of_the_committed_study_are_rebuilt(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, whose grid was extended and whose dearer rehearsal was made twice as long."""
    results = Path(__file__).parents[2] / "docs" / "results"
    monkeypatch.syspath_prepend(str(results.parents[1] / "benchmarks"))
    archive = importlib.import_module("thin").find_archive(results / "priced")
    done = cli("study", results / "priced" / "study.yaml", "--from", archive)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == [
        "dense: 12 steps, learning_rate=0.002, as the study chose",
        "lossless: 23 steps, learning_rate=0.002, as the study chose",
    ]
