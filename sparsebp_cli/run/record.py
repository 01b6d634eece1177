"""Validate records of the event log: every reader skips and counts lines without a valid record.

An event log may hold lines that no worker of this version wrote: half a line before a power cut, another program's
output, or the record of a newer version. Readers index, compare and print the fields, so each line is validated once,
when it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TypeGuard

from sparsebp_cli.run.record_type import Record

LARGEST_INTEGER = 2**63  # exclusive; arithmetic of much larger integers with floats raises OverflowError
MOST_WARMUP_STEPS = 10**6


class State(StrEnum):
    """The state of a run. Only the last four are final, until the run is resumed. Unreachable: the target of the run
    does not answer, or no process asks it; the run may still be alive."""

    QUEUED = "queued"
    RUNNING = "running"
    UNREACHABLE = "unreachable"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"

    @property
    def over(self) -> bool:
        """Whether no process works on the run any more."""
        return self not in {State.QUEUED, State.RUNNING, State.UNREACHABLE}


ENDS = {str(state) for state in State if state.over}

Check = Callable[[object], bool]


def parse_record(line: bytes) -> Record | None:
    """Parse a line of the event log, with or without its newline. Words for numbers that are not finite become numbers.
    Return None if the line has no valid record."""
    try:
        record = json.loads(line.decode())
        if b"\\u" in line:  # json reads a lone surrogate, which cannot be printed: encoding it raises ValueError
            json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if "values" in record:
        record["values"] = from_json(record["values"])
    return record if is_record(record) else None


def is_record(record: Mapping[str, object]) -> TypeGuard[Record]:
    """Return whether a record has the fields of its kind. Records of an unknown kind need only the common fields."""
    kind = record.get("kind")
    fields = FIELDS.get(kind, {}) if isinstance(kind, str) else {}
    return all(name in record and check(record[name]) for some in (COMMON, fields) for name, check in some.items())


NOT_FINITE = {"nan", "inf", "-inf"}


def to_json(value: object) -> object:
    """Replace numbers that are not finite, which JSON lacks: by text, or by null inside a list."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {key: to_json(child) for key, child in value.items()}
        case list() | tuple():
            return [None if isinstance(x, float) and not math.isfinite(x) else to_json(x) for x in value]
    return value


def from_json(value: object) -> object:
    """Undo :func:`to_json`, except in lists: a text stays text there, because a class may be called nan."""
    match value:
        case str():
            return float(value) if value in NOT_FINITE else value
        case dict():
            return {key: from_json(child) for key, child in value.items()}
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, float) or (isinstance(value, int) and -LARGEST_INTEGER < value < LARGEST_INTEGER)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number, at least 0, that every reader can use."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_INTEGER


def _is_time(value: object) -> bool:
    return _is_number(value) and 0.0 <= value < LARGEST_INTEGER


def is_figure(value: object) -> bool:
    """Return whether a value is a number, or None for a missing measurement."""
    return value is None or _is_number(value)


def _is_list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _is_dict_with(**fields: Check) -> Check:
    """Return a check that all these fields exist and are valid. Other fields may exist."""
    return lambda value: (
        isinstance(value, dict) and all(name in value and check(value[name]) for name, check in fields.items())
    )


def _is_dict_without_other(**fields: Check) -> Check:
    """Return a check that these fields, if they exist, are valid. Other fields may exist."""
    return lambda value: (
        isinstance(value, dict) and all(check(value[name]) for name, check in fields.items() if name in value)
    )


COMMON: dict[str, Check] = {"kind": _is_text, "attempt": lambda value: is_count(value) and value > 0, "time": _is_time}
_POLICIES = _is_list_of(_is_dict_with(exact=lambda value: isinstance(value, bool)))
_EXAMPLES = _is_dict_with(loss=_is_list_of(is_figure), targets=_is_list_of(_is_number))
_DOCUMENTS = _is_dict_without_other(documents=_is_list_of(lambda place: _is_number(place) and math.isfinite(place)))
_TEXTS = _is_list_of(_is_text)
_SAMPLES = _is_dict_with(prompt=_TEXTS, reference=_TEXTS, prediction=_TEXTS)
FIELDS: dict[str, dict[str, Check]] = {
    "attempt": {"from_step": is_count, "environment": _is_dict_without_other(packages=lambda v: isinstance(v, dict))},
    "metrics": {"step": is_count, "values": _is_dict_of(_is_number)},
    "facts": {
        "values": _is_dict_without_other(
            policies=_POLICIES,
            warmup_steps=lambda value: is_count(value) and value <= MOST_WARMUP_STEPS,
            tokens_per_step=is_figure,
            eval_examples=is_figure,
            repeats=_is_text,
            metrics=_is_dict_of(_is_dict_with(unit=_is_text, better=_is_text)),
            dataset_digest=lambda value: value is None or _is_text(value),
            changes=_is_list_of(_is_dict_with(field=_is_text, then=_is_text, now=_is_text, step=is_count)),
        )
    },
    "layers": {"step": is_count, "values": _is_dict_of(_is_dict_of(is_figure))},
    "proof": {
        "step": is_count,
        "values": _is_dict_with(columns=_is_list_of(_is_text), modules=_is_dict_of(_is_list_of(is_figure))),
    },
    "examples": {
        "step": is_count,
        "values": lambda value: _EXAMPLES(value) and _DOCUMENTS(value),
    },
    "samples": {"step": is_count, "split": _is_text, "values": _SAMPLES},
    "scores": {"step": is_count, "values": _is_dict_of(_is_list_of(is_figure))},
    "note": {"level": _is_text, "text": _is_text},
    "seal": {"values": lambda value: isinstance(value, dict)},
    "allow": {"fields": _is_list_of(_is_text)},
    "end": {
        "status": lambda value: value in ENDS if isinstance(value, str) else False,
        "step": is_count,
        "text": _is_text,
    },
}
