"""Patterns over the names of parameters: a glob, which may name a module that contains them, or a ``/regex/``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, Field

from sparsebp_cli.errors import PolicyError, did_you_mean
from sparsebp_cli.policy import Parameter


def _check(pattern: str) -> str:
    if _is_regex(pattern):
        try:
            re.compile(pattern[1:-1])
        except re.error as error:
            raise ValueError(f"'{pattern}' is not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_check)]


def match(option: str, patterns: Sequence[str], parameters: Iterable[Parameter]) -> set[str]:
    """Return the (first) names of the parameters that any of the patterns matches. A glob must match the whole name of
    the parameter, or of a module that contains it; ``*`` matches dots as well. A regular expression must match
    somewhere in the parameter's name. All names of a shared parameter count. Raise a PolicyError that names the option
    if a pattern matches nothing."""
    known = {p.name: (p.name, *p.aliases) for p in parameters}
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name, names in known.items() if any(_fits(pattern, each) for each in names)}
        if not matched:
            near = dict.fromkeys(place for names in known.values() for each in names for place in _places(each))
            hint = "" if _is_regex(pattern) else did_you_mean(pattern, near)
            raise PolicyError(f"{option}: '{pattern}' matches no trainable parameter of the model{hint}")
        found |= matched
    return found


def _is_regex(pattern: str) -> bool:
    return len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/")


def _fits(pattern: str, name: str) -> bool:
    if _is_regex(pattern):
        return re.search(pattern[1:-1], name) is not None
    return any(fnmatchcase(place, pattern) for place in _places(name))


def _places(name: str) -> Iterator[str]:
    """Yield the names of the parameter and of the modules that contain it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
