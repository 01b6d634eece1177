"""Makes a failure small and writes it as a script.

It tries plainer values on every axis, then fewer updates, rows and columns, as long as the run fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tests.exactness.axis import AXES, is_possible
from tests.exactness.judge import Subject, judge
from tests.exactness.loss import LOSSES

MOST = 120  # judgements

SCRIPT = '''"""{text}

Plainer values on every other axis do not fail. Run it from the root of a checkout.
"""

from torch import tensor

from tests.exactness.judge import Subject, judge

# The loss is made so:
#
{loss}

case = {case}
updates = {updates}
if __name__ == "__main__":  # a recipe starts processes
    for outcome in judge(Subject(case, {seed}, updates)):
        print(outcome)
'''


def shrink(subject: Subject) -> Iterator[tuple[Subject, str] | None]:
    """Judge smaller subjects; yield each that fails and is smaller than the last, with what is wrong, and else None."""
    left, is_smaller = MOST, True
    while is_smaller and left > 0:
        is_smaller = False
        for candidate in islice(_candidates(subject), left):
            left -= 1
            found = fails(candidate)
            yield (candidate, found) if found else None
            if found:
                subject, is_smaller = candidate, True
                break


def fails(subject: Subject) -> str:
    """Return what is wrong with a run; empty: nothing."""
    try:
        return next((one.text for one in judge(subject) if one.verdict == "wrong"), "")
    except Exception:  # a smaller batch need not be one that a model takes
        return ""


def _candidates(subject: Subject) -> Iterator[Subject]:
    case = subject.case
    for axis, values in AXES.items():  # without the batches: they are drawn again
        plainer = case | {axis: values[0]}
        if case[axis] != values[0] and is_possible(plainer):
            yield Subject(plainer, subject.seed)
            if axis not in ("accumulation", "size"):
                yield replace(subject, case=plainer)
    if case["entry"] in ("SFT", "DPO", "GRPO", "recipe") or case["wrapper"] == "two ranks":
        return  # these make their own batches, in their number
    updates = subject.updates
    if case["entry"] == "attach" and len(updates) > 1:
        for number in range(len(updates)):
            yield replace(subject, updates=updates[:number] + updates[number + 1 :])
    rows, length = updates[0][0]["input_ids"].shape
    for row in range(rows if rows > 1 else 0):
        yield replace(subject, updates=[[_cut(b, row=row) for b in update] for update in updates])
    for column in (length // 2, length - 4, length - 1):
        if 1 < column < length:
            yield replace(subject, updates=[[_cut(b, column=column) for b in update] for update in updates])


def _cut(batch: dict[str, Any], row: int | None = None, column: int | None = None) -> dict[str, Any]:
    """Return a batch without a row, or with the first columns alone."""
    size = batch["input_ids"].shape

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() != 2:
            return value
        if column is not None:
            return value[:, :column].clone()
        return value if len(value) != size[0] else torch.cat([value[:row], value[(row or 0) + 1 :]])

    return {name: cut(value) for name, value in batch.items()}


def write_script(subject: Subject, text: str) -> str:
    """Return a script that shows a failure."""
    torch.set_printoptions(threshold=100_000, linewidth=110)
    loss = "".join(f"# {line}" for line in inspect.getsource(LOSSES[subject.case["loss"]]).splitlines(keepends=True))
    batches = repr(subject.updates).replace("dtype=torch.int32", "").replace("torch.bool", "bool")
    return SCRIPT.format(text=text, loss=loss.rstrip(), case=subject.case, updates=batches, seed=subject.seed)
