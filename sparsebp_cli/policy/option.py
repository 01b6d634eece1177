"""Validate options that come from outside: a policy's, a target's. What JSON can say is checked as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel
from pydantic_core import from_json, to_json

_Options = TypeVar("_Options", bound=BaseModel)


def validate_options(options_class: type[_Options], options: Mapping[str, object]) -> _Options:
    """Make options of what a recipe, a plan or a call gives. A recipe has no tuple, path or enumeration, so a list or a
    text may stand for one; number and text stay apart. Raise pydantic's ValidationError, which a recipe can locate."""
    former = getattr(options_class, "former_options", ())  # a policy's: plans have them, with their only value
    options = {name: value for name, value in options.items() if (name, value) not in former}
    try:
        text = to_json(options, inf_nan_mode="constants")
        from_json(text)
    except ValueError:  # options of a call in Python that JSON cannot represent: validate the objects themselves
        return options_class.model_validate(options)
    # Strict classes refuse a list for a tuple in Python's objects, but not in JSON, which has no other form of it.
    return options_class.model_validate_json(text)
