"""Read and write labels: the tags and the note that people give a run, in ``labels.json`` beside its plan.

Training, digest and config fingerprint do not depend on labels, so a running run can get them too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import durable
from sparsebp_cli.run.budget import LARGEST_SMALL, read_json

FILE = "labels.json"
TAG = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")
LONGEST_NOTE = 1000


@dataclass(frozen=True)
class Labels:
    """The tags and the note of a run."""

    tags: tuple[str, ...] = ()  # sorted, without duplicates; ``@TAG`` refers to the runs with a tag
    note: str = ""  # one line

    @classmethod
    def load(cls, run_folder: Path) -> Self:
        """Read the labels of a run. A missing or damaged file counts as empty."""
        try:
            content = read_json(run_folder / FILE, LARGEST_SMALL)
            found = {tag for tag in content["tags"] if TAG.fullmatch(tag)}
            return cls(tuple(sorted(found)), make_note(str(content["note"])))
        except (OSError, ValueError, KeyError, TypeError, UsageError):
            return cls()

    def save(self, run_folder: Path) -> None:
        """Write the labels atomically. Raise ``UsageError`` if the path is something else than a regular file."""
        file = run_folder / FILE
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise UsageError(f"{file} is not a regular file")
        durable.write_file(file, json.dumps({"tags": self.tags, "note": self.note}) + "\n")


def check_tag(tag: str) -> str:
    """Return the tag. Raise UsageError if it could be mistaken for another word or value."""
    if tag == "last" or not TAG.fullmatch(tag):
        raise UsageError(
            f"a tag must be a letter, then up to 39 letters, digits, _ . or -, but not 'last', got {tag!r}"
        )
    return tag


def make_note(text: str) -> str:
    """Return a note as one line. Raise UsageError if it is too long."""
    line = " ".join(text.split())
    if len(line) > LONGEST_NOTE:
        raise UsageError(f"a note must have at most {LONGEST_NOTE} characters, got {len(line)}")
    return line
