"""Check a data folder: which files it may contain, and where its settings may point.

The library that reads data chooses by suffix what to do with a file. It unpacks archives, decodes images, and follows
addresses in a README. So a folder may hold only the formats that are also allowed as single files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.run.budget import read_bounded
from sparsebp_cli.source.reader import FORMATS, find_suffix

READ = tuple(suffix for suffix in FORMATS if suffix not in {".md", ".text"})  # in a folder, these two are not data
# The library ignores the last three.
BESIDE = ("README", "LICENSE", "NOTICE", "CITATION", "CHANGELOG", "config.json", "dataset_info", "dataset_dict.json")
SETTINGS = ("README.md", ".huggingface.yaml")
LARGEST_SETTINGS = 1024 * 1024
MOST_BRACKETS = 1000  # in settings: parsing time is quadratic in their depth
LEADING = ("data_files", "data_dir")


def check_folder(folder: Path) -> list[Path]:
    """Return the files that the library must read: all, or none if the folder's settings choose. Raise DataError if
    there are others than data, or the settings point outside the folder."""
    found = list[Path]()
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]  # the library skips these
        for file in (Path(place) / name for name in sorted(files)):
            if file.name.startswith(".") or file.name.startswith(BESIDE):
                continue
            found.append(file)
            if find_suffix(file) not in READ:
                raise DataError(
                    f"{file}: a folder of data may contain only {', '.join(READ)}, got "
                    f"{shorten(file.suffix) or 'no suffix'}"
                )
            if not file.is_file():
                raise DataError(f"{file}: is not a regular file")
    if not found:
        raise DataError(f"{folder}: is an empty folder")
    choices = [_check_settings(folder / name) for name in SETTINGS if os.path.lexists(folder / name)]
    return [] if any(choices) else found


def _check_settings(file: Path) -> bool:
    """Return whether settings choose files."""
    import yaml

    try:
        text = read_bounded(file, LARGEST_SETTINGS).decode()
        if file.suffix == ".md":
            head, _, rest = text.partition("\n")
            text = rest.partition("\n---")[0] if head.strip() == "---" else ""
        if max(text.count("["), text.count("{")) > MOST_BRACKETS or "- " * 50 in text:
            raise ValueError("nested too deeply")
        content = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file}: the settings at its top (YAML) cannot be read: {reason}") from None
    configs, chooses = content.get("configs") if isinstance(content, dict) else None, False
    for config in configs if isinstance(configs, list) else ():
        for key in LEADING if isinstance(config, dict) else ():
            chooses |= key in config
            for path in _find_paths(config.get(key), set()):
                if path.startswith(("/", "~")) or ".." in path.split("/") or "::" in path or "://" in path:
                    raise DataError(f"{file}: {key} must name files in the same folder, got {shorten(path)!r}")
    return chooses


def _find_paths(value: object, seen: set[int]) -> Iterator[str]:
    """Yield every text within a value. Visit parts that several YAML aliases share only once."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and id(value) not in seen:
        seen.add(id(value))
        for part in value.values() if isinstance(value, dict) else value:
            yield from _find_paths(part, seen)
