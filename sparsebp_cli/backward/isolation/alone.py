"""Compares ways to run a batch with runs of its examples alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.isolation.examples import Examples, NotAlone
from sparsebp_cli.backward.isolation.output import ExampleOutputs, named_tensors
from sparsebp_cli.backward.isolation.run import undisturbed


def compare_with_alone(
    model: nn.Module,
    examples: Examples,
    passes: Sequence[Callable[[], object]],
    call: Callable[..., object] | None = None,
) -> list[float]:
    """Return how far each of several ways to run a batch is from running its examples alone.

    Args:
        model: Any model that accepts its batch by name, in its training mode.
        examples: The batch's examples, such as those of :func:`examples_at`.
        passes: Each runs the whole batch and returns an output in the shapes of the model's own.
        call: Runs an example, given its arguments; None: the model with its hooks. Inside a forward of the model, pass
            the function below the hooks, since these hold the state of the running forward.

    Returns:
        For each pass the largest difference of an example's outputs, relative to their 2-norm.

    Raises:
        NotAlone: The examples cannot be run alone.
    """
    with undisturbed(model), torch.no_grad():
        outputs = ExampleOutputs(model, examples, call)
        found = [named_tensors(run()) for run in passes]
        outputs.choose(found[0])
        alone = [outputs.of_one(number) for number in range(len(examples.found))]
        batches = [outputs.take_batch(values) for values in found]
        return [
            max(relative_difference(outputs.part(whole, n), one) for n, one in enumerate(alone)) for whole in batches
        ]


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of a difference, relative to the norm of the expected values.

    Args:
        found: Output of an example in its batch.
        expected: Its output alone.

    Returns:
        The quotient of the 2-norms; the norm of the difference if the expected values are all 0.

    Raises:
        NotAlone: A value is not finite.
    """
    difference = float((found.double() - expected.double()).norm())
    norm = float(expected.double().norm())
    if isnan(difference):
        raise NotAlone("the model's outputs are not finite")
    return difference / norm if norm else difference
