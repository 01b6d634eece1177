"""Plugins of this repository as installed distributions, whether or not they are installed here."""

from __future__ import annotations

import tomllib
from pathlib import Path

from sparsebp_cli.policy import FoundPolicy, Kind, find_policies
from sparsebp_cli.policy.known_kind import find_kinds
from sparsebp_cli.policy.shelf import MOVED

PLUGINS = Path(__file__).parents[1] / "plugins"
PACKAGES = {"sparsebp", *(file.parent.name for file in PLUGINS.glob("*/pyproject.toml"))}
SHELF_TESTS = PLUGINS / "sparsebp-shelf" / "tests"


def find_ours() -> dict[str, FoundPolicy]:
    """Return the policies by name that tables of these tests have: those built in, and those that were.

    What is new on the shelf, as what is new in any package, brings its own tests and changes none of these.
    """
    policies = find_policies().items()
    return {name: found for name, found in policies if found.source.split()[0] == "sparsebp" or name in MOVED}


def find_packaged() -> dict[str, FoundPolicy]:
    """Return the policies by name that packages of this repository have, as far as they are installed.

    What tests say of each of them need not hold for a package of somebody else, which is installed here too.
    """
    return {name: found for name, found in find_policies().items() if found.source.split()[0] in PACKAGES}


def find_our_kinds() -> tuple[Kind, ...]:
    """Return the kinds of policies, and aspects of kinds, that SparseBP and its shelf have; see ``find_ours``."""
    found = find_kinds()
    ours = {"sparsebp_cli", "sparsebp_shelf"}
    return tuple(kind for kind in (*found.kinds, *found.aspects) if kind.policy.__module__.partition(".")[0] in ours)


def write_metadata(plugin: Path, folder: Path) -> None:
    """Write what pip would write: on the import path, the folder makes a plugin's entry points known."""
    project = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
