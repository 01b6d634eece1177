"""Formatting of values and ranges in error messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

BOUNDS = ("gt", "ge", "lt", "le")
LOWER = ("gt", "ge")
LONGEST_SHOWN = 60
HUGE = "a huge number"


def show(value: object) -> str:
    """Return a value as YAML writes it, in one line of at most about 60 characters; a collection's type alone."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to print the longest ones
        return HUGE
    return shorten(repr(value))


def show_with_type(value: object) -> str:
    """Return a value with its type, for errors about the type."""
    if isinstance(value, str):
        return f"{show(value)} (text)"
    shown = show(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{shown} (a number)" if is_number and shown != HUGE else shown


def describe_kind(value: object) -> str:
    """Return the type of a value in words, for errors about files whose content may be secret."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str() | bytes():
            return "text"
        case Mapping():
            return "a mapping"
    # A Parquet file may hold dates, for example.
    return "a list" if isinstance(value, Sequence) else f"a {type(value).__name__}"


def shorten(text: str, longest: int = LONGEST_SHOWN) -> str:
    """Return a text of at most ``longest`` characters, with line breaks and other invisible characters escaped."""
    if len(text) > longest:
        text = f"{text[:longest]}..." + (text[0] if text[0] in "'\"" else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe_range(bound: str, limit: object, field: FieldInfo | None) -> str:
    """Return the whole range of a field, such as ``in (0, 1]``, not only the bound that a value violated. ``bound`` is
    the violated bound (``gt``, ``ge``, ``lt`` or ``le``) and ``limit`` its value. If the field has several ranges,
    return this bound alone."""
    found: dict[str, set[object]] = {name: set() for name in BOUNDS}
    for part in _walk_metadata(field):
        for name in BOUNDS:
            if getattr(part, name, None) is not None:
                found[name].add(getattr(part, name))
    is_low = bound in LOWER
    same = [value for name in BOUNDS if (name in LOWER) == is_low for value in found[name]]
    others = [(name, value) for name in BOUNDS if (name in LOWER) != is_low for value in found[name]]
    if len(others) == 1 and len(same) == 1:
        (low, start), (high, end) = sorted([(bound, limit), others[0]], key=lambda pair: pair[0] not in LOWER)
        return f"in {'(' if low == 'gt' else '['}{_plain(start)}, {_plain(end)}{')' if high == 'lt' else ']'}"
    return f"{ {'gt': 'above', 'ge': 'at least', 'lt': 'below', 'le': 'at most'}[bound] } {_plain(limit)}"


def _plain(limit: object) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _walk_metadata(field: FieldInfo | None) -> Iterator[object]:
    """Yield the constraints of a field, including constraints inside Optional, Annotated and list."""
    if field is None:
        return
    yield from field.metadata
    waiting: list[object] = [field.annotation]
    while waiting:
        annotation = waiting.pop()
        if get_origin(annotation) is Literal:
            continue
        for part in (*getattr(annotation, "__metadata__", ()), *get_args(annotation)):
            if isinstance(part, FieldInfo):
                yield from part.metadata
            elif any(hasattr(part, name) for name in BOUNDS):
                yield part
            else:
                waiting.append(part)
