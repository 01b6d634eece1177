"""Hostile archives from elsewhere: each is refused in one line or is harmless, and nothing leaves the run's folder."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.errors import RunFailedError
from sparsebp_cli.run import RunFolder
from sparsebp_cli.target.archive import merge_into_run, receive

from .conftest import make_run

pytestmark = pytest.mark.promise("R12")

Fill = Callable[[tarfile.TarFile, str], object]


def member(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "", mode: int = 0o644, **pax: str
) -> Fill:
    """One member; ``{run}`` in its name stands for the run's folder."""

    def fill(archive: tarfile.TarFile, top: str) -> None:
        info = tarfile.TarInfo(name.format(run=top))
        info.type, info.size, info.linkname, info.mode = kind, len(data), link.format(run=top), mode
        info.devmajor, info.devminor, info.pax_headers = 1, 3, pax
        archive.addfile(info, io.BytesIO(data))

    return fill


def several(*fills: Fill) -> Fill:
    def fill(archive: tarfile.TarFile, top: str) -> None:
        for one in fills:
            one(archive, top)

    return fill


TOP, DATA = member("{run}", tarfile.DIRTYPE, mode=0o755), b"taken"
# A file that says of itself that it has 8 TB, all of them holes.
HOLES = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**43)}
REFUSED: dict[str, Fill] = {
    "parent": member("{run}/../../escape", data=DATA),
    "parent of a folder": member("{run}/../../escape", tarfile.DIRTYPE),
    "parent in the middle": member("{run}/a/../../../escape", data=DATA),
    "parent alone": several(member("../escape", data=DATA), TOP),
    "holes": member("{run}/journal.jsonl", data=b"0\n" + bytes(510), **HOLES),
    "deep": member("{run}/" + "a/" * 900 + "b", data=DATA),
    "long name": member("{run}/" + "a" * 5000, data=DATA),
    "file and folder of one name": several(member("{run}/a", data=DATA), member("{run}/a/b", data=DATA)),
    "folder and file of one name": several(member("{run}/a/b", data=DATA), member("{run}/a", data=DATA)),
    "journal is a folder": member("{run}/journal.jsonl/x", data=DATA),
    "log is a folder": member("{run}/worker.log/x", data=DATA),
    "checkpoints are a file": member("{run}/checkpoints", data=DATA),
    "model is a file": member("{run}/model", data=DATA),
    "file where a folder is": member("{run}/old", data=DATA),
    "folder where a file is": member("{run}/new/x", data=DATA),
    "another top": member("other/notes.txt", data=DATA),
    "absolute": member("/escape", data=DATA),
    "absolute folder": member("/tmp/escape-of-archive", tarfile.DIRTYPE),
    "top is a link": several(member("{run}", tarfile.SYMTYPE, link="/tmp"), member("/x", data=DATA)),
}
HARMLESS: dict[str, Fill] = {
    "link out": several(member("{run}/a", tarfile.SYMTYPE, link="/etc"), member("{run}/b", data=DATA)),
    "file through a link": several(
        member("{run}/a", tarfile.SYMTYPE, link="../../.."), member("{run}/a/escape", data=DATA)
    ),
    "hard link out": member("{run}/a", tarfile.LNKTYPE, link="../../../etc/passwd"),
    "hard link within": several(
        member("{run}/b", data=DATA), member("{run}/plan.json", tarfile.LNKTYPE, link="{run}/b")
    ),
    "link to the plan": several(
        member("{run}/a", tarfile.SYMTYPE, link="plan.json"), member("{run}/a", data=b"changed")
    ),
    "device": member("{run}/a", tarfile.CHRTYPE),
    "block device": member("{run}/a", tarfile.BLKTYPE),
    "pipe": member("{run}/a", tarfile.FIFOTYPE),
    "same name twice": several(member("{run}/a", data=b"first"), member("{run}/a", data=b"second")),
    "runs as another user": member("{run}/a", data=DATA, mode=0o7777),
    "plan and private files": several(
        *(member(f"{{run}}/{name}", data=DATA) for name in ("plan.json", "target.json", "cancelled", "target.lock"))
    ),
    "pickles": several(
        *(member(f"{{run}}/{name}", data=DATA) for name in ("model/pytorch_model.bin", "checkpoints/optimizer.pt"))
    ),
    "terminal": member("{run}/\x1b[2J", data=DATA),
    "unknown kind": member("{run}/a", b"Z", data=DATA),
    "another's journal": member("{run}/journal.jsonl", data=b'{"kind": "end", "status": "finished"}\n'),
}


@pytest.fixture
def run() -> RunFolder:
    run = make_run()
    (run.path / "old").mkdir()
    (run.path / "new").write_text("mine")
    (run.path / "journal.jsonl").write_text('{"kind": "note"}\n')
    return run


def take(fill: Fill, run: RunFolder) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        fill(archive, run.run_id)
    buffer.seek(0)
    merge_into_run(receive(buffer, run), run.run_id, run)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything outside and inside a run's folder, but for what is being received."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if ".part-fetch" not in path.parts
    }


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_archive_is_refused_in_one_line_and_changes_nothing(
    name: str, run: RunFolder, tmp_path: Path
) -> None:
    before = tree(tmp_path)
    with pytest.raises(RunFailedError, match="look dangerous and were not fetched: ") as caught:
        take(REFUSED[name], run)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert tree(tmp_path) == before
    assert not Path("/escape").exists()
    assert not Path("/tmp/escape-of-archive").exists()
    take(HARMLESS["pickles"], run)  # and what was left of it is in nobody's way


@pytest.mark.parametrize("name", HARMLESS)
def test_odd_members_of_an_archive_leave_what_is_here(name: str, run: RunFolder, tmp_path: Path) -> None:
    before = tree(tmp_path)
    take(several(TOP, HARMLESS[name]), run)
    after = tree(tmp_path)
    assert {path: after.get(path) for path in before} == before
    inside = str(run.path.relative_to(tmp_path))
    assert all(path.startswith(f"{inside}/") for path in after.keys() - before.keys())
    for path in run.path.rglob("*"):
        assert not path.is_symlink()
        assert path.is_file() or path.is_dir()
        assert path.stat().st_mode & 0o7022 == 0
        assert path.stat().st_nlink == 1 or path.is_dir()
