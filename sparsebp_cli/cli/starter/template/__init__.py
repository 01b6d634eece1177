"""Fill template files with ``string.Template``, and write them without overwriting anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template

from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import durable
from sparsebp_cli.run.budget import open_regular


def fill(name: str, /, **values: str) -> str:
    """Return the text of a template in this folder with its placeholders replaced."""
    text = (Path(__file__).parent / f"{name}.template").read_text(encoding="utf-8")
    return Template(text).substitute(values)


def check_new(folder: Path) -> None:
    """Raise ``UsageError`` unless the folder is empty or does not exist."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            kind = "is not empty" if folder.is_dir() else "is a file"
            raise UsageError(f"{folder} {kind}; name a new folder; nothing was written")
    except OSError as error:
        raise UsageError(f"{folder} cannot be used: {error.strerror}") from None


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files by their paths in a folder. Keep a file that already has the same text. Raise ``UsageError``, before
    anything is written, if a file with other content exists."""
    try:
        for name, text in files.items():
            if (folder / name).exists() and not _holds(folder / name, text):
                raise UsageError(f"{folder / name} exists with other content; nothing was written")
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            durable.write_file(folder / name, text)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or folder}: {error.strerror or error}") from None


def _holds(file: Path, text: str) -> bool:
    content = text.encode()
    with open_regular(file) as stream:  # a pipe of that name would wait for ever
        return stream.read(len(content) + 1) == content
