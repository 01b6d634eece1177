"""Values of plain YAML scalars by the core schema of YAML 1.2.2, section 10.3.2.

PyYAML follows YAML 1.1, where ``3e-4`` is text, ``no`` is false, ``1:30`` is ninety and ``010`` is eight.
"""

from __future__ import annotations

import math
import re

LARGEST_INT = 2**63 - 1

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "True", "TRUE"}
_FALSE = {"false", "False", "FALSE"}
_INT = re.compile(r"[-+]?[0-9]+", re.ASCII)
_BASED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", re.ASCII)


def read_scalar(text: str) -> str | int | float | bool | None:
    """Return the value of a plain (unquoted) scalar. Raise ValueError for numbers that are not finite, or that do not
    fit into 64 bits."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    number: int | float
    if _INT.fullmatch(text):
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
