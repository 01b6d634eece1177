"""The part of JSON Schema that our schema uses, evaluated; any other keyword is an error."""

from __future__ import annotations

import re
from typing import Any

TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
WORDS = {"$schema", "title", "description", "default", "$defs"}  # say nothing about the value


def accepts(root: dict[str, Any], value: Any, schema: Any = None) -> bool:
    """Whether a schema accepts a value."""
    schema = root if schema is None else schema
    if isinstance(schema, bool):
        return schema
    return all(_check(root, key, wanted, value, schema) for key, wanted in schema.items() if key not in WORDS)


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _is(value: Any, name: str) -> bool:
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _check(root: dict[str, Any], key: str, wanted: Any, value: Any, schema: dict[str, Any]) -> bool:
    is_number, is_text = _is(value, "number"), isinstance(value, str)
    is_object, is_list = isinstance(value, dict), isinstance(value, list)
    rules = {
        "$ref": lambda: accepts(root, value, root["$defs"][wanted.removeprefix("#/$defs/")]),
        "type": lambda: _is(value, wanted),
        "const": lambda: _same(value, wanted),
        "enum": lambda: any(_same(value, each) for each in wanted),
        "anyOf": lambda: any(accepts(root, value, each) for each in wanted),
        "allOf": lambda: all(accepts(root, value, each) for each in wanted),
        "not": lambda: not accepts(root, value, wanted),
        "if": lambda: not accepts(root, value, wanted) or accepts(root, value, schema["then"]),
        "then": lambda: "if" in schema,
        "required": lambda: not is_object or set(wanted) <= set(value),
        "properties": lambda: not is_object or all(accepts(root, value[k], s) for k, s in wanted.items() if k in value),
        "additionalProperties": lambda: (
            not is_object
            or all(accepts(root, v, wanted) for k, v in value.items() if k not in schema.get("properties", {}))
        ),
        "minItems": lambda: not is_list or len(value) >= wanted,
        "maxItems": lambda: not is_list or len(value) <= wanted,
        "prefixItems": lambda: not is_list or all(accepts(root, v, s) for v, s in zip(value, wanted, strict=False)),
        "items": lambda: not is_list or all(accepts(root, each, wanted) for each in value),
        "minimum": lambda: not is_number or value >= wanted,
        "maximum": lambda: not is_number or value <= wanted,
        "exclusiveMinimum": lambda: not is_number or value > wanted,
        "exclusiveMaximum": lambda: not is_number or value < wanted,
        "minLength": lambda: not is_text or len(value) >= wanted,
        "maxLength": lambda: not is_text or len(value) <= wanted,
        "pattern": lambda: not is_text or re.search(wanted, value) is not None,
    }
    return bool(rules[key]())
