"""What an archive has, and what of an archive of somebody else is unpacked."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsebp_cli.compare import Question, compare_runs
from sparsebp_cli.compare import archive as store
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import RunFolder

from .conftest import MakeRun


def write_tar(path: Path, **members: bytes) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_an_archive_has_the_files_of_a_run_without_the_password_of_its_store(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "abc")
    run.path.mkdir()
    for uri in ("http://me:secret@mlflow.example", "http://mlflow.example", None):
        plan = {"recipe": {"tracking": {"uri": uri} if uri else None}}
        for name, content in {"plan.json": json.dumps(plan), "labels.json": "{}", "worker.log": "x"}.items():
            (run.path / name).write_text(content)
        found = dict(store.list_members(run))
        assert found.keys() == {"runs/abc/plan.json", "runs/abc/labels.json"}
        assert b"secret" not in found["runs/abc/plan.json"]
        if uri is None or "secret" not in uri:
            assert found["runs/abc/plan.json"] == json.dumps(plan).encode()
        else:
            assert json.loads(found["runs/abc/plan.json"])["recipe"]["tracking"]["uri"].endswith("@mlflow.example")


def test_what_is_written_is_read_back_and_removed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[object, ...]] = []
    monkeypatch.setattr("atexit.register", lambda *words, **options: ends.append((*words, options)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    members = {"runs/a/plan.json": b"{}", "runs/b/journal.jsonl": bytes(3 << 20), "studies/s.json": b"{}"}
    store.write_archive(tmp_path / "a.tgz", members.items())
    folder = store.open_archive(tmp_path / "a.tgz")
    assert {name: (folder / name).read_bytes() for name in members} == members
    assert folder.name.startswith(f"{store.PREFIX}{os.getpid()}-")
    assert [(end[1], end[2]) for end in ends] == [(folder, {"ignore_errors": True})]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_killed_archive_leaves_nothing_behind(tmp_path: Path, *, is_there: bool) -> None:
    """Wherever it is killed: before a member, or when the last one is written."""
    path = tmp_path / "a.tgz"

    def members(number: int) -> Iterator[tuple[str, bytes]]:
        for place in range(4):
            if place == number:
                os.kill(os.getpid(), signal.SIGKILL)
            yield f"runs/{place}/plan.json", os.urandom(1 << 20)

    if is_there:
        path.write_bytes(b"before")
    for number in range(5):
        if process := os.fork():
            _, status = os.waitpid(process, 0)
            killed = number < 4
            assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if killed else 0)
            if killed:
                assert [*tmp_path.iterdir()] == ([path] if is_there else [])
                assert not is_there or path.read_bytes() == b"before"
        else:
            try:
                store.write_archive(path, members(number))
                os._exit(0)
            finally:
                os._exit(1)
    assert [*tmp_path.iterdir()] == [path]
    assert len(list((store.open_archive(path) / "runs").iterdir())) == 4


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    store.write_archive(path, [("runs/a/plan.json", b"{}")])
    whole = path.read_bytes()
    flipped = whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:]  # in the checksum
    for content in (b"", b"text", whole[:40], whole[:-1], flipped, gzip.compress(b"text")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"is not an archive of `sparsebp archive`, or it is damaged"):
            store.open_archive(path)
    os.mkfifo(tmp_path / "pipe.tgz")
    with pytest.raises(UsageError, match="is not a regular file"):
        store.open_archive(tmp_path / "pipe.tgz")


@pytest.mark.parametrize(
    ("name", "says"), [("a.zip", "an archive must end in .tar.gz"), ("no/a.tgz", "there is no folder")]
)
def test_a_place_for_no_archive_is_refused(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        store.write_archive(tmp_path / name, [])


def test_names_that_no_archive_has_are_not_unpacked(tmp_path: Path) -> None:
    names = (
        "../out",
        "/tmp/out",
        "runs/../plan.json",
        "runs/a/../../plan.json",
        "runs/a/model.py",
        "runs/a/b/plan.json",
    )
    path = write_tar(tmp_path / "a.tar.gz", **dict.fromkeys(names, b"x"), **{"runs/a/plan.json": b"{}"})
    folder = store.open_archive(path)
    assert [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()] == ["runs/a/plan.json"]


def test_a_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        link = tarfile.TarInfo("runs/a/plan.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert not [path for path in store.open_archive(tmp_path / "a.tar.gz").rglob("*") if not path.is_dir()]


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LARGEST_BYTES", 2**24)
    path = write_tar(tmp_path / "a.tar.gz", **{"runs/a/other": bytes(2**24 + 2**20)})
    with pytest.raises(UsageError, match=r"may unpack to at most 0\.015625 GiB, got more"):
        store.open_archive(path)


@pytest.mark.parametrize("name", ["plan.json", "journal.jsonl", "labels.json"])
def test_a_member_that_is_too_large_is_refused_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    limits = {"plan.json": 3000, "journal.jsonl": 8000, "labels.json": 1000}
    for limit, value in zip(("LARGEST_PLAN", "LARGEST_BYTES", "LARGEST_SMALL"), limits.values(), strict=True):
        monkeypatch.setattr(store, limit, value)
    monkeypatch.setattr(store._Limited, "read", lambda self, size=-1: gzip.GzipFile.read(self, size))
    store.open_archive(write_tar(tmp_path / "a.tar.gz", **{f"runs/a/{name}": bytes(limits[name])}))
    path = write_tar(tmp_path / "b.tar.gz", **{f"runs/a/{name}": bytes(limits[name] + 1)})
    with pytest.raises(
        UsageError, match=f"{name} .* at most {limits[name]} bytes, but this one has {limits[name] + 1}"
    ):
        store.open_archive(path)


@pytest.mark.parametrize("form", ["map", "size"])
def test_a_member_with_holes_is_not_unpacked(tmp_path: Path, form: str) -> None:
    member = tarfile.TarInfo("runs/a/plan.json")
    member.pax_headers = {"GNU.sparse.size": "2000", "GNU.sparse.realsize": "2000"}
    member.pax_headers |= {"GNU.sparse.map": "0,2"} if form == "map" else {"GNU.sparse.numblocks": "1"}
    if form == "size":
        member.pax_headers |= {"GNU.sparse.offset": "0", "GNU.sparse.numbytes": "2"}
    member.size = 2
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member, io.BytesIO(b"{}"))
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert archive.next().issparse()  # type: ignore[union-attr]
    assert [file for file in store.open_archive(tmp_path / "a.tar.gz").rglob("*") if file.is_file()] == []


def test_an_archive_has_neither_name_nor_time_of_its_making(tmp_path: Path) -> None:
    store.write_archive(tmp_path / "a.tar.gz", [("runs/a/plan.json", b"{}")])
    header = (tmp_path / "a.tar.gz").read_bytes()[:10]
    assert (header[3], header[4:8]) == (0, bytes(4))
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        member = archive.next()
    assert member is not None
    assert (member.mtime, member.mode, member.uid, member.uname) == (0, 0o644, 0, "")


def test_runs_that_a_trial_of_an_earlier_release_added_are_compared_with_one_warning(
    make_run: MakeRun, tmp_path: Path
) -> None:
    topk = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}
    runs = [
        make_run(name, seed, loss=3.0 + seed / 100, **some)
        for seed in range(3)
        for name, some in {"dense": {}, "topk": topk}.items()
    ]
    plain = compare_runs(runs, Question(margin=0.02))
    runs[0].trial_file.write_text('{"metric": "eval/loss"}')
    store.write_archive(tmp_path / "runs.tar.gz", [member for run in runs for member in store.list_members(run)])
    archived = [RunFolder(path) for path in sorted((store.open_archive(tmp_path / "runs.tar.gz") / "runs").iterdir())]
    for some in (runs, archived):
        found = compare_runs(some, Question(margin=0.02))
        (added,) = set(found.warnings) - set(plain.warnings)
        assert added.startswith("`run --until-ci` of version 0.5 added seeds until it could decide on a margin")
        assert [group.quality.not_worse for group in found.groups] == [g.quality.not_worse for g in plain.groups]


@pytest.mark.parametrize("owner", ["this user", "another user"])
def test_what_killed_processes_unpacked_is_removed_if_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if owner == "another user":
        monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    names = {"gone": "4194999-a", "living": "1-a", "no number": "x-a"}
    for name in names.values():
        (tmp_path / f"{store.PREFIX}{name}" / "runs").mkdir(parents=True)
    store.make_folder()
    left = {kind for kind, name in names.items() if (tmp_path / f"{store.PREFIX}{name}").exists()}
    assert left == {*names} - ({"gone"} if owner == "this user" else set())
