"""Read conversations from a dataset's rows: lists of messages, or columns with one message each, as the recipe maps
them.

A message has the fields that chat templates read: ``role``, ``content``, and others such as ``tool_calls``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy.error_text import shorten, show_with_type
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.run.budget import LARGEST_SMALL, read_bounded
from sparsebp_cli.source.column import SHAREGPT, Rows, read_column, write_keys
from sparsebp_cli.source.reader import Row

ASSISTANT = "assistant"
Trained = Literal["assistant", "last", "all"]
# Roles that templates know. A template would write any other role literally, and no model has seen it.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
NAMED_ROLES = ("system", "user", "assistant", "tool")  # roles that a mapping may rename
JOINED_ROLES = ("system", "user", "assistant")  # whose messages may have columns of their own, in this order
SEPARATOR = "\n\n"  # between the columns of one message


@dataclass(frozen=True)
class Conversation:
    """The checked messages of one row, with the weight of each."""

    place: str  # of the row, for errors
    messages: Sequence[Mapping[str, object]]  # empty: the row's columns hold no text
    weights: Sequence[float]  # one for each message
    tools: Sequence[object] | None = None
    num_given: int = 0  # number of messages at the start that are the prompt and never trained

    def is_trained(self, number: int, train_on: Trained) -> bool:
        """Return whether a message is trained, unless its weight is 0."""
        if number < self.num_given:
            return False
        if self.num_given or train_on == "all":
            return True
        role = self.messages[number]["role"]
        return role == ASSISTANT and (train_on == "assistant" or number == self.last_of_assistant)

    @property
    def last_of_assistant(self) -> int:
        """The index of the assistant's last message; -1 if there is none."""
        numbers = (number for number, message in enumerate(self.messages) if message["role"] == ASSISTANT)
        return max(numbers, default=-1)


def read_conversations(rows: Rows, columns: Mapping[str, str | Sequence[str]]) -> list[Conversation]:
    """Return the conversation of each row, by the recipe's mapping ``columns``. With ``messages``, or without ``user``
    and ``assistant``, the rows hold lists of messages. Otherwise each message has one or several columns."""
    tools = _read_tools(rows, str(columns.get("tools", "tools")), is_given="tools" in columns)
    if _has_columns(columns):
        _refuse_missing(rows, columns)
        talks = [_join(row, columns) for row in rows]
    else:
        name = str(columns.get("messages", "messages"))
        lists = zip(rows, read_column(rows, name), strict=True)
        talks = [read_messages(row, value, name, columns) for row, value in lists]
        _refuse_ignored(rows, talks, columns)
    return [
        Conversation(row.place, messages, _weigh(row, messages), of_row)
        for row, messages, of_row in zip(rows, talks, tools, strict=True)
    ]


def read_prompts(rows: Rows, prompt_column: str, completion_column: str) -> list[Conversation]:
    """Return the conversation of each row whose prompt and completion are lists of messages."""
    talks = []
    pairs = zip(rows, read_column(rows, prompt_column), read_column(rows, completion_column), strict=True)
    tools = _read_tools(rows, "tools", is_given=False)
    for (row, prompt, completion), of_row in zip(pairs, tools, strict=True):
        first = read_messages(row, prompt, prompt_column, {})
        messages = [*first, *read_messages(row, completion, completion_column, {})]
        talks.append(Conversation(row.place, messages, _weigh(row, messages), of_row, num_given=len(first)))
    return talks


def read_talks(rows: Rows, section: DatasetSection) -> list[Conversation] | None:
    """Return the conversation of each row; None if the rows hold texts."""
    if section.format == "chat":
        return read_conversations(rows, section.columns)
    if section.format == "completion" and holds_messages(rows, section.column("prompt")):
        return read_prompts(rows, *section.read_columns)
    return None


def find_prompt(row: Row, columns: Mapping[str, str | Sequence[str]]) -> str:
    """Return all messages but the last as text. Rows with equal prompts belong together."""
    if _has_columns(columns):
        return json.dumps([row.get(name) for name in list_names({**columns, "assistant": ()})], default=str)
    value = _parse_list(row.get(str(columns.get("messages", "messages"))))
    return json.dumps(value[:-1] if isinstance(value, list) else value, default=str, sort_keys=True)


