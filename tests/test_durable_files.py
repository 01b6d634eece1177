"""Files and folders are on the disk before they have their names, and what fails leaves nothing."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from sparsebp_cli.run import durable


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced, renamed and linked, in this order; ``part`` is a name of what is not complete yet."""
    found: list[str] = []
    fsync = os.fsync

    def name(path: str | Path) -> str:
        # A file without a name is called #NUMBER by the system.
        is_part = Path(path).name.startswith((durable.PART, "#")) or str(path).startswith("/proc/")
        return "part" if is_part else Path(path).name

    def note(descriptor: int) -> None:
        found.append(f"sync {name(Path(f'/proc/self/fd/{descriptor}').readlink())}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    for way in ("rename", "replace", "link"):
        function = getattr(os, way)

        def move(source: Path, place: Path, function=function, **options: object) -> None:  # type: ignore[no-untyped-def]
            found.append(f"{name(source)} becomes {name(place)}")
            function(source, place, **options)

        monkeypatch.setattr(os, way, move)
    return found


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """A folder with a file, a folder with another, and links that lead nowhere and to a file elsewhere."""
    folder = tmp_path / "from" / "made"
    (folder / "below").mkdir(parents=True)
    (folder / "a").write_text("a")
    (folder / "below" / "b").write_text("b")
    (tmp_path / "elsewhere").write_text("c")
    (folder / "nowhere").symlink_to(tmp_path / "no such file")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    return folder


CONTENT = {"sync a", "sync b", "sync below"}


def test_a_file_is_on_the_disk_before_its_name_and_its_name_after(tmp_path: Path, order: list[str]) -> None:
    durable.write_file(tmp_path / "plan", "x")
    assert order == ["sync part", "part becomes plan", f"sync {tmp_path.name}"]


@pytest.fixture(params=["unnamed", "named", "no /proc"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system with files that have no name, one without, and a machine on which they get none."""
    link, opened = os.link, os.open

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *rest, **more)  # type: ignore[arg-type]

    def find_none(source: object, place: object, **options: object) -> None:
        if str(source).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        link(source, place, **options)  # type: ignore[arg-type]

    if request.param == "named":
        monkeypatch.setattr(os, "open", refuse)
    if request.param == "no /proc":
        monkeypatch.setattr(os, "link", find_none)
    return str(request.param)


def test_a_file_is_replaced_as_a_whole_on_every_file_system(
    tmp_path: Path, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.umask(0o027)
    synced: list[int] = []  # bytes of each file that is waited for
    fsync = os.fsync

    def note(descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            synced.append(found.st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    for before, content in ((None, b"first"), (b"first", b"second and longer"), (b"second and longer", b"3")):
        with durable.replacing(tmp_path / "plan") as stream:
            stream.write(content)
            assert {file.name for file in tmp_path.iterdir()} <= {"plan"} or system == "named"
            assert before is None or (tmp_path / "plan").read_bytes() == before
        assert (tmp_path / "plan").read_bytes() == content
        assert (tmp_path / "plan").stat().st_mode & 0o777 == 0o640
        assert synced == [len(content)] * (2 if system == "no /proc" else 1)
        synced.clear()

    def fail() -> None:
        with durable.replacing(tmp_path / "plan") as stream:
            stream.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "plan").read_bytes() == b"3"
    assert [file.name for file in tmp_path.iterdir()] == ["plan"]


def test_a_new_file_is_on_the_disk_before_its_name_and_its_name_after(tmp_path: Path, order: list[str]) -> None:
    assert durable.write_new(tmp_path / "plan", "x")
    assert order[-2:] == ["part becomes plan", f"sync {tmp_path.name}"]
    assert order[0] == "sync part"
    del order[:]
    assert not durable.write_new(tmp_path / "plan", "y")
    assert "part becomes plan" in order


def test_a_folder_is_moved_after_all_of_its_content_is_on_the_disk(
    tmp_path: Path, part: Path, order: list[str]
) -> None:
    (tmp_path / "to").mkdir()
    durable.move(part, tmp_path / "to" / "place")
    at = order.index("made becomes place")
    assert {*order[:at]} == {*CONTENT, "sync made"}
    assert order[at + 1 :] == ["sync to", "sync from"]
    del order[:]
    durable.move(tmp_path / "to" / "place", tmp_path / "to" / "again")
    assert order[order.index("place becomes again") + 1 :] == ["sync to"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_takes_a_name_after_all_of_its_content_is_on_the_disk(
    tmp_path: Path, part: Path, order: list[str], *, is_there: bool
) -> None:
    place = part.parent / "place"
    (part.parent / f"{durable.PART}old-place").mkdir()  # of a process that was killed
    (part.parent / f"{durable.PART}old-place" / "old").touch()
    if is_there:
        place.mkdir()
        (place / "before").touch()
    durable.put_folder(part, place)
    at = order.index("made becomes place")
    gone = ["place becomes part"] if is_there else []
    assert ({*order[: at - len(gone)]}, order[at - len(gone) : at]) == ({*CONTENT, "sync made"}, gone)
    assert order[at + 1 :] == ["sync from"]
    assert sorted(file.name for file in place.iterdir()) == ["a", "below", "link", "nowhere"]
    assert [file.name for file in part.parent.iterdir()] == ["place"]


def test_a_filled_folder_takes_its_name_after_its_content_is_on_the_disk(tmp_path: Path, order: list[str]) -> None:
    place = tmp_path / "new" / "place"
    with durable.filling(place) as folder:
        assert not place.exists()
        (folder / "below").mkdir()
        (folder / "below" / "a").write_text("a")
    at = order.index("part becomes place")
    assert {*order[:at]} == {f"sync {tmp_path.name}", "sync a", "sync below", "sync part"}
    assert order[at + 1 :] == ["sync new"]
    assert [file.name for file in place.parent.iterdir()] == ["place"]


def test_folders_are_made_with_all_of_their_names_on_the_disk(tmp_path: Path, order: list[str]) -> None:
    durable.make_folder(tmp_path / "a" / "b" / "c", mode=0o700)
    assert sorted(order) == sorted([f"sync {tmp_path.name}", "sync a", "sync b"])
    assert (tmp_path / "a" / "b" / "c").stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        durable.make_folder(tmp_path / "a")
    durable.make_folder(tmp_path / "a", exist_ok=True)


def test_what_is_appended_or_cut_is_on_the_disk(tmp_path: Path, order: list[str]) -> None:
    file = tmp_path / "journal"
    durable.append(file, b"one\n")
    assert order == ["sync journal", f"sync {tmp_path.name}"]
    durable.append(file, b"half")
    assert order[2:] == ["sync journal"]
    durable.cut(file, 4)
    assert (order[3:], file.read_bytes()) == (["sync journal"], b"one\n")


def test_an_append_that_fails_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "journal"
    durable.append(file, b"one\n")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        durable.append(file, b"half of the next")
    assert file.read_bytes() == b"one\n"


def test_only_a_private_file_is_kept_from_others(tmp_path: Path) -> None:
    os.umask(0o022)
    durable.write_file(tmp_path / "private", "x", private=True)
    durable.write_file(tmp_path / "other", b"x")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("private", "other")] == [0o600, 0o644]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_filled_folder_takes_the_place_of_nothing(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "folder":
        place.mkdir()
        (place / "kept").touch()
    else:
        place.touch()
    with pytest.raises(FileExistsError, match="exists and is not empty"), durable.filling(place) as folder:
        (folder / "a").touch()
    assert [file.name for file in tmp_path.rglob("*")] == (["place", "kept"] if kind == "folder" else ["place"])


def test_a_folder_that_is_not_filled_to_its_end_is_removed(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()  # an empty folder may be there

    def fill() -> None:
        with durable.filling(tmp_path / "place") as folder:
            (folder / "a").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    assert [file.name for file in tmp_path.rglob("*")] == ["place"]
    with durable.filling(tmp_path / "place") as folder:
        (folder / "a").touch()
    assert (tmp_path / "place" / "a").exists()


def test_what_a_killed_process_left_of_a_folder_goes_and_no_part_of_a_living_one(tmp_path: Path) -> None:
    left = tmp_path / f"{durable.PART}place.1-1"
    (left / "below").mkdir(parents=True)
    (tmp_path / f"{durable.PART}place.2-2").symlink_to(tmp_path)
    inner: list[Path] = []

    def fill() -> None:
        with durable.filling(tmp_path / "place") as folder:
            inner.append(folder)

    with durable.filling(tmp_path / "place") as held:
        assert not left.exists()
        thread = threading.Thread(target=fill)
        thread.start()
        thread.join()
        assert held.is_dir()
        assert inner != [held]


def test_a_link_is_removed_alone_and_a_folder_with_its_content(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    durable.remove(tmp_path / "link")
    assert [file.name for file in tmp_path.rglob("*")] == ["folder", "file"]
    durable.remove(tmp_path / "folder")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("length", ["one byte", "four bytes"])
def test_a_name_of_255_bytes_can_be_written(tmp_path: Path, length: str) -> None:
    letters, number = ("nmfl", 255) if length == "one byte" else ("\N{FOX FACE}\N{OX}\N{CAT}\N{DOG}", 63)
    replaced, new, folder, filled = (tmp_path / ("-" * (number % 4) + letter * number)[:255] for letter in letters)
    for content in ("x", "y"):
        durable.write_file(replaced, content)
    assert durable.write_new(new, "x")
    for _ in range(2):
        with durable.filling(tmp_path / "made") as part:
            (part / "a").touch()
        durable.put_folder(tmp_path / "made", folder)
    with durable.filling(filled):
        pass
    assert len([*tmp_path.iterdir()]) == 4


def test_a_write_that_fails_leaves_the_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.html"
    durable.write_file(file, "before")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        durable.write_file(file, "after")
    assert ([*tmp_path.iterdir()], file.read_text()) == ([file], "before")


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_is_whole_and_takes_the_place_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    file = tmp_path / "request"
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="not permitted"):
            durable.write_new(file, "stop")
    assert [*tmp_path.iterdir()] == []  # an empty one would keep every later request out
    assert durable.write_new(file, "kill")
    assert not durable.write_new(file, "stop")
    assert ([*tmp_path.iterdir()], file.read_text()) == ([file], "kill")


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    durable.write_file(link, "x")
    durable.write_file(Path("/dev/null"), "x")
    assert link.is_symlink()
    assert real.read_text() == "x"
    assert Path("/dev/null").is_char_device()
