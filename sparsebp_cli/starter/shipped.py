"""The recipes that ship: in the wheel as data of this package, in a checkout the folder ``recipes`` at its top."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sparsebp_cli.errors import UsageError, did_you_mean

PLACES = (Path(__file__).parent / "recipes", Path(__file__).parents[2] / "recipes")
BASE = re.compile(r"^base: *(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe of the package: its name, which is its path without the suffix, and its file."""

    name: str
    file: Path

    @property
    def summary(self) -> str:
        """The first sentence of the comment at the beginning."""
        lines = []
        for line in self.file.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.lstrip("# "))
        return re.split(r"(?<=\.) ", " ".join(lines))[0]


def list_shipped() -> list[ShippedRecipe]:
    """Return every recipe that ships, those of the top folder first. Raise ``UsageError`` if the installation has
    none."""
    folder = _folder()
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.relative_to(folder).parts), file))
    return [ShippedRecipe(file.relative_to(folder).with_suffix("").as_posix(), file) for file in files]


def find_shipped(name: str) -> ShippedRecipe:
    """Return the recipe of a name, with or without ``.yaml``. Raise ``UsageError`` if there is none."""
    known = {recipe.name: recipe for recipe in list_shipped()}
    wanted = name.removesuffix(".yaml")
    if wanted not in known:
        near = did_you_mean(wanted, known)
        raise UsageError(f"no recipe {name!r} ships with SparseBP; `sparsebp recipes` lists them{near}")
    return known[wanted]


def collect_files(recipe: ShippedRecipe) -> dict[str, str]:
    """Return the texts of a recipe and of the recipe that it extends, by file name; as copies they lie side by side."""
    text = recipe.file.read_text(encoding="utf-8")
    found = BASE.search(text)
    if found is None:
        return {recipe.file.name: text}
    base = recipe.file.parent / found[1]
    text = text.replace(found[0], f"base: {base.name}", 1)
    return {recipe.file.name: text, base.name: base.read_text(encoding="utf-8")}


def _folder() -> Path:
    for place in PLACES:
        if place.is_dir():
            return place
    raise UsageError(f"this installation has no recipes; looked for {', '.join(map(str, PLACES))}")
