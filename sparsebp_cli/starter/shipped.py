"""The recipes that ship: in the wheel as data of this package, in a checkout the folder ``recipes`` at its top."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sparsebp_cli.errors import UsageError, did_you_mean

PLACES = (Path(__file__).parent / "recipes", Path(__file__).parents[2] / "recipes")
# Folders whose recipes are named without the folder, too, as when all lay side by side; a stem is there only once.
SHORT = ("start", "exact", "methods", "training")
BASE = re.compile(r"^base: *(\S+)", re.MULTILINE)
TEMPLATE = re.compile(r"^ +chat_template: *([\w-]+\.jinja)\b", re.MULTILINE)  # beside the recipe


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe of the package: its name, which is its path without the suffix, and its file."""

    name: str
    file: Path

    @property
    def short_name(self) -> str:
        """The name without its folder, where that is enough."""
        folder, _, stem = self.name.partition("/")
        return stem if folder in SHORT else self.name

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
    """Return every recipe that ships, those to begin with first. Raise ``UsageError`` if the installation has none."""
    folder = _folder()
    found = [
        ShippedRecipe(file.relative_to(folder).with_suffix("").as_posix(), file) for file in folder.rglob("*.yaml")
    ]
    return sorted(found, key=lambda recipe: (recipe.name.partition("/")[0] not in SHORT[:1], recipe.name))


def find_shipped(name: str) -> ShippedRecipe:
    """Return the recipe of a name, with or without its folder and ``.yaml``. Raise ``UsageError`` if there is none."""
    known = _by_name()
    wanted = name.removesuffix(".yaml")
    if wanted not in known:
        near = did_you_mean(wanted, known)
        raise UsageError(f"no recipe {name!r} ships with SparseBP; `sparsebp recipes` lists them{near}")
    return known[wanted]


def resolve_recipe(given: Path) -> Path:
    """Return the file that a typed recipe names: a path that exists, before a recipe that ships. Raise ``UsageError``
    for a word without a suffix that is neither."""
    if given.is_file():
        return given
    # A missing `lora.yaml` of the user's own must not become the one that ships, so a file needs `recipes/` in front.
    # This was enough when all lay side by side, and commands that name them so are in papers and scripts.
    old = re.fullmatch(r"recipes/(.+)\.yaml", given.as_posix())
    name = old[1] if old else given.as_posix()
    if (found := _by_name().get(name)) is not None:
        return found.file
    if given.suffix or given.exists():
        return given  # the reader says what is wrong with a path
    near = did_you_mean(name, _by_name())
    raise UsageError(f"no file {name!r}, and no recipe of this name ships; `sparsebp recipes` lists them{near}")


def _by_name() -> dict[str, ShippedRecipe]:
    found = list_shipped()
    return {recipe.short_name: recipe for recipe in found} | {recipe.name: recipe for recipe in found}


def collect_files(recipe: ShippedRecipe) -> dict[str, str]:
    """Return the texts of a recipe, of the recipe that it extends and of their chat templates, by file name; as copies
    they lie side by side."""
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
