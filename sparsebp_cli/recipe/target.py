"""Which targets are installed (entry points) and named (``targets.yaml``), and whether a recipe asks for one of them.

A broken plugin is shown, never dropped. Only the class of the target that is asked for is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sparsebp_cli.errors import RecipeError, UsageError, did_you_mean
from sparsebp_cli.policy.finding import Finding, word_errors
from sparsebp_cli.policy.phrase import shorten, show_with_type
from sparsebp_cli.recipe.document import read_document
from sparsebp_cli.recipe.place import Node, Place
from sparsebp_cli.recipe.schema import TargetOptions, TargetSection

GROUP = "sparsebp.targets"
LARGEST_BYTES = 64 * 1024
LONGEST_REASON = 300
COMMON = tuple(TargetSection.model_fields)


@dataclass(frozen=True)
class FoundTarget:
    """One installed kind of target.

    Args:
        name: What recipes call it.
        source: The distribution it comes from, and its version.
        target_class: The class; None when the plugin is broken.
        problem: Why it is broken, one line; empty when it works.
    """

    name: str
    source: str
    target_class: Any
    problem: str = ""

    @property
    def options_class(self) -> type[TargetOptions]:
        """The class of its options; without any of its own where the plugin is broken."""
        found: type[TargetOptions] = getattr(self.target_class, "options_class", TargetOptions)
        return found


def find_targets() -> dict[str, FoundTarget]:
    """Return every installed kind of target by name, sorted; broken ones carry their problem."""
    entries = entry_points(group=GROUP)
    return {name: _load(name, entries.select(name=name)) for name in sorted(entries.names)}


def find_target(kind: str) -> FoundTarget:
    """Return one installed kind of target.

    Args:
        kind: A name that ``sparsebp targets`` lists as a kind.

    Returns:
        The kind, which works.

    Raises:
        UsageError: It is unknown, or its plugin broken.
    """
    entries = entry_points(group=GROUP)
    if kind not in entries.names:
        known = [*sorted(entries.names), *named_targets()]
        near = did_you_mean(kind, known)
        raise UsageError(f"unknown target {shorten(repr(kind))}; there are: {', '.join(known)}{near}")
    found = _load(kind, entries.select(name=kind))
    if found.target_class is None:
        raise UsageError(f"target {kind!r} of {found.source} is broken: {found.problem}")
    return found


def targets_file() -> Path:
    """Return where named targets are: ``$SPARSEBP_TARGETS``, else ``targets.yaml`` in the user's config folder."""
    chosen = os.environ.get("SPARSEBP_TARGETS")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_config_path  # here: benchmarks run from a bare checkout, where few packages are

    return user_config_path("sparsebp", appauthor=False) / "targets.yaml"


def named_targets() -> dict[str, Node]:
    """Return the targets that the user gave names to, in the order of the file; none where there is no file.

    Returns:
        Name to a mapping of a target's keys, as in a recipe.

    Raises:
        RecipeError: The file is not a mapping of names to targets, or a name is that of a kind.
    """
    file = targets_file()
    try:
        with file.open("rb") as stream:
            text = stream.read(LARGEST_BYTES + 1)
        if len(text) > LARGEST_BYTES:
            raise Place(str(file)).error(f"too large: more than {LARGEST_BYTES // 1024} KiB")
        tree = read_document(text.decode("utf-8-sig"), str(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Place(str(file)).error(f"cannot be read: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree.content, dict):
        raise tree.place.error(f"must be a mapping of names to targets, got {show_with_type(tree.plain)}")
    kinds = entry_points(group=GROUP).names
    for name, node in tree.content.items():
        if name in kinds:
            raise (node.key_place or node.place).error("is the name of a kind; choose another", name)
        if not isinstance(node.content, dict):
            raise node.place.error(
                f"must be a mapping such as {{kind: docker}}, got {show_with_type(node.plain)}", name
            )
    return tree.content


def lay_over_named(tree: Node) -> Node:
    """Return a recipe's tree with the target that it names laid under what it says itself.

    Args:
        tree: The top mapping, short forms written out.

    Returns:
        A new tree; the same where the target is not one of ``targets.yaml``.
    """
    if not isinstance(tree.content, dict):
        return tree
    target = tree.content.get("target")
    kind = target.content.get("kind") if target and isinstance(target.content, dict) else None
    if target is None or kind is None or not isinstance(kind.content, str) or kind.content in _kinds():
        return tree
    named = named_targets().get(kind.content)
    if named is None:
        return tree
    assert isinstance(named.content, dict)
    assert isinstance(target.content, dict)
    merged = {**named.content, **{key: child for key, child in target.content.items() if key != "kind"}}
    return replace(tree, content={**tree.content, "target": replace(target, content=merged)})


def check_target(section: Mapping[str, Any]) -> tuple[TargetSection | None, list[Finding]]:
    """Check the options of a recipe's target.

    Args:
        section: The recipe's ``target``, by keys.

    Returns:
        The target with every option's default filled in, and what is wrong, placed from the section on.
    """
    kind = section.get("kind", "local")
    if not isinstance(kind, str):
        return None, []  # the schema has refused it
    try:
        found = find_target(kind)
    except RecipeError:
        raise
    except UsageError as error:
        return None, [Finding(("kind",), str(error))]
    given = {key: value for key, value in section.items() if key not in COMMON}
    try:
        options = found.options_class.model_validate(given)
    except ValidationError as error:
        return None, word_errors(error, found.options_class, given)
    common = {key: value for key, value in section.items() if key in COMMON}
    return TargetSection.model_validate({**common, **options.model_dump(mode="json")}), []


def make_named(name: str) -> TargetSection:
    """Return the target of a name, as a recipe with ``target: NAME`` would have it.

    Args:
        name: A kind, or a name of ``targets.yaml``.

    Returns:
        Its section, every default filled in.

    Raises:
        UsageError: There is none, or it is wrong.
    """
    place = Place("")
    tree = lay_over_named(Node({"target": Node({"kind": Node(name, place)}, place)}, place))
    section = tree.plain["target"]
    try:
        TargetSection.model_validate(section)
        made, findings = check_target(section)
    except ValidationError as error:
        made, findings = None, word_errors(error, TargetSection, section)
    if made is None or findings:
        raise UsageError(f"target {name}: {findings[0].key}: {findings[0].text}" if findings else f"no target {name!r}")
    return made


def _kinds() -> set[str]:
    return set(entry_points(group=GROUP).names)


def _load(name: str, entries: Iterable[EntryPoint]) -> FoundTarget:
    by_value = {entry.value: entry for entry in entries}
    sources = " and ".join(dict.fromkeys(_find_source(entry) for entry in by_value.values()))
    if len(by_value) > 1:
        return FoundTarget(name, sources, None, f"this name is offered more than once, by {sources}")
    ((value, entry),) = by_value.items()
    try:
        target_class = entry.load()
    except (Exception, SystemExit) as error:  # a plugin may fail in any way; its name and reason are shown
        reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()), LONGEST_REASON)
        return FoundTarget(name, sources, None, reason)
    options = getattr(target_class, "options_class", None)
    if not (isinstance(options, type) and issubclass(options, TargetOptions)):
        return FoundTarget(name, sources, None, f"{value} has no options_class derived from TargetOptions")
    return FoundTarget(name, sources, target_class)


def _find_source(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"
