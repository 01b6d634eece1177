"""The screening's cost of a policy is that of the policy's own run."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import pytest

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy import find_policies, make_policy
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter, RunFolder, metric
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.probe import PassWork
from sparsebp_cli.worker.step_kind import StepKind
from sparsebp_cli.worker.training import Training
from sparsebp_lab.worth import dense_run
from sparsebp_lab.worth.dense_run import DenseRun
from sparsebp_lab.worth.measure import measure

MakeRecipe = Callable[..., Recipe]
Prepare = Callable[[Recipe], RunFolder]
Open = Callable[[Recipe], tuple[Training, RunFolder]]
STEPS, WITHIN, SAMPLE = 16, 0.01, 4
MEASURE = {"eval_every": STEPS, "eval_examples": 4, "probe_every": STEPS, "fidelity_every": None}
TRAINING = {"max_steps": STEPS, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}


@pytest.fixture
def opened(prepared: Prepare) -> Iterator[Open]:
    """Build the training of a recipe in this process."""
    with ExitStack() as stack:

        def make(recipe: Recipe) -> tuple[Training, RunFolder]:
            run = prepared(recipe)
            journal = stack.enter_context(JournalWriter(run.path, durable=False))
            return Training.build(Plan.load(run.plan_file), run, journal, StopRequest()), run

        yield make


def draw_options(name: str) -> dict[str, Any]:
    """Return random options of a policy; the same in each call."""
    dice, found = random.Random(name), find_policies()[name].policy_class
    assert found is not None
    keys = found.model_fields.keys()
    return {"name": name} | ({"keep": dice.choice([0.2, 0.4, 0.5, 0.8])} if "keep" in keys else {})


def compare(opened: Open, make_recipe: MakeRecipe, name: str) -> tuple[float, float] | str:
    """Return the cost of a policy's steps over dense's, as estimated and as its run has it; or why it has none."""
    try:
        recipe = make_recipe(policy=[draw_options(name)], measure=MEASURE, training=TRAINING)
        answer: Any = measure(opened(recipe)[0], all_policies=False, report=lambda *_: None, pairs=2)
        if answer["left_out"]:
            return str(answer["left_out"][0]["why"])
    except (SparseBPError, ValueError) as error:
        return str(error)
    training, run = opened(recipe)
    training.run_to_end()
    history = History.load(run.path)
    own, dense = (fmean(history.series(one.name).values()) for one in (metric.STEP_FLOPS, metric.DENSE_STEP_FLOPS))
    return answer["policies"][0]["price"]["value"], own / dense


def names(*, sample: bool) -> list[str]:
    """Return all installed policies, or a few chosen by a hash."""
    found = sorted(find_policies(), key=lambda name: hashlib.sha256(name.encode()).digest())
    return found[:SAMPLE] if sample else found[SAMPLE:]


# They need adapters, a reference model, another kind of site or an option that names something.
NOT_HERE = frozenset(
    {
        "frozen",
        "max-child",
        "random-child",
        "rho",
        "stride",
        "subnet",
        "tokens",
    }
)


# Runs count the first steps and then few, and charge a step by those that were like it (StepPrice). In 16 steps a kind
# of step may come once or twice and not be counted; the screening counts each of them here.
RARE_KINDS = {"layerdrop": 0.06, "selective-backprop": 0.02, "uniform": 0.02}


def check(opened: Open, make_recipe: MakeRecipe, name: str) -> None:
    found = compare(opened, make_recipe, name)
    if isinstance(found, str):
        assert name in NOT_HERE, found
        return
    estimated, counted = found
    assert estimated == pytest.approx(counted, rel=RARE_KINDS.get(name, WITHIN))


@pytest.mark.parametrize("name", ["sketch", "compact", "crs", "dropbp", *names(sample=True)])
def test_the_estimated_cost_is_that_of_the_run(opened: Open, tiny_recipe: MakeRecipe, name: str) -> None:
    check(opened, tiny_recipe, name)


@pytest.mark.parametrize("is_constant", [True, False])
def test_dense_passes_are_counted_twice_if_shape_decides_their_cost(
    opened: Open, tiny_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, is_constant: bool
) -> None:
    numbers = iter(range(1, 100))

    def count(*_: object) -> PassWork:
        return PassWork(5.0 if is_constant else float(next(numbers)), StepKind(), 1)

    run = DenseRun(opened(tiny_recipe(training=TRAINING))[0], lambda *_: None, 1)
    monkeypatch.setattr(dense_run, "count_work", count)
    with run.paused(), run.attached([make_policy("dense")]) as engine:
        found = [run.count_dense(engine, number) for number in (0, 1, 2, 3, 1)]
    assert found == ([5.0] * 5 if is_constant else [1.0, 2.0, 3.0, 4.0, 2.0])
    assert next(numbers) == (1 if is_constant else 5)


@pytest.mark.long
@pytest.mark.parametrize("name", names(sample=False))
def test_the_estimated_cost_of_every_policy_is_that_of_its_run(
    opened: Open, tiny_recipe: MakeRecipe, name: str
) -> None:
    check(opened, tiny_recipe, name)
