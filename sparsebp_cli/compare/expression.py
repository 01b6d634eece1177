"""Parse a small language for conditions: ``policy=topk and keep<0.2``, ``eval/loss.delta.high > 0.02``.

    condition   = part {"or" part}
    part        = factor {"and" factor}
    factor      = "not" factor | "(" condition ")" | comparison
    comparison  = NAME ("=" | "==" | "!=" | "<" | "<=" | ">" | ">=" | "~") VALUE

A value is a number, ``true``, ``false``, ``null``, a word, or text in quotes; ``~`` matches a glob (``name~topk-*``).
Nothing else is evaluated. A comparison with an unknown value is neither true nor false (Kleene's logic), so absent
values never satisfy a condition.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeGuard

from sparsebp_cli.errors import UsageError

LONGEST = 500
DEEPEST = 20
TOKEN = re.compile(r"""\s*(?:(<=|>=|!=|==|[=<>~()])|'([^']*)'|"([^"]*)"|([^\s()<>=!~'"]+))""")
ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
OPERATORS = {"=", "==", "!=", "~", *ORDER}
CONSTANTS: dict[str, object] = {"true": True, "false": False, "null": None}

Find = Callable[[str], Sequence[object]]  # a name to all of its values; empty: unknown
Test = Callable[[Find], bool | None]


@dataclass(frozen=True)
class Condition:
    """A parsed condition."""

    names: tuple[str, ...]  # all names that it contains, in order
    holds: Test  # whether the found values satisfy it; None: undecided because of unknown values


def parse(text: str, option: str) -> Condition:
    """Parse a condition of at most 500 characters. Raise ``UsageError``, which names the command line's ``option``."""
    if len(text) > LONGEST:
        raise UsageError(f"{option}: at most {LONGEST} characters are allowed, got {len(text)}")
    return _Parser(text, option).parse()


class _Parser:
    def __init__(self, text: str, option: str) -> None:
        self.text, self.option, self.place, self.depth = text, option, 0, 0
        self.names: list[str] = []
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
        test = self._join("or")
        if self.place < len(self.tokens):
            raise self._expected("'and', 'or' or the end of the condition")
        return Condition(tuple(self.names), test)

    def _join(self, word: str) -> Test:
        read = self._factor if word == "and" else lambda: self._join("and")
        tests = [read()]
        while self._take("word", word):
            tests.append(read())
        decides = word == "or"

        def test(find: Find) -> bool | None:
            found = [part(find) for part in tests]
            return decides if decides in found else None if None in found else not decides

        return test

    def _factor(self) -> Test:
        self.depth += 1
        # Each bracket costs several calls, so many of them would end in a RecursionError.
        if self.depth > DEEPEST:
            raise UsageError(f"{self.option}: brackets may be nested at most {DEEPEST} deep")
        if self._take("word", "not"):
            test = _negate(self._factor())
        elif self._take("sign", "("):
            test = self._join("or")
            if not self._take("sign", ")"):
                raise self._expected("')'")
        else:
            test = self._comparison()
        self.depth -= 1
        return test

    def _comparison(self) -> Test:
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
        self.names.append(name)
        wanted, is_negated = value if kind == "text" else _constant(value), sign == "!="

        def test(find: Find) -> bool | None:
            """Return whether any value fits (for ``!=``: none is equal); None if there is no value."""
            values = find(name)
            return any(_fits(sign, found, wanted) for found in values) != is_negated if values else None

        return test

    def _next(self) -> tuple[str, str]:
        return self.tokens[self.place] if self.place < len(self.tokens) else ("end", "")

    def _take(self, kind: str, value: str) -> bool:
        is_next = self._next() == (kind, value)
        self.place += is_next
        return is_next

    def _expected(self, what: str) -> UsageError:
        kind, value = self._next()
        got = "the end" if kind == "end" else repr(value)
        return UsageError(f"{self.option}: expected {what}, got {got} in {self.text!r}")


def _negate(test: Test) -> Test:
    return lambda find: None if (found := test(find)) is None else not found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Number(float):
    """A number that text is compared with as it was written: a tag 1.10 is not 1.1."""

    word: str

    def __new__(cls, word: str) -> _Number:
        found = super().__new__(cls, word)
        found.word = word
        return found

    def __str__(self) -> str:
        return self.word


def _constant(word: str) -> object:
    if word in CONSTANTS:
        return CONSTANTS[word]
    try:
        return _Number(word)
    except ValueError:
        return word


def _fits(sign: str, value: object, wanted: object) -> bool:
    if sign in ORDER:
        return _is_number(value) and _is_number(wanted) and bool(ORDER[sign](value, wanted))
    if sign == "~":
        return fnmatchcase(str(value), str(wanted))
    both_numbers = _is_number(value) and _is_number(wanted)
    if both_numbers or value is None or wanted is None or isinstance(value, bool):
        return bool(value == wanted)
    return str(value) == str(wanted)
