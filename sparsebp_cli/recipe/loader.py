"""Load a recipe file into a resolved recipe."""

from __future__ import annotations

import difflib
import json
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.policy.error_text import describe_kind, shorten, show_with_type
from sparsebp_cli.recipe.check import PlacedRecipe, check_recipe
from sparsebp_cli.recipe.document import Node, Place, read_document
from sparsebp_cli.recipe.override import apply_override
from sparsebp_cli.recipe.schema import NAME_PATTERN, Recipe
from sparsebp_cli.run.stored_recipe import OLD_KEYS, rename_keys

LARGEST_BYTES = 64 * 1024
# The folder of the package, which holds the recipes that ship.
PACKAGE = Path(__file__).resolve().parents[1]
# Only the existence of these is checked; their content is not read. See decision 27.
MARKS = (".git", "pyproject.toml")  # at the top of a checkout, or of a source distribution


def load_recipe(file: Path, changes: Sequence[str] = ()) -> Recipe:
    """Read, merge and validate a recipe of at most 64 KiB, and fill in every default. Its ``base``, a path relative to
    the recipe, supplies missing keys except the name: mappings merge key by key, lists and scalars whole. Then
    ``changes`` (``KEY=VALUE`` or ``~KEY``) apply in order. Raise RecipeError with ``file:line:column: key:``, as far as
    known."""
    return load_placed(file, changes).recipe


def load_placed(file: Path, changes: Sequence[str] = ()) -> PlacedRecipe:
    """Load a recipe like :func:`load_recipe`, and keep the places of its keys."""
    tree = load_tree(file)
    for change in changes:
        tree = expand_shorthand(apply_override(tree, change))
    return check_recipe(_name_by_file(tree, file))


def load_tree(file: Path, named_by: Node | None = None) -> Node:
    """Read a recipe, merge it over its base and expand short forms, without validation. ``named_by`` is the value in
    another file that names this file, if there is one."""
    tree = _read_file(file, named_by)
    assert isinstance(tree.content, dict)
    base = tree.content.pop("base", None)
    return tree if base is None else lay_over(_read_base(file, base), tree)


def load_stored(content: Mapping[str, object], source: str, changes: Sequence[str] = ()) -> PlacedRecipe:
    """Validate the resolved recipe of a plan with changes applied, as strictly as a file. Errors name ``source``."""
    tree = read_document(json.dumps(rename_keys(content)), source)
    assert tree is not None
    for change in changes:
        tree = expand_shorthand(apply_override(tree, change))
    return check_recipe(tree)


def _read_file(file: Path, named_by: Node | None = None) -> Node:
    """Read a file whose top is a mapping, and expand its short forms. ``named_by`` is the ``base`` value that names the
    file."""
    text = read_text(file, named_by)
    tree = read_document(text, str(file))
    if tree is None:
        raise Place(str(file), 1, 1).error(
            "the file is empty, but a recipe needs at least the keys version, model and dataset"
        )
    if not isinstance(tree.content, dict):
        # Never quote the content: a stranger's recipe may name a file that holds the user's secrets.
        raise tree.place.error(f"a recipe must be a mapping, got {describe_kind(tree.plain)}")
    if {"study", "arms"} <= tree.content.keys():
        raise tree.place.error(f"this file is a study, not a recipe: `sparsebp study {file}` runs it")
    return expand_shorthand(tree)


def is_targets_file(file: Path) -> bool:
    """Return whether a file holds named targets. Return False for an unreadable file: the next reader reports why."""
    try:
        tree = read_document(read_text(file), str(file))
    except RecipeError:
        return False
    named = tree.content if tree is not None and isinstance(tree.content, dict) else {}
    return bool(named) and all(
        isinstance(node.content, dict) and "kind" in node.content and name not in Recipe.model_fields
        for name, node in named.items()
    )


