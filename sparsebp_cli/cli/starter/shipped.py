"""Find the recipes that ship: data of this package in a wheel, the folder ``recipes`` at the top in a checkout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sparsebp_cli.errors import UsageError, did_you_mean

PLACES = (Path(__file__).parent / "recipes", Path(__file__).parents[3] / "recipes")
# Recipes in these folders can also be named without the folder, as before there were folders; stems are unique.
SHORT = ("start", "exact", "methods", "training")
DATA_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
BASE = re.compile(r"^base: *(\S+)", re.MULTILINE)
TEMPLATE = re.compile(r"^ +chat_template: *([\w-]+\.jinja)\b", re.MULTILINE)  # a file beside the recipe


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe of the package. Its name is its path without the suffix."""

    name: str
    file: Path

    @property
    def short_name(self) -> str:
        """The name, without its folder if it is unique without it."""
        folder, _, stem = self.name.partition("/")
        return stem if folder in SHORT else self.name

    @property
    def summary(self) -> str:
        """The first sentence of the comment at the beginning of the file."""
        lines = []
        for line in self.file.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.lstrip("# "))
        return re.split(r"(?<=\.) ", " ".join(lines))[0]


def list_shipped() -> list[ShippedRecipe]:
    """Return all recipes that ship, those for newcomers first. Raise ``UsageError`` if there are none."""
    folder = _folder()
    found = [
        ShippedRecipe(file.relative_to(folder).with_suffix("").as_posix(), file) for file in folder.rglob("*.yaml")
    ]
    return sorted(found, key=lambda recipe: (recipe.name.partition("/")[0] not in SHORT[:1], recipe.name))


def find_shipped(name: str) -> ShippedRecipe:
    """Return the recipe with a name, with or without folder and ``.yaml``. Raise ``UsageError`` if there is none."""
    known = _by_name()
    wanted = name.removesuffix(".yaml")
    if wanted not in known:
        near = did_you_mean(wanted, known)
        raise UsageError(f"SparseBP contains no recipe {name!r}; `sparsebp recipes` lists its recipes{near}")
    return known[wanted]


def resolve_recipe(given: Path) -> Path:
    """Return the file that a typed recipe names. An existing path takes precedence over a recipe that ships. Raise
    ``UsageError`` for a word without a suffix that is neither."""
    if given.is_file():
        if given.suffix in DATA_SUFFIXES:
            raise UsageError(f"{given} is a data file, not a recipe: name it in a recipe as dataset.name")
        return given
    # A missing `lora.yaml` of the user must not resolve to the one that ships, so a file name needs the prefix
    # `recipes/`. Older papers and scripts name recipes this way, from before there were folders.
    old = re.fullmatch(r"recipes/(.+)\.yaml", given.as_posix())
    name = old[1] if old else given.as_posix()
    if (found := _by_name().get(name)) is not None:
        return found.file
    if given.suffix or given.exists():
        return given  # the reader reports what is wrong with a path
    near = did_you_mean(name, _by_name())
    if "=" in name:
        raise UsageError(f"there is no file {name!r}; to change a key of the recipe, write --set {name}")
    raise UsageError(
        f"there is no file {name!r}, and SparseBP contains no recipe of this name; `sparsebp recipes` lists its "
        f"recipes{near}"
    )


def _by_name() -> dict[str, ShippedRecipe]:
    found = list_shipped()
    return {recipe.short_name: recipe for recipe in found} | {recipe.name: recipe for recipe in found}


def collect_files(recipe: ShippedRecipe) -> dict[str, str]:
    """Return the texts of a recipe, its base, and their chat templates, by file name. Copies lie side by side."""
    files = _with_template(recipe.file)
    text = files[recipe.file.name]
    found = BASE.search(text)
    if found is None:
        return files
    base = recipe.file.parent / found[1]
    files[recipe.file.name] = text.replace(found[0], f"base: {base.name}", 1)
    return files | _with_template(base)


def _with_template(file: Path) -> dict[str, str]:
    text = file.read_text(encoding="utf-8")
    found = TEMPLATE.search(text)
    if found is None:
        return {file.name: text}
    template = file.parent / found[1]
    return {file.name: text, template.name: template.read_text(encoding="utf-8")}


def _folder() -> Path:
    for place in PLACES:
        if place.is_dir():
            return place
    raise UsageError(f"this installation has no recipes; looked for {', '.join(map(str, PLACES))}")
