"""A manifest tells what of a folder is not whole, and opens nothing that could wait or never end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sparsebp_cli.run import manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "below").mkdir(parents=True)
    (folder / "weights").write_bytes(b"abc")
    (folder / "below" / "x").write_bytes(b"def")
    manifest.write_manifest(folder)
    manifest.write_manifest(folder)  # again: it does not list itself
    assert manifest.find_damage(folder) == ""
    assert json.loads((folder / manifest.MANIFEST).read_text())["format"] == 1
    return folder


def list_files(folder: Path, listed: dict[str, str]) -> None:
    (folder / manifest.MANIFEST).write_text(json.dumps({"sha256": listed}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [("removed", "No such file"), ("emptied", "weights does not match its checksum"), ("one bit", "does not match"),
     ("no manifest", "No such file"), ("leads out", "'../other' is outside the folder"),
     ("absolute", "is outside the folder"), ("nothing listed", "the manifest is empty")],
)  # fmt: skip
def test_a_manifest_tells_what_is_not_whole(folder: Path, damage: str, said: str) -> None:
    other = folder.parent / "other"
    other.write_bytes(b"x")
    match damage:
        case "removed":
            (folder / "below" / "x").unlink()
        case "emptied":
            (folder / "weights").write_bytes(b"")
        case "one bit":
            (folder / "weights").write_bytes(b"abb")
        case "no manifest":
            (folder / manifest.MANIFEST).unlink()
        case "leads out":  # to a file that is as listed
            list_files(folder, {"../other": manifest.digest(other)})
        case "absolute":
            list_files(folder, {str(other): manifest.digest(other)})
        case _:
            list_files(folder, {})
    assert said in manifest.find_damage(folder)


@pytest.mark.promise("R22")
@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("odd", ["a pipe", "an endless device", "a link", "a linked folder", "a socket"])
def test_what_no_run_writes_is_damage_and_is_not_opened(folder: Path, odd: str, *, is_listed: bool) -> None:
    import socket

    place = folder / "below" / "odd"
    match odd:
        case "a pipe":
            os.mkfifo(place)
        case "an endless device":
            place.symlink_to("/dev/zero")
        case "a link":
            place.symlink_to(folder / "weights")
        case "a linked folder":
            place.symlink_to(folder.parent)
        case _:
            with socket.socket(socket.AF_UNIX) as opened:
                opened.bind(os.path.relpath(place))
    if is_listed:
        list_files(folder, {"below/odd": "0" * 64})
    assert manifest.find_damage(folder) == "below/odd is neither a regular file nor a folder"


@pytest.mark.promise("R22")
@pytest.mark.parametrize("odd", ["pipe", "device", "too large"])
def test_a_manifest_that_never_ends_is_damage(folder: Path, odd: str) -> None:
    file = folder / manifest.MANIFEST
    file.unlink()
    match odd:
        case "pipe":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case _:
            with file.open("wb") as opened:
                opened.truncate(1 << 40)
    assert manifest.find_damage(folder)


@pytest.mark.promise("R22")
def test_a_file_of_holes_is_not_read(folder: Path) -> None:
    with (folder / "weights").open("r+b") as opened:
        opened.truncate(1 << 40)
    assert "is a sparse file (a file with holes), which is not allowed" in manifest.find_damage(folder)
