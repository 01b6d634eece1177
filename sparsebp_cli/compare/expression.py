"""A small language for conditions: ``policy=topk and keep<0.2``, ``eval/loss.delta.high > 0.02``.

    condition   = part {"or" part}
    part        = factor {"and" factor}
    factor      = "not" factor | "(" condition ")" | comparison
    comparison  = NAME ("=" | "==" | "!=" | "<" | "<=" | ">" | ">=" | "~") VALUE

A value is a number, ``true``, ``false``, ``null``, a word, or text in quotes; ``~`` matches a glob (``name~topk-*``).
Nothing else is evaluated. A comparison with an unknown value is neither true nor false (Kleene's logic), so that
nothing passes because it is absent.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from sparsebp_cli.errors import UsageError

LONGEST = 500
DEEPEST = 20
TOKEN = re.compile(r"""\s*(?:(<=|>=|!=|==|[=<>~()])|'([^']*)'|"([^"]*)"|([^\s()<>=!~'"]+))""")
ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
OPERATORS = {"=", "==", "!=", "~", *ORDER}
CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None}

Find = Callable[[str], Sequence[Any]]  # a name to all of its values; empty: unknown


@dataclass(frozen=True)
class Predicate:
    """``NAME OPERATOR VALUE``."""

    name: str
    operator: str
    value: Any

    def holds(self, find: Find) -> bool | None:
        """Return whether any of the values fits (for ``!=``: none is equal); None when there is none."""
        values = find(self.name)
        if not values:
            return None
        if self.operator == "!=":
            return not any(_fits("=", value, self.value) for value in values)
        return any(_fits(self.operator, value, self.value) for value in values)


@dataclass(frozen=True)
class Joined:
    """Conditions joined by ``and`` or ``or``."""

    word: str
    parts: tuple[Condition, ...]

    def holds(self, find: Find) -> bool | None:
        """Return whether all of them, or any of them, hold."""
        found, decides = [part.holds(find) for part in self.parts], self.word == "or"
        if decides in found:
            return decides
        return None if None in found else not decides


@dataclass(frozen=True)
class Not:
    """The opposite of a condition."""

    part: Condition

    def holds(self, find: Find) -> bool | None:
        """Return whether it does not hold."""
        found = self.part.holds(find)
        return None if found is None else not found


Condition = Predicate | Joined | Not


def parse(text: str, option: str) -> Condition:
    """Parse a condition of at most 500 characters; raises ``UsageError``, which names the command line's ``option``."""
    if len(text) > LONGEST:
        raise UsageError(f"{option}: at most {LONGEST} characters are allowed, got {len(text)}")
    return _Parser(text, option).parse()


def names(condition: Condition) -> Iterator[str]:
    """Yield every name in a condition."""
    match condition:
        case Predicate():
            yield condition.name
        case Not():
            yield from names(condition.part)
        case Joined():
            for part in condition.parts:
                yield from names(part)


class _Parser:
    def __init__(self, text: str, option: str) -> None:
        self.text, self.option, self.place, self.depth = text, option, 0, 0
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while text[at:].strip():
            match = TOKEN.match(text, at)
            if match is None:
                raise UsageError(f"{option}: cannot read {text[at:].strip()[:20]!r} in {text!r}")
            sign, single, double, word = match.groups()
            quoted = single if single is not None else double
            self.tokens.append(("sign", sign) if sign else ("text", quoted) if quoted is not None else ("word", word))
            at = match.end()

    def parse(self) -> Condition:
        found = self._join("or")
        if self.place < len(self.tokens):
            raise self._expected("'and', 'or' or the end")
        return found

    def _join(self, word: str) -> Condition:
        parts = [self._join("and") if word == "or" else self._factor()]
        while self._next() == ("word", word):
            self.place += 1
            parts.append(self._join("and") if word == "or" else self._factor())
        return parts[0] if len(parts) == 1 else Joined(word, tuple(parts))

    def _factor(self) -> Condition:
        self.depth += 1
        if self.depth > DEEPEST:
            raise UsageError(f"{self.option}: at most {DEEPEST} conditions may lie inside each other")
        try:
            if self._next() == ("word", "not"):
                self.place += 1
                return Not(self._factor())
            if self._next() == ("sign", "("):
                self.place += 1
                found = self._join("or")
                if self._next() != ("sign", ")"):
                    raise self._expected("')'")
                self.place += 1
                return found
            return self._comparison()
        finally:
            self.depth -= 1

    def _comparison(self) -> Predicate:
        kind, name = self._next()
        if kind == "sign" or not name:
            raise self._expected("a name")
        self.place += 1
        kind, sign = self._next()
        if kind != "sign" or sign not in OPERATORS:
            raise self._expected(f"one of = != < <= > >= ~ after {name!r}")
        self.place += 1
        kind, value = self._next()
        if kind not in {"word", "text"}:
            raise self._expected(f"a value after {name} {sign}")
        self.place += 1
        return Predicate(name, sign, value if kind == "text" else _constant(value))

    def _next(self) -> tuple[str, str]:
        return self.tokens[self.place] if self.place < len(self.tokens) else ("end", "")

    def _expected(self, what: str) -> UsageError:
        kind, value = self._next()
        got = "the end" if kind == "end" else repr(value)
        return UsageError(f"{self.option}: expected {what}, got {got} in {self.text!r}")


def _constant(word: str) -> Any:
    if word in CONSTANTS:
        return CONSTANTS[word]
    try:
        return float(word)
    except ValueError:
        return word


def _fits(sign: str, value: Any, wanted: Any) -> bool:
    both_numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (value, wanted))
    if sign in ORDER:
        return both_numbers and bool(ORDER[sign](value, wanted))
    if sign == "~":
        return fnmatchcase(str(value), str(wanted))
    if both_numbers or value is None or wanted is None or isinstance(value, bool):
        return bool(value == wanted)
    return str(value) == _as_written(wanted)


def _as_written(wanted: Any) -> str:
    """Write a name of digits, which was parsed as a number, as it was: 5 and not 5.0."""
    return f"{wanted:g}" if isinstance(wanted, float) else str(wanted)
