"""Resolve the name of a model or dataset: an installed name, a file of a package, a path, or a hub id."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparsebp_cli.entry_point import entry_points, tell_home
from sparsebp_cli.errors import AbsentDataError, DataError, did_you_mean
from sparsebp_cli.policy.error_text import shorten

MODELS = "sparsebp.models"
DATASETS = "sparsebp.datasets"
PACKAGE = "package:"
# Names that were built in, and are now in sparsebp-tools.
TOOLS = {MODELS: ("minilm-l6", "smollm2-135m"), DATASETS: ("brown-genres", "movie-snippets")}
MOST_NAMES = 10_000  # number of names compared with a misspelt one


def find_source(name: str, group: str, folders: Sequence[Path] = ()) -> str | Path | Any:
    """Resolve a name. Return the loaded entry point of an installed name, the path of ``package:PACKAGE/PATH`` or of a
    local path, or else the hub id unchanged. Relative paths are searched in the folders in order, by default the
    working folder. Raise DataError if a path or package does not exist, or the entry point is broken."""
    # Try installed names first. See decision 27.
    for entry in entry_points(group=group):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as error:
                raise DataError(f"{name} ({entry.value}) is broken: {type(error).__name__}: {error}") from None
    if name.startswith(PACKAGE):
        return _inside_package(name)
    folders = folders or [Path.cwd()]
    found = find_path(name, folders)
    if found is not None:
        return found
    if name in TOOLS.get(group, ()):
        raise AbsentDataError(f"{name} is {tell_home('sparsebp-tools')}")
    if is_path(name):
        raise AbsentDataError(f"no file or folder {shorten(name)}{search_hint(name, group, folders)}")
    return name


def find_path(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the first existing path, absolute; None if there is none. A relative name is searched in the folders in
    order, and ``~`` is the user's home."""
    try:
        path = Path(name).expanduser()
        for folder in folders:
            if (folder / path).exists() and (folder / path) != folder:
                return (folder / path).resolve()
    except (OSError, ValueError, RuntimeError):  # an invalid file name, or the home of an unknown user
        return None
    return None


def is_path(name: str) -> bool:
    """Return whether a name can only be a path. A hub id has at most one slash and no suffix of a data file."""
    suffixes = (".txt", ".text", ".md", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".safetensors", ".gz", ".zst")
    return name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith(suffixes)


def search_hint(name: str, group: str, folders: Sequence[Path]) -> str:
    """Return the searched folders and the nearest known name, to append to an error."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # the home of an unknown user
        path = Path(name)
    searched = list(dict.fromkeys(str((folder / path).parent) for folder in folders))
    known = [*sorted(entry_points(group=group).names), *_list_beside(path, folders)]
    return f"; searched in: {', '.join(shorten(place, 200) for place in searched)}{did_you_mean(name, known)}"


def hub_folder(name: str, kind: str) -> Path | None:
    """Return the newest cached snapshot of a hub id, of kind ``models`` or ``datasets``; None if there is none."""
    snapshots = hub_cache() / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    try:
        found = [folder for folder in snapshots.iterdir() if folder.is_dir()]
    except (OSError, ValueError):
        return None
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def hub_cache() -> Path:
    """Return the cache folder of the hub library."""
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
