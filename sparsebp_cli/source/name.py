"""Where the name of a model or dataset leads: an installed name, a file of a package, a path, else an id of the hub."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sparsebp_cli.errors import DataError, did_you_mean
from sparsebp_cli.policy.phrase import shorten

MODELS = "sparsebp.models"
DATASETS = "sparsebp.datasets"
PACKAGE = "package:"
MOST_NAMES = 10_000  # that are compared with a misspelt one


def find_source(name: str, group: str, folders: Sequence[Path] = ()) -> str | Path | Any:
    """Find what a name in a recipe stands for.

    Args:
        name: An installed name, ``package:PACKAGE/PATH``, a local path or a hub id.
        group: Entry-point group of installed names.
        folders: Where a relative path is looked for, in this order; none: the working folder.

    Returns:
        The loaded entry point, a path that exists, or the hub id as it was.

    Raises:
        DataError: A path or package does not exist, or the entry point is broken.
    """
    for entry in entry_points(group=group):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as error:
                raise DataError(f"{name} ({entry.value}) is broken: {type(error).__name__}: {error}") from None
    if name.startswith(PACKAGE):
        return _inside_package(name)
    folders = folders or [Path.cwd()]
    found = find_here(name, folders)
    if found is not None:
        return found
    if is_path(name):
        raise DataError(f"no file or folder {shorten(name)}{tell_search(name, group, folders)}")
    return name


def find_here(name: str, folders: Sequence[Path]) -> Path | None:
    """Find a path, which is relative to one of some folders unless it is absolute.

    Args:
        name: As a recipe has it; ``~`` is the user's home.
        folders: In the order in which they are looked in.

    Returns:
        The first that exists, absolute; None: there is none.
    """
    try:
        path = Path(name).expanduser()
        for folder in folders:
            if (folder / path).exists() and (folder / path) != folder:
                return (folder / path).resolve()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or a home that nobody has
        return None
    return None


def is_path(name: str) -> bool:
    """Return whether a name can only be a path: an id of the hub has one slash at most and no suffix of a data file."""
    suffixes = (".txt", ".text", ".md", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".safetensors")
    return name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith(suffixes)


def tell_search(name: str, group: str, folders: Sequence[Path]) -> str:
    """Return the places in which a name was looked for, and what may have been meant.

    Args:
        name: That was not found.
        group: Entry-point group of installed names.
        folders: In which it was looked for.

    Returns:
        A text to be appended to a sentence.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # a home that nobody has
        path = Path(name)
    looked = list(dict.fromkeys(str((folder / path).parent) for folder in folders))
    known = [*sorted(entry_points(group=group).names), *_list_beside(path, folders)]
    return f"; looked in: {', '.join(shorten(place, 200) for place in looked)}{did_you_mean(name, known)}"


def hub_folder(name: str, kind: str) -> Path | None:
    """Return the folder in which the hub's cache has an id.

    Args:
        name: The id.
        kind: ``models`` or ``datasets``.

    Returns:
        The newest snapshot; None: the cache does not have it.
    """
    snapshots = hub_cache() / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    try:
        found = [folder for folder in snapshots.iterdir() if folder.is_dir()]
    except (OSError, ValueError):
        return None
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def hub_cache() -> Path:
    """Return where the hub's library keeps what it has fetched."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _list_beside(path: Path, folders: Sequence[Path]) -> Iterator[str]:
    for folder in folders:
        try:
            beside = sorted((folder / path).parent.iterdir())[:MOST_NAMES]
        except (OSError, ValueError):
            continue
        yield from (str(path.parent / one.name) for one in beside)


def _inside_package(name: str) -> Path:
    package, _, inside = name.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{name}: there is no installed package {package!r}")
    root = Path(spec.submodule_search_locations[0]).resolve()
    path = (root / inside).resolve()
    if not path.is_relative_to(root) or not path.exists():
        beside = path.parent.iterdir() if path.parent.is_dir() and path.is_relative_to(root) else ()
        known = [str(one.relative_to(root)) for one in beside]
        raise DataError(f"{name}: the package has no {inside!r}{did_you_mean(inside, known)}")
    return path