def list_names(columns: Mapping[str, str | Sequence[str]]) -> list[str]:
    """Return the columns of all messages; none if the messages of a row are in one column."""
    if not _has_columns(columns):
        return []
    given = [columns[role] for role in JOINED_ROLES if role in columns]
    return [name for names in given for name in ([names] if isinstance(names, str) else names)]


def _refuse_missing(rows: Rows, columns: Mapping[str, str | Sequence[str]]) -> None:
    """Raise DataError if no row has one of the columns. Rows of a JSON file need not have all: of some rows, such as a
    small validation split, none may have Alpaca's ``input``."""
    of_json = all(row.is_of_json for row in rows)
    for role in JOINED_ROLES:
        names = [columns[role]] if isinstance(columns.get(role), str) else columns.get(role, ())
        there = [name for name in names if any(name in row for row in rows)]
        for name in names if not (there and of_json) else ():
            read_column(rows, str(name))  # raises the error, which lists the columns


def _refuse_ignored(
    rows: Rows, talks: Sequence[Sequence[dict[str, object]]], columns: Mapping[str, str | Sequence[str]]
) -> None:
    """Raise DataError for a role whose name is a column of the rows, and that no message has: the column's text, such
    as a system prompt, would be lost."""
    found = {message["role"] for messages in talks for message in messages}
    for role in (role for role in NAMED_ROLES if role in columns and role not in found):
        name = str(columns[role])
        if (row := next((row for row in rows if name in row), None)) is not None:
            raise DataError(
                f"{row.place}: column {name!r} would be ignored: beside a column of messages, the key {role} of "
                f"dataset.columns names a role, and no message has the role {name!r}; move the text into the messages, "
                f"or leave out the key {role}"
            )


def _has_columns(columns: Mapping[str, object]) -> bool:
    """Return whether each message has its own column."""
    return "messages" not in columns and "assistant" in columns


def holds_messages(rows: Rows, column: str) -> bool:
    """Return whether the first row with a value in the column has a list of messages, not a text."""
    first = _parse_list(next((row[column] for row in rows if row.get(column) is not None), None))
    return isinstance(first, list) and bool(first) and isinstance(first[0], Mapping)


def _parse_list(value: object) -> object:
    """Return the messages that a table column stores as JSON text. Return any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    found = _parse(value)
    if not isinstance(found, list) or not all(isinstance(one, dict) and len(one) > 1 for one in found):
        return value
    return found if any({"role", "from"} & one.keys() for one in found) else value


def _parse_arguments(call: object) -> object:
    """Return a tool call with its arguments parsed if they are JSON text, which a template would quote."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    parsed = _parse(given) if isinstance(given, str) else None
    if not isinstance(parsed, dict):
        return call
    whole = {**function, "arguments": parsed}
    return {**call, "function": whole} if "function" in call else whole


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_messages(
    row: Row, value: object, column: str, columns: Mapping[str, str | Sequence[str]]
) -> list[dict[str, object]]:
    """Return the messages in a column of a row, renamed to the keys and roles that templates read."""
    value = _parse_list(value)
    if not isinstance(value, list) or not value:
        got = "nothing" if value is None else "an empty list" if value == [] else show_with_type(value)
        raise DataError(f"{row.place}: column {column!r} must contain a list of messages, got {got}")
    role_key, content_key = str(columns.get("role", "role")), str(columns.get("content", "content"))
    names = {str(columns[role]): role for role in NAMED_ROLES if role in columns}
    messages = []
    for number, given in enumerate(value):
        place = f"{row.place}: column {column!r}, message {number}"
        if not isinstance(given, Mapping):
            raise DataError(
                f"{place}: must be a mapping with the keys {role_key} and {content_key}, got {show_with_type(given)}"
            )
        # Table readers fill missing fields with nulls, which templates would write as None.
        message = {str(key): part for key, part in given.items() if part is not None}
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [_parse_arguments(call) for call in calls]
        if role_key not in message:
            hint = (
                f"; to read such messages, give dataset.{write_keys({'columns': SHAREGPT})}"
                if {"from", "value"} <= message.keys()
                else ""
            )
            raise DataError(
                f"{place}: needs the key {role_key!r}, got {', '.join(map(shorten, message)) or 'no keys'}{hint}"
            )
        role = message.pop(role_key)
        role = names.get(str(role), role)
        if role not in ROLES:
            raise DataError(f"{place}: unknown role {shorten(repr(role))}{_advise_role(str(role))}")
        content = message.pop(content_key, None)
        if content is None and not message.keys() - {"weight"}:
            text = (
                f"key {content_key!r} must be text, got null" if content_key in given else f"{content_key!r} is missing"
            )
            raise DataError(f"{place}: {text}")
        if content is not None and not isinstance(content, str | list):
            raise DataError(f"{place}: {content_key} must be text or a list of parts, got {show_with_type(content)}")
        kinds = [part.get("type", "text") for part in content if isinstance(part, Mapping)] if content else []
        if other := next((kind for kind in kinds if kind != "text"), None):
            raise DataError(f"{place}: has a part of type {shorten(repr(other))}; recipes train only on text")
        messages.append({"role": role} | ({} if content is None else {"content": content}) | message)
    return messages


