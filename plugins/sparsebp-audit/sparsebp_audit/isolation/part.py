"""Find the first module whose output for an example differs between the batch and the example alone.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.isolation.examples import Example, Examples
from sparsebp_cli.backward.isolation.output import ExampleOutputs, named_tensors


@dataclass(frozen=True)
class FirstModule:
    """The first module where an example's output differs from the example alone."""

    name: str  # empty: no module's output could be compared
    kind: str  # class of the module
    output: Tensor  # output of the batch, run again


def find_first_module(
    model: nn.Module, examples: Examples, outputs: ExampleOutputs, number: int, limit: float
) -> FirstModule:
    """Run an example alone and then its batch. Return the first module, in the order in which they end, whose outputs
    differ by more than ``limit``, relative to their 2-norm, although its inputs do not."""
    alone: dict[tuple[str, int], tuple[Tensor | None, Tensor]] = {}
    found: list[tuple[str, str]] = []
    example = examples.found[number]

    def differs(value: Tensor | None, expected: Tensor | None) -> bool:
        own = None if value is None or expected is None else _part(value.detach(), expected, examples.size, example)
        if own is None or expected is None:
            return False
        return float((own.double() - expected.double()).norm()) > limit * max(float(expected.double().norm()), 1e-30)

    def keep(key: tuple[str, int], _module: nn.Module, given: Tensor | None, value: Tensor) -> None:
        alone[key] = (None if given is None else given.detach(), value.detach())

    def compare(key: tuple[str, int], module: nn.Module, given: Tensor | None, value: Tensor) -> None:
        # A value without parameters and tokens, such as the rotation of a position, is no output of an example.
        if found or key not in alone or not value.requires_grad:
            return
        if differs(value, alone[key][1]) and not differs(given, alone[key][0]):
            found.append((key[0], type(module).__name__))

    with torch.no_grad(), _watched(model, keep):
        outputs.of_one(number)
    with _watched(model, compare):
        output = outputs.take_batch(outputs.run(examples.inputs)).detach()
    name, kind = found[0] if found else ("", "")
    return FirstModule(name, kind, output)


@contextmanager
def _watched(
    model: nn.Module, see: Callable[[tuple[str, int], nn.Module, Tensor | None, Tensor], None]
) -> Iterator[None]:
    """Call ``see`` at the end of each module with its name and the number of the call, and with its first input and
    output."""
    calls: Counter[str] = Counter()

    def make(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
            value = next(iter(named_tensors(output).values()), None)
            given = next(iter(named_tensors((*args, *kwargs.values())).values()), None)
            if value is not None:
                see((name, calls[name]), module, given, value)
            calls[name] += 1

        return hook

    handles = [
        module.register_forward_hook(make(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _part(joint: Tensor, alone: Tensor, size: tuple[int, int], example: Example) -> Tensor | None:
    """Return an example's part of a module's output, in its shape when alone; None if it cannot be determined."""
    columns, length = example.columns.to(joint.device), len(example.columns)
    if joint.dim() != alone.dim():
        return None
    if joint.shape[0] == size[0] * size[1] and alone.shape[0] == length and joint.shape[1:] == alone.shape[1:]:
        return joint[example.row * size[1] + columns]
    if joint.shape[0] != size[0] or alone.shape[0] != 1:
        return None
    own = joint[example.row : example.row + 1]
    unlike = [axis for axis in range(1, own.dim()) if own.shape[axis] != alone.shape[axis]]
    if not unlike:
        return own
    if len(unlike) > 1 or (own.shape[unlike[0]], alone.shape[unlike[0]]) != (size[1], length):
        return None
    return own.index_select(unlike[0], columns)
