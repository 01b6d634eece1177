"""Build the JSON Schema (draft 2020-12) of a recipe for editors. It accepts what the loader accepts, including short
forms.

If the recipe has a ``base``, no key is required, because the base may supply it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sparsebp_cli.policy import FoundPolicy, find_policies
from sparsebp_cli.policy.schedule import Schedule
from sparsebp_cli.policy.scheduled_option import is_schedulable
from sparsebp_cli.recipe.schema import Recipe, TargetSection
from sparsebp_cli.recipe.target import FoundTarget, find_targets, named_targets

Schema = dict[str, Any]


def recipe_schema(
    policies: Mapping[str, FoundPolicy] | None = None, targets: Mapping[str, FoundTarget] | None = None
) -> Schema:
    """Return the self-contained JSON Schema of a recipe, with the options of the given policies and targets. None means
    every installed one; for targets, it also adds the names in ``targets.yaml``. Broken plug-ins are left out."""
    found = find_policies() if policies is None else policies
    schema = Recipe.model_json_schema()
    sections: dict[str, Schema] = schema.pop("$defs")
    properties: dict[str, Schema] = schema["properties"]
    usable = {name: policy for name, policy in found.items() if policy.policy_class is not None}

    sections.pop("PolicyEntry")
    sections["Schedule"] = Schedule.model_json_schema()
    for name, policy in usable.items():
        _add_policy(sections, name, policy)
    sections["Policy"] = _make_entry(usable)
    entry = {"$ref": "#/$defs/Policy"}
    properties["policy"] = {
        "description": properties["policy"]["description"],
        "anyOf": [{"type": "array", "items": entry}, entry],
    }
    common = sections.pop("TargetSection")["properties"]
    kinds = _find_kinds(targets)
    for kind, target in (find_targets() if targets is None else targets).items():
        _add_target(sections, kind, target, common)
    properties["target"] = _make_target(kinds, properties["target"]["description"])
    base = {
        "type": "string",
        "minLength": 1,
        "description": "Path of a recipe, relative to this file, that supplies the keys which this file lacks.",
    }

    required = [key for key in schema.pop("required") if key != "name"]  # the default is the file's name
    inner = {}
    for key in required:
        section = sections.get(str(properties[key].get("$ref", "")).rpartition("/")[2], {})
        if "required" in section:
            inner[key] = {"required": section.pop("required")}
    inner["target"] = {  # without a base, a target without a kind is local
        "if": {"type": "object", "not": {"required": ["kind"]}},
        "then": {"$ref": "#/$defs/target.local"},
    }
    _remove_titles(schema)
    _remove_titles(sections)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "SparseBP recipe",
        "description": schema["description"],
        "type": "object",
        "additionalProperties": False,
        "properties": {"base": base, **properties},
        "if": {"not": {"required": ["base"]}},
        "then": {"required": required, "properties": inner},
        "$defs": sections,
    }


def _add_policy(sections: dict[str, Schema], name: str, policy: FoundPolicy) -> None:
    """Add one policy's options. Its own definitions get its name as a prefix."""
    assert policy.policy_class is not None
    prefix = _make_key(name)
    options = policy.policy_class.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    for inner, definition in options.pop("$defs", {}).items():
        sections[f"{prefix}.{inner}"] = definition
    fields = options.get("properties", {})
    for option in fields:
        if is_schedulable(policy.policy_class, option):
            fields[option] = _allow_schedule(fields[option])
    options["properties"] = {"name": {"const": name}, **fields}
    sections[prefix] = options


def _allow_schedule(field: Schema) -> Schema:
    """Return the schema of an option that is a number or a schedule over the training."""
    about: Schema = {key: field[key] for key in ("description", "default") if key in field}
    number = {key: value for key, value in field.items() if key not in about and key != "title"}
    return {**about, "anyOf": [*number.pop("anyOf", [number]), {"$ref": "#/$defs/Schedule"}]}


def _make_entry(usable: Mapping[str, FoundPolicy]) -> Schema:
    """Return the schema of a policy entry. The policy's name determines its options; the name alone is valid too."""
    name = {"enum": list(usable), "description": "A name that `sparsebp policies` lists."}
    bare = [key for key, p in usable.items() if p.policy_class and not _requires_options(p)]
    return {
        "anyOf": [
            *([{"enum": bare}] if bare else []),
            {
                "type": "object",
                "required": ["name"],
                "properties": {"name": name},
                "allOf": [
                    {
                        "if": {"properties": {"name": {"const": key}}},
                        "then": {"$ref": f"#/$defs/{_make_key(key)}"},
                    }
                    for key in usable
                ],
            },
        ]
    }


def _find_kinds(targets: Mapping[str, FoundTarget] | None) -> dict[str, str]:
    """Map each allowed value of a target's ``kind``, including named targets, to its kind."""
    if targets is not None:
        return {kind: kind for kind in targets}
    named = {name: str(node.plain.get("kind", "local")) for name, node in named_targets().items()}
    usable = {kind: kind for kind, target in find_targets().items() if target.target_class is not None}
    return usable | {name: kind for name, kind in named.items() if kind in usable}


def _add_target(sections: dict[str, Schema], kind: str, target: FoundTarget, common: Schema) -> None:
    """Add one kind's options to the keys that all targets share."""
    prefix = _make_key(kind, "target")
    options = target.options_class.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    for inner, definition in options.pop("$defs", {}).items():
        sections[f"{prefix}.{inner}"] = definition
    options["properties"] = {**common, **options["properties"]}
    sections[prefix] = options


def _make_target(kinds: Mapping[str, str], description: str) -> Schema:
    """Return the schema of a target. Its kind determines the allowed options; the kind alone is valid too."""
    chosen = [
        {
            "if": {"required": ["kind"], "properties": {"kind": {"const": name}}},
            "then": {"$ref": f"#/$defs/{_make_key(kind, 'target')}"},
        }
        for name, kind in kinds.items()
    ]
    kind = {"enum": list(kinds), "description": TargetSection.model_fields["kind"].description}
    return {
        "description": description,
        "anyOf": [{"enum": list(kinds)}, {"type": "object", "properties": {"kind": kind}, "allOf": chosen}],
    }


def _make_key(name: str, group: str = "policy") -> str:
    """Return a key for a definition that needs no escaping in a ``$ref``."""
    return f"{group}." + re.sub(r"[^A-Za-z0-9._-]", lambda match: f"-{ord(match[0]):x}-", name)


def _requires_options(policy: FoundPolicy) -> bool:
    assert policy.policy_class is not None
    return any(field.is_required() for field in policy.policy_class.model_fields.values())


def _remove_titles(schema: object) -> None:
    """Remove pydantic's titles, which repeat the keys and hide the descriptions in editors."""
    if isinstance(schema, list):
        for part in schema:
            _remove_titles(part)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("title"), str):
        del schema["title"]
    for part in schema.values():
        _remove_titles(part)
