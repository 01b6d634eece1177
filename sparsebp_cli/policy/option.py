"""Validation of options of policies and targets. Options that JSON can represent are checked as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel
from pydantic_core import from_json, to_json

_Options = TypeVar("_Options", bound=BaseModel)


def validate_options(options_class: type[_Options], options: Mapping[str, object]) -> _Options:
    """Make options from the values in a recipe, a plan or a call. Accept a list for a tuple, and a string for a path or
    an enumeration, which recipes do not have; refuse a string for a number. Raise pydantic's ValidationError, which a
    recipe can locate."""
    former = getattr(options_class, "former_options", ())  # only policies have it; plans contain these options
    options = {name: value for name, value in options.items() if (name, value) not in former}
    try:
        text = to_json(options, inf_nan_mode="constants")
        from_json(text)
    except ValueError:  # JSON cannot represent the options of this Python call: validate the objects themselves
        return options_class.model_validate(options)
    # Strict classes refuse a list for a tuple in Python objects, but accept it in JSON, which has no tuples.
    return options_class.model_validate_json(text)