def _advise_role(role: str) -> str:
    usual = {
        "human": "user",
        "gpt": "assistant",
        "bot": "assistant",
        "model": "assistant",
        "function_call": "assistant",
    }
    known = f"; known: {', '.join(ROLES)}"
    return (
        f"{known}; to read it, give dataset.columns: {{messages: COLUMN, {usual[role]}: {role}}}"
        if role in usual
        else known
    )


def _join(row: Row, columns: Mapping[str, str | Sequence[str]]) -> list[dict[str, object]]:
    """Return the messages of a row whose columns hold one message each. A column that only other rows have is empty.
    Leave out an empty system message. Return no messages if the user or the assistant has no text: such a row gives no
    example."""
    messages: list[dict[str, object]] = []
    for role in JOINED_ROLES:
        given = columns.get(role, ())
        names = [given] if isinstance(given, str) else list(given)
        parts = []
        for name in names:
            value = row.get(name)
            if value is not None and not isinstance(value, str | int | float):
                raise DataError(f"{row.place}: column {name!r} must contain text, got {show_with_type(value)}")
            parts.append("" if value is None else str(value))
        content = SEPARATOR.join(part for part in parts if part)
        if content:
            messages.append({"role": role, "content": content})
        elif names and role != "system":
            return []
    return messages


def _weigh(row: Row, messages: Sequence[dict[str, object]]) -> list[float]:
    """Remove each message's weight and return the weights; 1 for messages without one."""
    weights = []
    for number, message in enumerate(messages):
        weight = message.pop("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise DataError(
                f"{row.place}: message {number}: weight must be a finite number, got {show_with_type(weight)}"
            )
        weights.append(float(weight))
    return weights


def _read_tools(rows: Rows, column: str, *, is_given: bool) -> list[Sequence[object] | None]:
    """Return the tools of each row, a list of schemas or its JSON; None for rows without tools."""
    if not is_given and not any(column in row for row in rows):
        return [None] * len(rows)
    found: list[Sequence[object] | None] = []
    for row, value in zip(rows, read_column(rows, column), strict=True):
        tools = value
        if isinstance(value, str):
            try:
                tools = json.loads(value) if value.strip() else None
            except ValueError as error:
                raise DataError(f"{row.place}: column {column!r}: not JSON: {error}") from None
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
            raise DataError(f"{row.place}: column {column!r} must contain a list of tools, got {show_with_type(tools)}")
        found.append(tools or None)
    return found


def is_path(template: str) -> bool:
    """Return whether a recipe's chat template is a path. A plan holds the template's text instead."""
    return "{" not in template and "\n" not in template


def read_template(template: str, folders: Sequence[Path] = ()) -> str:
    """Return the text of a recipe's chat template. A relative path is searched in the folders in order. Raise DataError
    if the file does not exist or is not a template."""
    if not is_path(template):
        return template
    places = [folder / template for folder in folders] or [Path(template)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise DataError(f"no chat template file {template} in {', '.join(str(place.parent) for place in places)}")
    try:
        text = read_bounded(file, LARGEST_SMALL).decode()
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
    if "{" not in text:
        raise DataError(f"{file}: must be a Jinja template, but has no {{{{ ... }}}} or {{% ... %}}")
    return text
