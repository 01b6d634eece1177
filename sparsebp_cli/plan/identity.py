"""What makes two runs the same: recipe, code and data. A run like one that finished need not be repeated."""

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
MOST_BYTES_READ = 64 * 2**20  # of one file; of a larger one, size and time of its last change count


def identify(group: str, seed: int, code: Mapping[str, str], data: Mapping[str, str], generation: int = 0) -> str:
    """Return a run id that depends on all that decides a result: the recipe by the hash of its group, the seed, the
    code of :func:`find_code` and the data of :func:`find_data`. ``generation`` tells deliberate repetitions apart."""
    content = {"group": group, "seed": seed, "code": code, "data": data}
    return content_hash(content | ({"generation": generation} if generation else {}))


def find_data(recipe: Recipe) -> dict[str, str]:
    """Return the digest of each local file or folder that a resolved recipe names; others belong to an installed
    package or have a revision of their own."""
    named = find_sources(recipe).values()
    return {name: _digest(Path(name)) for name in named if Path(name).is_absolute()}


def find_code(recipe: Recipe) -> dict[str, str]:
    """Return the versions of the packages that decide what a recipe computes, policies' packages included, and our
    ``commit`` if we run from a repository."""
    found, code = find_policies(), {}
    for name in PACKAGES:
        code[name] = find_version(name) or "unknown"  # run from source, not installed
    for entry in recipe.policies:
        if entry.name in found:
            package, _, number = found[entry.name].source.partition(" ")
            # Our version says which shelf was released with it, as when its policies were built in: so checkpoints and
            # run ids of then hold. Only a shelf of another version is a fact of its own.
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
        except OSError:  # the run itself will say what is wrong with it
            continue
    return digest.hexdigest()[:16]
