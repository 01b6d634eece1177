"""Identify equal runs by recipe, code and data, so that a finished run need not be repeated."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from sparsebp_cli.entry_point import find_version
from sparsebp_cli.metrics import find_text_metric_sources
from sparsebp_cli.plan.plan import content_hash, find_sources
from sparsebp_cli.plan.repository import Repository
from sparsebp_cli.policy import find_policies
from sparsebp_cli.policy.shelf import SHELF
from sparsebp_cli.recipe.schema import Recipe

PACKAGES = ("sparsebp", "torch", "transformers")
MOST_BYTES_READ = 64 * 2**20  # of one file; a larger file counts by size and modification time


def identify(group: str, seed: int, code: Mapping[str, str], data: Mapping[str, str], generation: int = 0) -> str:
    """Return a run id that depends on everything that decides a result: the recipe (by its group's hash), the seed, the
    code (:func:`find_code`) and the data (:func:`find_data`). ``generation`` distinguishes deliberate repetitions."""
    content = {"group": group, "seed": seed, "code": code, "data": data}
    return content_hash(content | ({"generation": generation} if generation else {}))


def find_data(recipe: Recipe) -> dict[str, str]:
    """Return the digest of each local file or folder that a resolved recipe names. Other names belong to an installed
    package or have their own revision."""
    named = find_sources(recipe).values()
    return {name: _digest(Path(name)) for name in named if Path(name).is_absolute()}


def find_code(recipe: Recipe) -> dict[str, str]:
    """Return the versions of the packages that decide what a recipe computes, including its policies' packages. Add our
    ``commit`` if we run from a repository."""
    found, code = find_policies(), {}
    for name in PACKAGES:
        code[name] = find_version(name) or "unknown"  # running from source without installation
    for entry in recipe.policy:
        if entry.name in found:
            package, _, number = found[entry.name].source.partition(" ")
            # Our version implies the shelf released with it. Leaving that shelf out keeps older checkpoints and run ids
            # valid, from when its policies were built in. Only a shelf of another version counts separately.
            if package != SHELF or number != code["sparsebp"]:
                code.setdefault(package, number)
    if recipe.model.quantization is not None:
        package = recipe.model.quantization.package
        if number := find_version(package):
            code[package] = number
    generate = recipe.measure.generate
    for source in [] if generate is None else find_text_metric_sources(generate.metrics):
        package, _, number = source.partition(" ")
        code.setdefault(package, number)
    repository = Repository.at(Path(__file__).parents[2])
    commit = "" if repository is None else repository.head()
    return code | ({"commit": commit} if commit else {})


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        try:
            found = file.stat()
            digest.update(f"{file.relative_to(path)}\n{found.st_size}\n".encode())
            if file.is_file():
                large = found.st_size > MOST_BYTES_READ
                digest.update(str(found.st_mtime_ns).encode() if large else file.read_bytes())
        except OSError:  # the run reports what is wrong with the file
            continue
    return digest.hexdigest()[:16]
