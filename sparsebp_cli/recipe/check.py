"""From a tree with places to a resolved recipe, or to the one error that is named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from sparsebp_cli.errors import PolicyError, RecipeError
from sparsebp_cli.policy.discovery import FoundPolicy, find_policy
from sparsebp_cli.policy.finding import Finding, Location, word_errors
from sparsebp_cli.recipe.composition import find_unbuilt
from sparsebp_cli.recipe.place import Node, Place
from sparsebp_cli.recipe.schema import SECRET_URI, PolicyEntry, Recipe, TargetSection
from sparsebp_cli.recipe.target import check_target, lay_over_named
from sparsebp_cli.run.visible import mask


@dataclass(frozen=True)
class PlacedRecipe:
    """A recipe, and where each of its keys was written.

    Args:
        recipe: Resolved.
        tree: What it was made of.
    """

    recipe: Recipe
    tree: Node

    def error(self, location: Location, text: str) -> RecipeError:
        """Return an error at a key of the recipe.

        Args:
            location: The key's path.
            text: What is wrong.

        Returns:
            The error, to be raised.
        """
        finding = Finding(location, text)
        return _find_place(self.tree, finding).error(text, finding.key)


def check_recipe(tree: Node) -> PlacedRecipe:
    """Check a recipe against the schema and its policies' options.

    Args:
        tree: The top mapping, short forms written out, base and changes merged in.

    Returns:
        The recipe, resolved: every default is filled in, those of the policies too; and its places.

    Raises:
        RecipeError: The first thing that is wrong: the recipe's file before its base and ``--set``, then by line and
            column. A missing key comes last, since a misspelt one explains it.
    """
    tree = lay_over_named(tree)
    data = tree.plain
    findings: list[Finding] = []
    recipe = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        findings += [_add_home(finding) for finding in word_errors(error, Recipe, data)]
    if recipe is not None and recipe.tracking.uri is not None and mask(recipe.tracking.uri) != recipe.tracking.uri:
        findings.append(Finding(("tracking", "uri"), SECRET_URI))
    policies = _check_policies(data.get("policy") or [{"name": "dense"}], findings)
    target = _check_target(data.get("target", {}), findings)
    if recipe is not None and not findings:
        recipe = recipe.model_copy(update={"policy": policies, "target": target})
        findings += find_unbuilt(recipe, data)
    if recipe is not None and not findings:
        return PlacedRecipe(recipe, tree)
    placed = [(_find_place(tree, finding), finding) for finding in findings]
    place, first = min(placed, key=lambda pair: _rank(*pair, own_file=tree.place.file))
    raise place.error(first.text, first.key)


def _check_policies(entries: Any, findings: list[Finding]) -> list[PolicyEntry]:
    """Check the options of each policy; what is wrong is added to the findings."""
    policies: list[PolicyEntry] = []
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue  # the schema has refused it
        name = entry["name"]
        try:
            found = find_policy(name)
            policies.append(PolicyEntry(name=name, **_resolve_options(found, entry)))
        except PolicyError as error:
            findings.append(Finding(("policy", index, "name"), str(error)))
            continue
        except ValidationError as error:
            options = {key: value for key, value in entry.items() if key != "name"}
            wrong = word_errors(error, found.policy_class or BaseModel, options)
            findings += [replace(each, location=("policy", index, *each.location)) for each in wrong]
    return policies


def _check_target(section: Any, findings: list[Finding]) -> TargetSection | None:
    """Check the options of the target; what is wrong is added to the findings, where the schema did not say it."""
    if not isinstance(section, dict) or any(finding.location[:1] == ("target",) for finding in findings):
        return None
    target, wrong = check_target(section)
    findings += [_add_home(replace(finding, location=("target", *finding.location))) for finding in wrong]
    return target


def _resolve_options(found: FoundPolicy, entry: dict[str, Any]) -> dict[str, Any]:
    policy = found.make({key: value for key, value in entry.items() if key != "name"})
    try:
        return policy.model_dump(mode="json")
    except Exception as error:  # a plugin's own types may refuse to be written
        reason = f"its options cannot be written as JSON ({type(error).__name__})"
        raise PolicyError(f"policy {found.name!r} of {found.source} is broken: {reason}") from None


def _add_home(finding: Finding) -> Finding:
    """Tell where a key belongs that stands in the wrong section, as after a slip of indentation."""
    if finding.kind != "unknown":
        return finding
    key = finding.location[-1]
    homes = ["the top, without indentation"] if key in Recipe.model_fields else []
    for section, field in Recipe.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and key in inner.model_fields:
            homes.append(section)
    if not homes:
        return finding
    text = finding.text.partition("; did you mean")[0]
    return replace(
        finding, text=f"{text}; {key} belongs under {' or '.join(homes)}".replace("under the top", "at the top")
    )


def _find_place(tree: Node, finding: Finding) -> Place:
    """Return where the value stands; for collections, unknown and missing keys, where the nearest key stands."""
    node = tree
    for part in finding.location:
        content = node.content
        if isinstance(content, dict) and part in content:
            node = content[str(part)]
        elif isinstance(content, list) and isinstance(part, int) and part < len(content):
            node = content[part]
        else:
            break
    by_key = finding.kind != "value" or isinstance(node.content, dict | list)
    return node.key_place if by_key and node.key_place else node.place


def _rank(place: Place, finding: Finding, *, own_file: str) -> tuple[bool, bool, int, int]:
    return finding.kind == "missing", place.file != own_file, place.line, place.column
