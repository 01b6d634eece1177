"""Entry points and versions of installed packages, read once for each state of ``sys.path``.

``importlib.metadata.entry_points`` reads the metadata of every installed package at every call: 10 to 30 ms each, five
times for a recipe. A package that is installed or removed changes the time of its folder, and is seen.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

State = tuple[tuple[str, int], ...]  # of sys.path: each folder, and when it changed


def entry_points(group: str) -> metadata.EntryPoints:
    """Return the entry points of a group, as ``importlib.metadata.entry_points`` does."""
    return _read(group, _state())


def find_version(package: str) -> str:
    """Return the version of an installed package, empty where it is not installed."""
    return _read_version(package, _state())


def tell_home(package: str) -> str:
    """Return where something is that a package of this repository brings, and how to get it: the end of a sentence."""
    return f"in the package {package}: python -m pip install {package}, or plugins/{package} of a checkout"


def find_tool(name: str) -> Any:
    """Return what ``plugins/sparsebp-tools`` offers by a name of the group ``sparsebp.tools``; None if it is not
    installed, or broken, which its verbs tell."""
    for entry in entry_points("sparsebp.tools").select(name=name):
        with suppress(Exception):
            return entry.load()
    return None


def find_source(entry: metadata.EntryPoint) -> str:
    """Return the distribution of an entry point and its version, such as ``sparsebp 0.2.0``."""
    return "unknown" if entry.dist is None else _describe(entry.dist)


@lru_cache(maxsize=256)
def _describe(dist: metadata.Distribution) -> str:
    """Describe a distribution; reading its name and its version takes milliseconds each."""
    try:
        return f"{dist.name} {dist.version}"
    except Exception:  # its metadata are damaged
        return "unknown"


def _state() -> State:
    return tuple((folder, _modified(folder)) for folder in sys.path)


def _modified(folder: str) -> int:
    with suppress(OSError):
        return Path(folder or ".").stat().st_mtime_ns
    return 0


@lru_cache(maxsize=32)
def _read(group: str, state: State) -> metadata.EntryPoints:  # noqa: ARG001 - the cache's key
    return metadata.entry_points(group=group)


@lru_cache(maxsize=64)
def _read_version(package: str, state: State) -> str:  # noqa: ARG001 - as above
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""
