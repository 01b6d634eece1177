"""Find installed kinds of targets (entry points) and named targets (``targets.yaml``), and validate a recipe's target.

A broken plug-in is listed with its problem. Only the class of the requested target is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path

from pydantic import ValidationError

from sparsebp_cli.entry_point import entry_points, find_source
from sparsebp_cli.errors import RecipeError, UsageError, did_you_mean
from sparsebp_cli.policy.error_text import describe_kind, shorten
from sparsebp_cli.policy.field_error import FieldError, describe_errors
from sparsebp_cli.policy.option import validate_options
from sparsebp_cli.recipe.document import Node, Place, read_document
from sparsebp_cli.recipe.schema import TargetOptions, TargetSection
from sparsebp_cli.run.budget import read_bounded
from sparsebp_cli.run.folder import is_file

GROUP = "sparsebp.targets"
LARGEST_BYTES = 64 * 1024
LONGEST_REASON = 300
COMMON = tuple(TargetSection.model_fields)
REMOVED = {"sky": "; `sky` was removed after 0.5: the verb `export` writes a task for `sky launch`"}


@dataclass(frozen=True)
class FoundTarget:
    """One installed kind of target."""

    name: str  # as recipes name it
    source: str  # distribution and version
    target_class: type | None  # None if the plugin is broken
    problem: str = ""  # why it is broken, one line; empty if it works

    @property
    def options_class(self) -> type[TargetOptions]:
        """The class of its options. For a broken plug-in, this is the class of the common options."""
        found: type[TargetOptions] = getattr(self.target_class, "options_class", TargetOptions)
        return found


def find_targets() -> dict[str, FoundTarget]:
    """Return every installed kind of target by name, sorted. Broken ones carry their problem."""
    entries = entry_points(group=GROUP)
    return {name: _load(name, entries.select(name=name)) for name in sorted(entries.names)}


def find_target(kind: str) -> FoundTarget:
    """Return one installed kind of target. Raise UsageError if the kind is unknown or its plug-in is broken."""
    entries = entry_points(group=GROUP)
    if kind not in entries.names:
        known = [*sorted(entries.names), *named_targets()]
        cure = (
            REMOVED.get(kind)
            or did_you_mean(kind, known)
            or "; `sparsebp targets` names the file in which you can define others"
        )
        raise UsageError(f"unknown target {shorten(repr(kind))}; known: {', '.join(known)}{cure}")
    found = _load(kind, entries.select(name=kind))
    if found.target_class is None:
        raise UsageError(f"target {kind!r} of {found.source} is broken: {found.problem}")
    return found


def targets_file() -> Path:
    """Return the path of the file of targets: ``$SPARSEBP_TARGETS``, else ``targets.yaml`` in the config folder."""
    chosen = os.environ.get("SPARSEBP_TARGETS")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_config_path  # imported late: benchmarks run from a bare checkout without it

    return user_config_path("sparsebp", appauthor=False) / "targets.yaml"


def describe_settings() -> str:
    """Return why the settings of 0.5 have no effect; empty if there is no such file."""
    from platformdirs import user_config_path

    file = os.environ.get("SPARSEBP_SETTINGS") or str(user_config_path("sparsebp", appauthor=False) / "settings.yaml")
    if not is_file(Path(file)):
        return ""
    return f"{file} has no effect: `notify` was removed after 0.5; instead, append `; notify-send done` to the command"


def named_targets() -> dict[str, Node]:
    """Return the user's named targets, in file order, as mappings of target keys; empty if there is no file. Raise
    RecipeError if the file has another form, or a name equals a kind."""
    file = targets_file()
    try:
        tree = read_document(read_bounded(file, LARGEST_BYTES).decode("utf-8-sig"), str(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Place(str(file)).error(f"cannot be read: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree.content, dict):
        raise tree.place.error(f"the file must map names to targets, got {describe_kind(tree.plain)}")
    kinds = entry_points(group=GROUP).names
    for name, node in tree.content.items():
        if name in kinds:
            raise (node.key_place or node.place).error("is the name of a kind of target; choose another name", name)
        if not isinstance(node.content, dict):
            raise node.place.error(f"must be a mapping such as {{kind: docker}}, got {describe_kind(node.plain)}", name)
    return tree.content


def merge_named_target(tree: Node) -> Node:
    """Return a recipe's tree in which the named target supplies the keys that the recipe omits. Without a named target,
    return the same tree."""
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


def check_target(section: Mapping[str, object]) -> tuple[TargetSection | None, list[FieldError]]:
    """Validate the keys of a recipe's target. Return the target with all defaults, and the errors, located within the
    section. The target is None if there are errors."""
    kind = section.get("kind", "local")
    if not isinstance(kind, str):
        return None, []  # the schema has reported it
    try:
        found = find_target(kind)
    except RecipeError:
        raise
    except UsageError as error:
        return None, [FieldError(("kind",), str(error))]
    given = {key: value for key, value in section.items() if key not in COMMON}
    try:
        options = validate_options(found.options_class, given)
    except ValidationError as error:
        return None, describe_errors(error, found.options_class, given)
    if options.nodes > 1 and not found.options_class.spans_nodes:
        text = f"target {kind} runs on one machine, got {options.nodes}; for several machines, use {_list_spanning()}"
        return None, [FieldError(("nodes",), text)]
    common = {key: value for key, value in section.items() if key in COMMON}
    return TargetSection.model_validate({**common, **options.model_dump(mode="json")}), []


def named_target_section(name: str) -> TargetSection:
    """Return the section of a kind or a named target, as ``target: NAME`` in a recipe gives it. Raise UsageError if the
    target is unknown or invalid."""
    place = Place("")
    tree = merge_named_target(Node({"target": Node({"kind": Node(name, place)}, place)}, place))
    section = tree.plain["target"]
    try:
        TargetSection.model_validate(section)
        made, field_errors = check_target(section)
    except ValidationError as error:
        made, field_errors = None, describe_errors(error, TargetSection, section)
    if made is None:
        raise UsageError(": ".join(filter(None, (f"target {name}", field_errors[0].key, field_errors[0].text))))
    return made


def _list_spanning() -> str:
    return " or ".join(name for name, found in find_targets().items() if found.options_class.spans_nodes)


def _kinds() -> set[str]:
    return set(entry_points(group=GROUP).names)


def _load(name: str, entries: Iterable[EntryPoint]) -> FoundTarget:
    by_value = {entry.value: entry for entry in entries}
    sources = " and ".join(dict.fromkeys(find_source(entry) for entry in by_value.values()))
    if len(by_value) > 1:
        return FoundTarget(name, sources, None, f"this name is registered more than once, by {sources}")
    ((value, entry),) = by_value.items()
    try:
        target_class = entry.load()
    except (Exception, SystemExit) as error:  # a plug-in may fail in any way: show its name and the reason
        reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()), LONGEST_REASON)
        return FoundTarget(name, sources, None, reason)
    options = getattr(target_class, "options_class", None)
    if not (isinstance(options, type) and issubclass(options, TargetOptions)):
        return FoundTarget(name, sources, None, f"{value} has no options_class derived from TargetOptions")
    return FoundTarget(name, sources, target_class)
