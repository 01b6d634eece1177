"""One-line messages for pydantic errors in a recipe or an option: the problem, the value, and the allowed values.

pydantic names one bound at a time, and puts the tags of its unions into the location. This module shows the whole
range, and makes one message of the branches of a union.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sparsebp_cli.errors import did_you_mean
from sparsebp_cli.policy.error_text import BOUNDS, describe_range, shorten, show, show_with_type

Location = tuple[str | int, ...]

MUST_BE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
    "none_required": "null",
    "finite_number": "a finite number",
}
MOST_KEYS_LISTED = 18
LONGEST_REASON = 300


@dataclass(frozen=True)
class FieldError:
    """One error in a recipe or in options."""

    location: Location  # keys and list indices that lead to the error; a missing key is at its intended place
    text: str  # the problem, the value and the allowed values; one line
    kind: Literal["missing", "unknown", "value"] = "value"  # missing and unknown are about a key
    plain: str = ""  # for an unknown key: the text without a guess at the intended key

    @property
    def key(self) -> str:
        """The dotted path, such as ``policy.0.keep``."""
        return ".".join(shorten(str(part)) for part in self.location)


def describe_errors(error: ValidationError, model: type[BaseModel], data: object) -> list[FieldError]:
    """Return one FieldError for each location that pydantic reports, in its order. Merge the branches of a union."""
    groups: dict[Location, list[tuple[Location, ErrorDetails]]] = {}
    for details in error.errors(include_url=False):
        location, union = _strip_tags(details, data)
        groups.setdefault(location if union is None else union, []).append((location, details))
    return [_describe_group(root, group, model) for root, group in groups.items()]


def unknown_key_message(key: str, known: Sequence[str]) -> str:
    """Return the message for an unknown key, with the known keys if they are few."""
    allowed = f"; allowed: {', '.join(known)}" if len(known) <= MOST_KEYS_LISTED else ""
    return f"unknown key {show(key)}{allowed if known else '; no key is allowed here'}"


def _strip_tags(details: ErrorDetails, data: Any) -> tuple[Location, Location | None]:
    """Return the location of the error in the data, and the location of the first union above it, if any."""
    location: list[str | int] = []
    union: Location | None = None
    last = len(details["loc"]) - 1
    for position, part in enumerate(details["loc"]):
        is_key = isinstance(data, Mapping) and part in data
        is_item = isinstance(part, int) and isinstance(data, list | tuple) and part < len(data)
        if is_key or is_item:
            data = data[part]
            location.append(part)
        elif details["type"] == "missing" and position == last:
            location.append(part)
        elif union is None:
            union = tuple(location)
    return tuple(location), union


def _describe_group(root: Location, group: list[tuple[Location, ErrorDetails]], model: type[BaseModel]) -> FieldError:
    """Describe one location. For a union, assume that the user meant the branch that matches deepest."""
    deepest = max(len(location) for location, _ in group)
    group = [(location, details) for location, details in group if len(location) == deepest]
    location, details = group[0]
    if len(group) == 1 or location != root:
        return _describe(location, details, model)
    phrases = dict.fromkeys(_must_be(each, None) for _, each in group)
    return FieldError(root, f"must be {' or '.join(phrases)}, got {show_with_type(details['input'])}")


def _describe(location: Location, details: ErrorDetails, model: type[BaseModel]) -> FieldError:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "missing":
        field = _find_field(model, location)
        meaning = f" ({field.description.rstrip('.')})" if field and field.description else ""
        return FieldError(location, f"missing{meaning}", "missing")
    if kind == "extra_forbidden":
        owner = _find_model(model, location[:-1])
        key, known = str(location[-1]), _list_keys(owner) if owner else []
        plain = unknown_key_message(key, known)
        return FieldError(location, f"{plain}{did_you_mean(key, known)}", "unknown", plain)
    if kind in {"value_error", "assertion_error"}:
        return FieldError(
            location, shorten(" ".join(str(context.get("error", details["msg"])).split()), LONGEST_REASON)
        )
    if kind in {"literal_error", "enum"}:
        expected = {"True": "true", "False": "false"}.get(str(context["expected"]), str(context["expected"]))
        near = did_you_mean(value, re.findall(r"'([^']*)'", expected)) if isinstance(value, str) else ""
        return FieldError(location, f"got {show(value)}, allowed: {expected.replace(' or ', ', ')}{near}")
    shown = show_with_type(value) if kind in MUST_BE else show(value)
    must_be = _must_be(details, _find_field(model, location))
    return FieldError(
        location, f"must be {must_be}, got {shown}{_find_hint(kind, value, _find_model(model, location))}"
    )


def _list_keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _must_be(details: ErrorDetails, field: FieldInfo | None) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in MUST_BE:
        return MUST_BE[kind]
    if kind in {"literal_error", "enum"}:
        return str(context["expected"])
    bound = next((name for name in BOUNDS if name in context), None)
    if bound is not None:
        return describe_range(bound, context[bound], field)
    for end, words in (("min_length", "at least"), ("max_length", "at most")):
        if end in context:
            unit = "character" if kind.startswith("string") else "item"
            return f"{words} {context[end]} {unit}{'s' if context[end] != 1 else ''} long"
    if "pattern" in context:
        return f"text that matches {context['pattern']}"
    words = " ".join(str(details["msg"]).split())
    return shorten(re.sub(r"^\w+ should (be )?", "", words), LONGEST_REASON)


def _find_hint(kind: str, value: object, owner: type[BaseModel] | None) -> str:
    if kind == "int_type" and isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return f"; write {shorten(str(int(value)))}"
    if kind in {"int_type", "float_type"} and isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+", value):
        return "; write it without quotes"
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if MUST_BE.get(kind) == "a list" and isinstance(value, str):
        return f"; write [{show(value)}]"
    if kind in {"model_type", "model_attributes_type"} and isinstance(value, str):
        return _find_key_for(value, owner)
    return ""


def _find_key_for(value: str, owner: type[BaseModel] | None) -> str:
    """Return a hint if a key of the section allows the value that was given instead of the section."""
    for key, field in owner.model_fields.items() if owner is not None else ():
        if get_origin(field.annotation) is Literal and value in get_args(field.annotation):
            return f"; write {{{key}: {value}}}"
    return ""


def _find_field(model: type[BaseModel], location: Location) -> FieldInfo | None:
    names = [part for part in location if isinstance(part, str)]
    owner = _find_model(model, tuple(names[:-1]))
    return owner.model_fields.get(names[-1]) if owner and names else None


def _find_model(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """Follow the keys of a location to the model that owns the value there."""
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = next(_walk_models(field.annotation), None) if field else None
        if inner is None:
            return None
        model = inner
    return model


def _walk_models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _walk_models(part)