def read_text(file: Path, named_by: Node | None = None) -> str:
    """Read a file of at most 64 KiB. Raise RecipeError if it cannot be read or is not text."""
    try:
        mode = file.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ValueError("is a folder, not a file")
        if not stat.S_ISREG(mode):  # reading a pipe may block, and a device may never end
            raise ValueError("is not a regular file")
        with file.open("rb") as stream:
            content = stream.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = _describe_failure(file, error)
        if named_by is not None:
            raise named_by.place.error(f"{shorten(str(file))}: {problem}", "base") from None
        raise Place(str(file)).error(problem) from None
    if len(content) > LARGEST_BYTES:
        raise Place(str(file)).error(
            f"the file is too large for a recipe, at most {LARGEST_BYTES // 1024} KiB are allowed"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        column = len(before.rsplit(b"\n", 1)[-1].decode("utf-8", "replace")) + 1
        place = Place(str(file), before.count(b"\n") + 1, column)
        raise place.error(f"the file must be UTF-8 text, got the byte 0x{content[error.start]:02x}") from None


def _describe_failure(file: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        if re.fullmatch(r"[\w.]+=.*", str(file)):  # KEY=VALUE, as Hydra writes overrides
            return f"no such file; to set a key give --set {file}"
        names = {path.stem: path.name for path in sorted(file.parent.glob("*.y*ml"))}
        near = difflib.get_close_matches(file.stem, names, n=1)
        return "no such file" + (f"; did you mean {file.parent / names[near[0]]}?" if near else "")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"cannot be read: {reason[:1].lower()}{reason[1:]}"


def find_base(file: Path, base: Node) -> Path:
    """Return the path of the ``base`` that a recipe or a study names. The base must end in ``.yaml`` or ``.yml`` and
    lie beside or below the file that names it, or in the same checkout. So a stranger's recipe cannot read the user's
    files. Raise RecipeError for any other path."""
    name, folder = str(base.content), file.parent.resolve()
    if Path(name).suffix not in {".yaml", ".yml"}:
        raise base.place.error(
            f"must be the path of a recipe that ends in .yaml or .yml, got {shorten(name)!r}", "base"
        )
    tops = [
        place
        for place in (folder, *folder.parents)
        if any((place / name).exists() for name in MARKS) or place == PACKAGE
    ]
    top = tops[0] if tops else folder
    try:
        is_inside = (file.parent / name).resolve().is_relative_to(top)
    except (OSError, RuntimeError, ValueError):  # a loop of links, or a name with NUL
        is_inside = False
    if not is_inside:
        where = f"{shorten(str(top))}, the recipe's repository" if tops else f"the folder of {file.name} or below it"
        raise base.place.error(f"must be in {where}, got {shorten(name)!r}", "base")
    return file.parent / name


def _read_base(file: Path, base: Node) -> Node:
    if not isinstance(base.content, str) or not base.content:
        raise base.place.error(f"must be the path of a recipe, got {show_with_type(base.plain)}", "base")
    tree = _read_file(find_base(file, base), base)
    assert isinstance(tree.content, dict)
    if "base" in tree.content:
        place = tree.content["base"].key_place or tree.place
        raise place.error("a base recipe must not have a base of its own: remove this key", "base")
    tree.content.pop("name", None)
    return tree


def lay_over(under: Node, over: Node) -> Node:
    """Merge one recipe over another: mappings key by key, everything else whole."""
    if not (isinstance(under.content, dict) and isinstance(over.content, dict)):
        return over
    content = dict(under.content)
    for key, child in over.content.items():
        content[key] = lay_over(content[key], child) if key in content else child
    return replace(over, content=content)


def _name_by_file(tree: Node, file: Path) -> Node:
    assert isinstance(tree.content, dict)
    if "name" in tree.content or not re.fullmatch(NAME_PATTERN, file.stem):
        return tree
    return replace(tree, content={**tree.content, "name": Node(file.stem, Place(str(file)))})


def expand_shorthand(tree: Node) -> Node:
    """Return a recipe's tree with every short form expanded. Leave wrong values for the schema to refuse."""
    if not isinstance(tree.content, dict):
        return tree
    content = dict(tree.content)
    if "target" in content:
        content["target"] = _wrap_text(content["target"], "kind")
    policy = content.get("policy")
    if policy is not None and isinstance(policy.content, list | dict | str):
        entries = policy.content if isinstance(policy.content, list) else [replace(policy, key_place=None)]
        content["policy"] = replace(policy, content=[_wrap_text(entry, "name") for entry in entries])
    return replace(tree, content=content)


def _wrap_text(node: Node, key: str) -> Node:
    if not isinstance(node.content, str):
        return node
    return replace(node, content={key: Node(node.content, node.place, node.place)})


def rename_in_plan(content: bytes) -> bytes:
    """Rename the keys in the JSON of a plan. Return other content unchanged, for the next reader to refuse."""
    # Return early in the usual case: parsing twice would double the time to list many runs.
    if not any(key in content for key in OLD_KEYS):
        return content
    try:
        plan = json.loads(content)
        return json.dumps(plan | {"recipe": rename_keys(plan["recipe"])}).encode()
    except (ValueError, LookupError, TypeError, AttributeError):
        return content
