"""Read entry points and versions of installed packages, once for each state of ``sys.path``.

``importlib.metadata.entry_points`` reads the metadata of every installed package at each call: 10 to 30 ms, five times
for a recipe. Installing or removing a package changes its folder's modification time, which invalidates the cache.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

State = tuple[tuple[str, int], ...]  # of sys.path: each folder and its modification time


def entry_points(group: str) -> metadata.EntryPoints:
    """Return the entry points of a group, as ``importlib.metadata.entry_points`` does."""
    return _read(group, _state())


def find_version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    return _read_version(package, _state())


def tell_home(package: str) -> str:
    """Return the end of a sentence: which package of this repository provides something, and how to install it."""
    return f"in the package {package}: python -m pip install {package} (in a checkout: ./plugins/{package})"


def import_moved(module: str, name: str, homes: Mapping[str, str]) -> Any:
    """Return a public name of 0.5 from the module to which it moved, with a warning. The next release removes this.

    Args:
        module: The module that had the name in 0.5.
        name: The name.
        homes: The new module of each moved name.

    Returns:
        The object of that name.

    Raises:
        AttributeError: for another name.
        ModuleNotFoundError: if the package that has it is not installed; it says how to install it.
    """
    if name not in homes:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    package = homes[name].partition(".")[0]
    try:
        found = getattr(import_module(homes[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        text = f"{name} is {tell_home(package.replace('_', '-'))}"
        raise ModuleNotFoundError(text, name=package) from None
    # Not a DeprecationWarning: Python hides it when sparsebp_cli itself is the caller, as for `sparsebp_cli.audit`.
    warnings.warn(f"{name} has moved: import it from {homes[name]}", FutureWarning, stacklevel=3)
    return found


class MovedModule(ModuleType):
    """A module of 0.5 whose public names moved to another package; see :func:`import_moved`. The next release removes
    this.

    Args:
        name: The full name of the module in 0.5.
        homes: The new module of each public name.
    """

    def __init__(self, name: str, homes: Mapping[str, str]) -> None:
        super().__init__(name)
        self.HOMES = homes

    def __getattr__(self, name: str) -> Any:
        return import_moved(self.__name__, name, self.HOMES)


def find_tool(name: str) -> Any:
    """Return the tool that a package of this repository registers under a name in the group ``sparsebp.tools``. Return
    None if it is not installed or broken; its commands report why."""
    for entry in entry_points("sparsebp.tools").select(name=name):
        with suppress(Exception):
            return entry.load()
    return None


def find_source(entry: metadata.EntryPoint) -> str:
    """Return the distribution and version of an entry point, such as ``sparsebp 0.2.0``."""
    return "unknown" if entry.dist is None else _describe(entry.dist)


@lru_cache(maxsize=256)
def _describe(dist: metadata.Distribution) -> str:
    """Describe a distribution. Cached, because reading its name and version takes milliseconds each."""
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
