"""Find what a chat template wrote of a message: search each of its texts in the rendered conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Names and numbers by which programs identify a call; few templates write them.
UNWRITTEN = ("role", "weight", "id", "type", "index", "tool_call_id")
ESSENTIAL = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")  # an assistant's text
TOOL_ROLES = ("tool", "function", "ipython", "observation")  # roles whose results several templates write as JSON
ARGUMENTS = "arguments"


@dataclass(frozen=True)
class Value:
    """A text in a message, and its location."""

    key: str  # key of the message
    text: str
    is_json: bool  # whether a template writes it as JSON, as inside a call's arguments


def find_values(message: Mapping[str, object]) -> Iterator[Value]:
    """Yield the texts of a message that a template should write."""
    for key, value in message.items():
        yield from _walk(key, key, value, is_json=False)


def _walk(top: str, key: str, value: object, *, is_json: bool) -> Iterator[Value]:
    if isinstance(value, str):
        if key not in UNWRITTEN or is_json:
            yield Value(top, value, is_json)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _walk(top, str(name), part, is_json=is_json or key == ARGUMENTS)
    elif isinstance(value, list):
        for part in value:
            yield from _walk(top, key, part, is_json=is_json)


def find_written(message: Mapping[str, object], solid: str, *, is_trained: bool) -> Iterator[tuple[str, str]]:
    """Yield a kind of fault and the message's key for each part that ``solid`` lacks or has in another form. ``solid``
    is the rendered text without white space, because templates trim and indent."""
    may_escape = str(message["role"]) in TOOL_ROLES
    for key, value in message.items():
        if key != "role" and any(squeeze(shown) in solid for shown in _write_as_python(value)):
            yield "escaped", key
        if _has_null(value):
            yield "null", key
    for one in find_values(message):
        if squeeze(one.text) in solid:
            continue
        once = _escape(one.text)
        if once != one.text and squeeze(once) in solid and (one.is_json or may_escape):
            continue
        if any(squeeze(shown) in solid for shown in {once, _escape(once)} - {one.text}):
            yield "escaped", one.key
        else:
            yield "lost" if is_trained and one.key in ESSENTIAL else "unread", one.key


def squeeze(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _write_as_python(value: object) -> Iterator[str]:
    """Yield Python's notation of objects and lists in a value, if it differs from JSON."""
    if isinstance(value, Mapping | list):
        if (shown := str(value)) != json.dumps(value, ensure_ascii=False, default=str):
            yield shown
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _write_as_python(part)


def _has_null(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(part is None or _has_null(part) for part in value.values())
    return isinstance(value, list) and any(map(_has_null, value))
