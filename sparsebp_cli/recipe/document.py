"""Read YAML strictly: one document of plain mappings, lists and scalars, each with its place.

The reader consumes PyYAML's events without recursion and without its constructors, so it executes and expands nothing.
It refuses the first anchor, alias, tag or merge key, so the result is never larger than the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.policy.error_text import shorten, show, show_with_type

LONGEST_FILE_NAME = 300


@dataclass(frozen=True)
class Place:
    """A position in a file or override, for error messages."""

    file: str  # as the user gave it, or --set KEY=VALUE
    line: int = 0  # from 1; 0 if unknown
    column: int = 0  # in characters, from 1; 0 if unknown

    def error(self, text: str, path: Sequence[str | int] | str = ()) -> RecipeError:
        """Return an error at this place. ``path`` is the sequence of keys that lead there, or their dotted path."""
        key = path if isinstance(path, str) else ".".join(shorten(str(part)) for part in path)
        file = shorten(self.file, LONGEST_FILE_NAME)
        return RecipeError(text, file=file, line=self.line, column=self.column, key=key)


@dataclass(frozen=True)
class Node:
    """A value of a recipe and its place."""

    # a scalar, a list of nodes, or a mapping from text to nodes
    content: dict[str, Node] | list[Node] | str | int | float | bool | None
    place: Place  # of the value
    key_place: Place | None = None  # of its key; None in a list and at the top

    @property
    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.content, dict):
            return {key: child.plain for key, child in self.content.items()}
        if isinstance(self.content, list):
            return [child.plain for child in self.content]
        return self.content


DEEPEST = 32
LONGEST_KEY = 200

# Line breaks that editors do not count, control characters and surrogates can hide or forge parts of an error line.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")

UNCLOSED = "a quote is not closed"
NO_COLON = "a key without ':', or wrong indentation"

# Translations of PyYAML's messages for the author of a recipe.
_MESSAGES = (
    (r"found character '\\t'", "indented with a tab; use spaces"),
    (r"mapping values are not allowed", "a ':' is not allowed here: correct the indentation, or quote the text"),
    (r"could not find expected ':'", NO_COLON),
    (r"<document start>", "wrong indentation: the keys of a recipe start at the same column"),
    (r"expected <block end>, but found '<scalar>'", "text after a closing quote: put the whole value in quotes"),
    (r"expected <block end>", "wrong indentation: this line is not aligned with the lines above"),
    (r"did not find expected|expected the node content", "a value is missing or misplaced"),
    (r"expected ',' or '[]}]'|expected ',' or", "a bracket is not closed, or a comma is missing"),
    (r"unexpected end of stream", UNCLOSED),
    (r"sequence entries are not allowed", "a '-' is not allowed here: each item of a list starts its own line"),
    (
        r"while scanning an? (alias|anchor)",
        "an alias or anchor is not allowed in a recipe; a text with * or & needs quotes",
    ),
    (r"unknown escape character", "a backslash between double quotes must be doubled; or use single quotes"),
    (r"special characters are not allowed", "a character that is not allowed in a recipe"),
    (r"found character .* that cannot start any token", "a text that starts with this character needs quotes"),
)


class _Loader(yaml.SafeLoader):
    """PyYAML's scanner and parser; a subclass, so that registrations with the global SafeLoader have no effect here."""


@dataclass
class _Open:
    """A collection that is still being read."""

    node: Node
    index: int = 0
    key: str | None = None
    key_place: Place | None = None
    first_lines: dict[str, int] = field(default_factory=dict)


