"""What is larger than a run's files can be is refused before it is in memory, from archives and from workers."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsebp_cli.run import History, budget
from sparsebp_cli.run.budget import LARGEST_PLAN, LONGEST_LINE, BudgetError, read_bounded, read_lines, size_of

pytestmark = pytest.mark.promise("R32")

GIB, MIB = 1 << 30, 1 << 20
RUN = "runs/0123456789ab"
MOST_MIB = 256
# Peak memory of a process of its own, above that after its imports.
MEASURE = """
import resource, sys
{imports}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
try:
    {call}
except SparseBPError as error:
    print("refused:", error)
print(peak() - before)
"""
OPEN = ("from pathlib import Path; from sparsebp_cli.errors import SparseBPError; "
        "from sparsebp_cli.compare.archive import open_archive; from sparsebp_cli.run import History",
        "print(History.load(open_archive(Path(sys.argv[1])) / 'runs' / '0123456789ab').unreadable)")  # fmt: skip
RECEIVE = ("import gzip; from pathlib import Path; from sparsebp_cli.errors import SparseBPError; "
           "from sparsebp_cli.target.archive import receive; from sparsebp_cli.run import RunFolder",
           "receive(gzip.open(sys.argv[1]), RunFolder(Path(sys.argv[1]).parent))")  # fmt: skip


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.USTAR_FORMAT)


def zeros(size: int, byte: bytes = b"\0") -> Iterator[bytes]:
    for _ in range(size // MIB):
        yield byte * MIB


def make_bomb(kind: str) -> Iterator[bytes]:
    """Yield an archive that a careless reader takes into memory; where the size alone tells, it is not all there."""
    match kind:
        case "header":
            yield header("x", 2 * GIB - 512, tarfile.XHDTYPE)
            yield from zeros(2 * MIB, b"a")
        case "name":
            yield header("x", 2 * GIB - 512, tarfile.GNUTYPE_LONGNAME)
            yield from zeros(2 * MIB, b"a")
        case "headers":
            for number in range(400):
                text = f"comment{number}={'a' * 60_000}\n"
                record = f"{len(text) + 6} {text}".encode()
                yield header("x", len(record), tarfile.XGLTYPE) + record.ljust(-len(record) // 512 * -512, b"\0")
        case "members":
            for _ in range(25_000):
                yield header("x", 0)
        case "plan":
            yield header(f"{RUN}/plan.json", 2 * GIB - 512)
            yield from zeros(2 * MIB, b" ")
        case "holes":
            yield header(f"{RUN}/plan.json", 512, tarfile.GNUTYPE_SPARSE) + bytes(512)
        case "line":
            yield header(f"{RUN}/journal.jsonl", 200 * MIB)
            yield from zeros(200 * MIB, b"a")
    yield bytes(1024)


@pytest.mark.parametrize("where", ["archive", "worker"])
@pytest.mark.parametrize("kind", ["header", "name", "headers", "members", "plan", "holes", "line"])
def test_a_bomb_is_refused_in_one_line_and_little_memory(kind: str, where: str, tmp_path: Path) -> None:
    file = tmp_path / "bomb.tar.gz"
    with gzip.open(file, "wb", 1) as packed:
        for chunk in make_bomb(kind):
            packed.write(chunk)
    imports, call = OPEN if where == "archive" else RECEIVE
    words = [sys.executable, "-c", MEASURE.format(imports=imports, call=call), str(file)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    answer, peak = done.stdout.splitlines() if kind != "line" or where == "archive" else ["", done.stdout]
    assert int(peak) < MOST_MIB
    assert (answer.startswith("refused: ") and len(answer) < 400) or (kind == "line")
    if (kind, where) == ("line", "archive"):
        assert answer == "[]"  # without its end it is left for later


def test_a_line_that_is_too_long_is_one_unreadable_line(tmp_path: Path) -> None:
    good = json.dumps({"kind": "metrics", "attempt": 1, "time": 1.0, "step": 1, "values": {"train/loss": 2.0}}).encode()
    (tmp_path / "journal.jsonl").write_bytes(good + b"\n" + b"a" * (LONGEST_LINE + 5) + b"\n" + good + b"\n")
    history = History.load(tmp_path)
    assert (history.unreadable, history.series("train/loss")) == (["line 2"], {1: 2.0})


@pytest.mark.parametrize("extra", [-1, 0, 1, LONGEST_LINE])
def test_lines_are_split_where_they_end(extra: int) -> None:
    content = b"x\n" + b"a" * (LONGEST_LINE - 1 + extra) + b"\n" + b"y\nend"
    found = [*read_lines(io.BytesIO(content))]
    assert [size for _, size in found] == [2, LONGEST_LINE + extra, 2, 3]
    assert (found[1][0] is None) == (extra > 0)


def make_tar(*members: tuple[bytes, bytes], name: str = "runs/a/plan.json") -> io.BytesIO:
    """Return a tar of members, each by its type and its content."""
    content = b"".join(
        header(name, len(text), kind) + text.ljust(-len(text) // 512 * -512, b"\0") for kind, text in members
    )
    return io.BytesIO(content + bytes(1024))


def read_tar(stream: io.BytesIO) -> list[str]:
    with budget.open_tar(stream) as archive:
        return [member.name for member in budget.read_members(archive)]


FILE = (tarfile.REGTYPE, b"{}")


def test_an_archive_has_no_more_members_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MOST_MEMBERS", 3)
    for _ in range(2):  # each archive is counted by itself
        assert read_tar(make_tar(FILE, FILE, FILE)) == ["runs/a/plan.json"] * 3
    with pytest.raises(BudgetError, match="an archive may contain at most 3 files, got more"):
        read_tar(make_tar(FILE, FILE, FILE, FILE))


@pytest.mark.parametrize("kind", sorted(budget.EXTENDED))
def test_headers_are_no_larger_than_allowed_each_and_in_all(kind: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def long(size: int) -> tuple[bytes, bytes]:
        record = f"{size} comment="
        return kind, (record + "a" * (size - len(record) - 1) + "\n").encode()

    monkeypatch.setattr(budget, "LARGEST_HEADER", 600)
    monkeypatch.setattr(budget, "LARGEST_HEADERS", 1000)
    assert len(read_tar(make_tar(long(600), FILE, long(400), FILE))) == 2
    for members in ([long(601), FILE], [long(600), FILE, long(401), FILE]):
        with pytest.raises(BudgetError, match="name or tar header may have at most"):
            read_tar(make_tar(*members))


def test_a_member_with_holes_is_refused() -> None:
    with pytest.raises(BudgetError, match="sparse files"):
        read_tar(make_tar((tarfile.GNUTYPE_SPARSE, b"")))
    member = tarfile.TarInfo("runs/a/plan.json")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "2000"}
    with pytest.raises(BudgetError, match="sparse files"):
        read_tar(io.BytesIO(member.tobuf(tarfile.PAX_FORMAT) + bytes(1024)))


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert read_bounded(tmp_path / "file", 3) == b"abc"
    with pytest.raises(ValueError, match="the file has more than the allowed 2 bytes"):
        read_bounded(tmp_path / "file", 2)


@pytest.mark.parametrize("odd", ["pipe", "pipe with a reader", "device", "folder"])
def test_what_is_no_regular_file_is_opened_for_nothing(tmp_path: Path, odd: str) -> None:
    place = Path("/dev/null") if odd == "device" else tmp_path / "odd"
    if odd == "folder":
        place.mkdir()
    if "pipe" in odd:
        os.mkfifo(place)
    reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK) if odd == "pipe with a reader" else None
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(io.UnsupportedOperation, match="is not a regular file"):
        budget.open_regular(place)
    with pytest.raises(OSError, match=r"is not a regular file|Is a directory"):
        budget.open_to_append(place)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    if reader is not None:
        os.close(reader)


def test_a_file_is_appended_to_or_made_and_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    for text in (b"a", b"b"):
        with budget.open_to_append(tmp_path / "file") as stream:
            stream.write(text)
            assert not os.get_inheritable(stream.fileno())
    assert (tmp_path / "file").read_bytes() == b"ab"
    with budget.open_regular(tmp_path / "file") as opened:
        assert not os.get_inheritable(opened.fileno())
    with pytest.raises(FileNotFoundError):
        budget.open_to_append(tmp_path / "none" / "file")


def test_a_large_plan_and_an_endless_one_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b" " * (LARGEST_PLAN + 1))
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "plan.json", tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match=r"more than|not a regular file"):
            read_bounded(file, LARGEST_PLAN)


def test_files_of_json_are_read_by_the_one_function_that_bounds_their_depth() -> None:
    root = Path(__file__).parents[2]
    files = [*(root / "sparsebp_cli").rglob("*.py"), *(root / "plugins" / "sparsebp-lab").rglob("*.py")]
    found = [file for file in files if re.search(r"json\.loads\(\s*read_bounded", file.read_text(encoding="utf-8"))]
    assert [file.name for file in found] == ["budget.py"]


def test_a_file_that_is_deleted_between_two_looks_has_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run" / "journal.jsonl"
    assert size_of(file) == 0
    file.parent.mkdir()
    file.write_bytes(b"123")
    assert size_of(file) == 3
    assert size_of(file / "below") == 0
    file.unlink()
    monkeypatch.setattr(Path, "exists", lambda _: True)  # as it was a moment ago
    assert size_of(file) == 0
