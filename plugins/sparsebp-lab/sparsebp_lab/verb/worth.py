"""``sparsebp worth``: estimate cost and approximation error of policies before training."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.option import Changes, OneRecipe
from sparsebp_cli.cli.quantity import show_count
from sparsebp_cli.cli.screen import Output, console, make_table, print_screenful
from sparsebp_lab.answer.worth_record import Interval, PolicyWorth, WorthAnswer

if TYPE_CHECKING:
    from rich.table import Table

NUMBERS = ("cost", "noise", "by curvature", "bias", "(1 + noise) x cost", "like dense with")
DECISIVE = ("cost", "bias", "(1 + noise) x cost")  # columns that a narrow terminal keeps
MOST_TALL = 4  # rows of two lines that fit on a screen
WIDE = 98  # characters; a narrower terminal would fold numbers
SHORT = {"cannot beat a smaller batch": "cannot", "decide by training": "train"}  # short verdicts for a narrow column
LESSON = {
    "dense": "gradient and cost of dense training",
    "cannot beat a smaller batch": (
        "dense training with a smaller batch has as little noise and costs less: do not train this policy"
    ),
    "could": "costs less than dense training with equal noise: train with this policy to see whether it is better",
    "decide by training": (
        "unclear: the interval of (1 + noise) x cost includes 1, or the policy is biased, which the estimate ignores"
    ),
}


def worth(
    recipe: OneRecipe,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help=(
                "Also estimate all other installed policies that fit the recipe, with their default options, and with "
                "'keep: 0.5' if keep has no default."
            ),
        ),
    ] = False,
    changes: Changes = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="A table for people, or JSON for programs.")] = (
        Output.TABLE
    ),
) -> None:
    """Estimate in minutes whether a recipe's policies can beat dense training with a smaller batch."""
    from sparsebp_cli.cli.validate import load_checked
    from sparsebp_cli.cli.worker_process import measure_apart
    from sparsebp_cli.plan import make_plan

    checked, origin, _ = load_checked(recipe, changes or [])
    with tempfile.TemporaryDirectory(prefix="sparsebp-") as folder:
        plan_file = make_plan(checked, origin).save(Path(folder))
        found = measure_apart("sparsebp_lab.worth", json.dumps({"plan": str(plan_file), "all": every}))
    found.pop("format")  # belongs to the worker's answer; the document has its own version
    tell(WorthAnswer.read(found), output, partial(print_worth, everything=every))


def print_worth(found: WorthAnswer, *, everything: bool = False) -> None:
    """Print a table, the meaning of its verdicts, and what was not measured: on one screen, unless ``everything`` is
    true."""
    is_narrow = console().width < WIDE
    table = worth_table(found.policies, DECISIVE if is_narrow else NUMBERS)
    notes = [*(_explain(found, is_narrow=is_narrow) if found.policies else ()), *_list_exceptions(found)]
    if everything:
        console().print(*([table] if found.policies else []), *notes, sep="\n")
    else:
        print_screenful([table] if found.policies else [], notes, "more: -o json")


def _explain(found: WorthAnswer, *, is_narrow: bool) -> Iterator[str]:
    for verdict in dict.fromkeys(policy.verdict for policy in found.policies):
        short = f"{SHORT[verdict]}: {verdict}: " if verdict in SHORT else f"{verdict}: "
        yield short + LESSON[verdict]
    if any(map(_is_slower, found.policies)):
        yield (
            "rate: fraction to which noise shortens Adam's steps. A higher learning rate partly makes up for "
            "this: tune the learning rate before you judge a policy by training."
        )
    if is_narrow:
        left_out = ", ".join(name for name in NUMBERS if name not in DECISIVE)
        yield f"The terminal is too narrow for {left_out}: widen it to {WIDE} characters, or give -o json."
    steps = ", ".join(map(str, found.steps))
    metric = "in AdamW's metric" if found.metric == "adam" else "on plain gradients"
    yield (
        f"Cost: in dense steps of {found.batch} examples, {show_count(found.dense_step_flops, 'FLOP')} each. Noise and "
        f"bias: measured {metric}. 95 % intervals over {found.batches} batches at steps {steps}. "
        "docs/guide/worth.md explains the columns."
    )


def _list_exceptions(found: WorthAnswer) -> Iterator[str]:
    if any(policy.remembers for policy in found.policies):
        yield "*: this policy decides from earlier steps; the estimate measures its first step."
    for one in found.policies:
        if one.as_at_step is not None:
            yield f"{one.name}: skips no work in early steps, so the estimate measures it as at step {one.as_at_step}."
    for other in found.left_out:
        yield f"not measured: {other.name}: {other.why}"


def worth_table(policies: Sequence[PolicyWorth], numbers: Sequence[str] = NUMBERS) -> Table:
    """Return a row for each policy, the best first, with the columns ``numbers``. Many rows take one line each."""
    is_tall = len(policies) <= MOST_TALL
    gap, last = ("\n", "\n") if is_tall else ("", " ")  # with many policies only the product shows its interval
    table = make_table("policy", *numbers, "verdict", numbers=numbers)
    for one in sorted(policies, key=lambda policy: policy.product.value):
        curved = "-" if one.noise_curved is None else _show(one.noise_curved, gap)
        values = [*(_show(each, gap) for each in (one.price, one.noise, one.bias)), _show(one.product, last)]
        every = (*values[:2], curved, *values[2:], _show_batches(one))
        shown = [cell for name, cell in zip(NUMBERS, every, strict=True) if name in numbers]
        table.add_row(one.name + " *" * one.remembers, *shown, SHORT.get(one.verdict, one.verdict))
    return table


def _show_batches(one: PolicyWorth) -> str:
    """Return the batch sizes of dense by both noises, which bracket the true one, and below it the remaining fraction
    of the rate: ``3.4-9.1``, ``rate 0.78``."""
    ends = sorted(
        {f"{batch:.3g}" for batch in (one.dense_batch, one.dense_batch_curved) if batch is not None}, key=float
    )
    rate = f"\nrate {one.rate.value:.2f}" if _is_slower(one) and one.rate is not None else ""
    return "-".join(ends) + rate


def _is_slower(one: PolicyWorth) -> bool:
    return one.rate is not None and one.rate.high < 1.0


def _show(interval: Interval, gap: str) -> str:
    """Return a value, and after the gap its interval, unless its width or the gap is empty."""
    value, low, high = (_round(end) for end in (interval.value, interval.low, interval.high))
    return value if low == high or not gap else f"{value}{gap}{low}-{high}"


def _round(value: float) -> str:
    if value < 99.5:
        return f"{max(0.0, value):.2f}" if value < 9.95 else f"{value:.1f}"
    return f"{value:.0f}" if value < 9999.5 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
