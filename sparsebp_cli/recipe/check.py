"""Validate a tree of located values: return a resolved recipe, or raise its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ValidationError

from sparsebp_cli.errors import PolicyError, RecipeError
from sparsebp_cli.policy.discovery import FoundPolicy, find_policy
from sparsebp_cli.policy.error_text import show
from sparsebp_cli.policy.field_error import FieldError, Location, describe_errors
from sparsebp_cli.recipe.composition import find_unsupported
from sparsebp_cli.recipe.document import Node, Place
from sparsebp_cli.recipe.foreign_key import OF_TARGETS, answer
from sparsebp_cli.recipe.schema import SECRET_URI, PolicyEntry, Recipe, TargetSection
from sparsebp_cli.recipe.store_address import find_problem
from sparsebp_cli.recipe.target import check_target, merge_named_target
from sparsebp_cli.run.visible import mask

MOST_ERRORS = 30


@dataclass(frozen=True)
class PlacedRecipe:
    """A resolved recipe and the tree of located values from which it was built."""

    recipe: Recipe
    tree: Node

    def error(self, location: Location, text: str) -> RecipeError:
        """Return an error at a key of the recipe, to be raised."""
        field_error = FieldError(location, text)
        return find_place(self.tree, field_error).error(text, field_error.key)


def check_recipe(tree: Node) -> PlacedRecipe:
    """Validate a recipe's tree against the schema and its policies' options, and fill in every default. The tree has
    its short forms expanded, and its base and overrides merged. Raise RecipeError for the first error, with all others
    attached. Errors in the recipe's own file come before those in its base and in ``--set``, then sorted by line and
    column. Missing keys come last, because a misspelt key explains them."""
    tree = merge_named_target(tree)
    data = tree.plain
    field_errors: list[FieldError] = []
    recipe = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        field_errors += [_add_home(field_error) for field_error in describe_errors(error, Recipe, data)]
    if recipe is not None and recipe.tracking.uri is not None and mask(recipe.tracking.uri) != recipe.tracking.uri:
        field_errors.append(FieldError(("tracking", "uri"), SECRET_URI))
    elif recipe is not None and recipe.tracking.uri and (problem := find_problem(recipe.tracking.uri)):
        field_errors.append(FieldError(("tracking", "uri"), problem))
    policies = _check_policies(data.get("policy"), field_errors)
    target = _check_target(data.get("target", {}), field_errors)
    if recipe is not None and not field_errors:
        recipe = recipe.model_copy(update={"policy": policies, "target": target})
        field_errors += find_unsupported(recipe, data)
    if recipe is not None and not field_errors:
        return PlacedRecipe(recipe, tree)
    raise first_error(tree, field_errors)


def first_error(tree: Node, field_errors: Sequence[FieldError]) -> RecipeError:
    """Return one error to raise, with the others attached. Errors in the tree's own file come first, then sorted by
    line and column; missing keys come last."""
    placed = [(find_place(tree, field_error), field_error) for field_error in field_errors]
    placed.sort(key=lambda pair: _rank(*pair, own_file=tree.place.file))
    first, *others = [place.error(found.text, found.key) for place, found in placed]
    if len(others) > MOST_ERRORS:
        others[MOST_ERRORS:] = [tree.place.error(f"and {len(others) - MOST_ERRORS} more")]
    first.others = others
    return first


def _check_policies(entries: object, field_errors: list[FieldError]) -> list[PolicyEntry]:
    """Validate the policies' options, and append errors to ``field_errors``."""
    policies: list[PolicyEntry] = []
    entries = entries or [{"name": "dense"}]
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue  # the schema has reported it
        name = entry["name"]
        try:
            found = find_policy(name)
            policies.append(PolicyEntry(name=name, **_resolve_options(found, entry)))
        except PolicyError as error:
            field_errors.append(FieldError(("policy", index, "name"), str(error)))
            continue
        except ValidationError as error:
            options = {key: value for key, value in entry.items() if key != "name"}
            wrong = describe_errors(error, found.policy_class or BaseModel, options)
            field_errors += [replace(each, location=("policy", index, *each.location)) for each in wrong]
    return policies


def _check_target(section: object, field_errors: list[FieldError]) -> TargetSection | None:
    """Validate the target's options and append errors to ``field_errors``. Return None if the schema has already
    reported an error in the target."""
    if not isinstance(section, dict) or any(field_error.location[:1] == ("target",) for field_error in field_errors):
        return None
    target, wrong = check_target(section)
    field_errors += [
        _add_home(replace(field_error, location=("target", *field_error.location))) for field_error in wrong
    ]
    return target


def _resolve_options(found: FoundPolicy, entry: dict[str, object]) -> dict[str, object]:
    policy = found.make({key: value for key, value in entry.items() if key != "name"})
    try:
        return policy.model_dump(mode="json")
    except Exception as error:  # a plugin's own types may fail to serialise
        reason = f"its options cannot be written as JSON ({type(error).__name__})"
        raise PolicyError(f"policy {found.name!r} of {found.source} is broken: {reason}") from None


def _add_home(field_error: FieldError) -> FieldError:
    """Extend the error of an unknown key: name the sections that the key belongs to (it may be wrongly indented), or
    our equivalent of another tool's key."""
    if field_error.kind != "unknown":
        return field_error
    key = field_error.location[-1]
    instead = answer(str(key), is_at_top=len(field_error.location) == 1)
    # In a policy or target the word may instead be a misspelt option.
    if instead is not None and (key in OF_TARGETS or not {"policy", "target"} & set(field_error.location[:-1])):
        return replace(field_error, text=f"unknown key {show(str(key))}: {instead}")
    homes = ["the top, without indentation"] if key in Recipe.model_fields else []
    for section, field in Recipe.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and key in inner.model_fields:
            homes.append(section)
    if not homes:
        return field_error
    return replace(
        field_error,
        text=f"{field_error.plain}; {key} belongs under {' or '.join(homes)}".replace("under the top", "at the top"),
    )


def find_place(tree: Node, field_error: FieldError) -> Place:
    """Return the place of the value; for collections, unknown keys and missing keys that of the nearest key."""
    node = tree
    for part in field_error.location:
        content = node.content
        if isinstance(content, dict) and part in content:
            node = content[str(part)]
        elif isinstance(content, list) and isinstance(part, int) and part < len(content):
            node = content[part]
        else:
            break
    by_key = field_error.kind != "value" or isinstance(node.content, dict | list)
    return node.key_place if by_key and node.key_place else node.place


def _rank(place: Place, field_error: FieldError, *, own_file: str) -> tuple[bool, bool, int, int]:
    return field_error.kind == "missing", place.file != own_file, place.line, place.column