class _Reader:
    """Converts events to nodes."""

    def __init__(self, source: str, within: Sequence[str] | None) -> None:
        self.source, self.within, self.has_lines = source, within or (), within is None
        self.root: Node | None = None
        self.open: list[_Open] = []
        self.num_documents = 0

    def place(self, mark: Any) -> Place:
        if mark is None or not self.has_lines:
            return Place(self.source)
        return Place(self.source, mark.line + 1, mark.column + 1)

    @property
    def path(self) -> list[str | int]:
        parts = [o.key if isinstance(o.node.content, dict) else o.index for o in self.open]
        return [*self.within, *(part for part in parts if part is not None)]

    def quote(self, text: str) -> str:
        """Return the text in brackets if it is below a key, else an empty string. A file that is not a mapping is not a
        recipe: it may hold the user's secrets, so errors never quote it."""
        return f" ({shorten(text)})" if self.path and isinstance(self.path[0], str) else ""

    def take(self, event: yaml.Event) -> None:
        place = self.place(event.start_mark)
        if isinstance(event, yaml.DocumentStartEvent):
            self.num_documents += 1
            if self.num_documents > 1:
                raise place.error("a recipe must be one YAML document, but a second one begins here ('---')")
        if isinstance(event, yaml.AliasEvent):
            raise place.error(
                f"an alias{self.quote(f'*{event.anchor}')} is not allowed in a recipe; repeat the value", self.path
            )
        if isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent):
            self.start(event, place)
        elif isinstance(event, yaml.CollectionEndEvent):
            self.open.pop()
            self.finish()

    def start(self, event: yaml.CollectionStartEvent | yaml.ScalarEvent, place: Place) -> None:
        if event.anchor is not None:
            text = f"an anchor{self.quote(f'&{event.anchor}')} is not allowed in a recipe; repeat the value"
            raise place.error(text, self.path)
        if event.tag is not None:
            raise place.error(
                f"a tag{self.quote(event.tag)} is not allowed in a recipe; write the plain value", self.path
            )
        holder = self.open[-1] if self.open else None
        if holder and isinstance(holder.node.content, dict) and holder.key is None:
            self.take_key(event, place, holder)
            return
        node = self.make(event, place, holder.key_place if holder else None)
        self.attach(node, holder)
        if isinstance(event, yaml.ScalarEvent):
            self.finish()
        elif len(self.open) >= DEEPEST:
            raise place.error(f"nested too deeply: at most {DEEPEST} levels are allowed")
        else:
            self.open.append(_Open(node))

    def finish(self) -> None:
        """Advance the enclosing collection after a complete value."""
        if self.open:
            self.open[-1].index += 1
            self.open[-1].key = None

    def make(self, event: yaml.CollectionStartEvent | yaml.ScalarEvent, place: Place, key_place: Place | None) -> Node:
        if isinstance(event, yaml.MappingStartEvent):
            return Node({}, place, key_place)
        if isinstance(event, yaml.CollectionStartEvent):
            return Node([], place, key_place)
        if _CONTROL.search(event.value):
            raise place.error(f"a control character is not allowed in a value, got {show(event.value)}", self.path)
        if not _is_plain(event):
            return Node(event.value, place, key_place)
        try:
            return Node(read_scalar(event.value), place, key_place)
        except ValueError as error:
            text = f"{error}, got {shorten(event.value)}; if it is meant as text, put it in quotes"
            raise place.error(text, self.path) from None

    def take_key(self, event: yaml.Event, place: Place, holder: _Open) -> None:
        if not isinstance(event, yaml.ScalarEvent):
            raise place.error("a key must be text, got a mapping or a list", self.path)
        key = self.make(event, place, None).content
        if _is_plain(event) and event.value == "<<":
            raise place.error("a merge key (<<) is not allowed in a recipe; use base:, or repeat the values", self.path)
        if not isinstance(key, str):
            raise place.error(f"a key must be text, got {show_with_type(key)}; put it in quotes", self.path)
        if not key.isprintable() or len(key) > LONGEST_KEY:
            text = f"a key must be printable and at most {LONGEST_KEY} characters long, got {show(key)}"
            raise place.error(text, self.path)
        if key in holder.first_lines:
            first = f", first on line {holder.first_lines[key]}" if self.has_lines else ""
            raise place.error(f"duplicate key{first}", [*self.path, key])
        holder.key, holder.key_place = key, place
        holder.first_lines[key] = place.line

    def attach(self, node: Node, holder: _Open | None) -> None:
        if holder is None:
            self.root = node
        elif isinstance(holder.node.content, list):
            holder.node.content.append(node)
        elif isinstance(holder.node.content, dict):
            assert holder.key is not None
            holder.node.content[holder.key] = node


def _is_plain(event: yaml.ScalarEvent) -> bool:
    """Return whether a scalar is unquoted, so that it may be a number or another plain value."""
    return event.implicit[0] if isinstance(event.implicit, tuple) else event.implicit


def read_document(text: str, source: str, within: Sequence[str] | None = None) -> Node | None:
    """Read one YAML document and return its top node; None if it holds only comments. Errors name ``source``: a file,
    or ``--set KEY=VALUE``. ``within`` is the path of an override's value, whose errors name no line; it is None for a
    file. Raise RecipeError for anything that a recipe must not contain."""
    reader = _Reader(source, within)
    control = _CONTROL.search(text)
    if control:
        line = text.count("\n", 0, control.start()) + 1
        column = control.start() - text.rfind("\n", 0, control.start())
        place = Place(source, line, column) if reader.has_lines else Place(source)
        raise place.error(
            f"a control character (U+{ord(control.group()):04X}) is not allowed in a recipe", reader.within
        )
    loader = _Loader(text)
    try:
        while loader.check_event():
            reader.take(loader.get_event())  # type: ignore[no-untyped-call]
    except yaml.MarkedYAMLError as error:
        words = _describe_problem(error)
        starts, found = error.context_mark, error.problem_mark
        mark = (starts or found) if words in {UNCLOSED, NO_COLON} else (found or starts)
        raise (reader.place(mark) if mark else Place(source)).error(words, reader.within) from None
    except RecipeError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError):  # PyYAML does not check \U escapes and numbers after %YAML
        text = "not YAML: an escaped character (\\U...) or a number is out of range"
        raise reader.place(loader.get_mark()).error(text, reader.within) from None
    finally:
        loader.dispose()
    return reader.root


def _describe_problem(error: yaml.MarkedYAMLError) -> str:
    said = " ".join(" ".join(str(part) for part in (error.context, error.problem) if part).split())
    for pattern, words in _MESSAGES:
        if re.search(pattern, said):
            return words
    return f"not YAML: {shorten(said, 120)}"


LARGEST_INT = 2**63 - 1

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "True", "TRUE"}
_FALSE = {"false", "False", "FALSE"}
_INT = re.compile(r"[-+]?[0-9]+", re.ASCII)
_BASED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", re.ASCII)


def read_scalar(text: str) -> str | int | float | bool | None:
    """Return the value of a plain (unquoted) scalar. Raise ValueError for numbers that are not finite or do not fit
    into 64 bits."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    number: int | float
    if _INT.fullmatch(text):
        # Longer numbers are too large in any case, and Python refuses to parse very long ones.
        number = int(text) if len(text) < 100 else math.inf
    elif _BASED_INT.fullmatch(text):
        number = int(text, 0) if len(text) < 100 else math.inf
    elif _FLOAT.fullmatch(text) or _NOT_FINITE.fullmatch(text):
        number = float(text.replace(".i", "i").replace(".I", "I").replace(".n", "n").replace(".N", "N"))
    else:
        return text
    if not math.isfinite(number):
        raise ValueError("must be a finite number" if _NOT_FINITE.fullmatch(text) else "is too large for a number")
    if isinstance(number, int) and abs(number) > LARGEST_INT:
        raise ValueError(f"must be a whole number of at most {LARGEST_INT}")
    return number
