"""Comparable outputs of a batch and of its examples alone.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.isolation.examples import Examples, NotAlone

NAMES = ("logits", "last_hidden_state", "start_logits", "prediction_logits")
STACK = "(hidden states)"  # hidden states below the head, for a head that returns no values of positions
Place = tuple[Any, ...]


class ExampleOutputs:
    """Runs a model for a batch and for examples alone, and chooses the values to compare."""

    def __init__(self, model: nn.Module, examples: Examples, call: Callable[..., object] | None = None) -> None:
        self._model, self._examples = model, examples
        self._call = call or model  # runs the model's hooks, unless the caller passes a function below them
        self._name: str | None = None  # name of the compared values; None: not chosen yet
        self._is_flat = False  # whether rows and positions share an axis
        self._has_positions = False

    def of_one(self, number: int) -> Tensor:
        """Run an example alone, and return its values."""
        return self.take_alone(self.run(self._examples.alone(number)))

    def take_batch(self, values: dict[str, Tensor]) -> Tensor:
        """Return the values of all examples from the outputs of a run."""
        assert self._name is not None
        output = values[self._name]
        return output.unflatten(0, self._examples.size) if self._is_flat else output

    def place(self, number: int) -> Place:
        """Return the index of an example's values in the values of the batch."""
        example = self._examples.found[number]
        return (example.row, example.columns) if self._has_positions else (example.row,)

    def part(self, output: Tensor, number: int) -> Tensor:
        """Return the values of an example from the values of the batch."""
        return output[self.place(number)]

    def choose(self, batch: dict[str, Tensor]) -> None:
        """Choose the values to compare by their shapes in the batch and for its shortest example, whose width differs
        from the batch's if any example's does. Raise NotAlone if no output has values of single examples."""
        size, lengths = self._examples.size, [len(example.columns) for example in self._examples.found]
        length = min(lengths)
        with torch.no_grad():
            alone = self.run(self._examples.alone(lengths.index(length)))
        order = sorted(batch, key=lambda name: (name == STACK, name not in NAMES))
        for name in order:
            joint, one = batch[name], alone.get(name)
            if one is None or joint.dim() != one.dim():
                continue
            shapes = (joint.shape[:2], one.shape[:2])
            is_flat = joint.shape[0] == size[0] * size[1] and one.shape[0] == length and size[1] > 1
            has_positions = joint.dim() > 1 and shapes == (size, (1, length)) and joint.shape[2:] == one.shape[2:]
            is_row = not self._examples.several and shapes[0][0] == size[0] and joint.shape[1:] == one.shape[1:]
            if has_positions or is_flat or is_row:
                self._name, self._is_flat, self._has_positions = name, is_flat and not has_positions, False
                self._has_positions = has_positions or self._is_flat
                return
        raise NotAlone("the model's output has no tensor with one entry for each example")

    def take_alone(self, values: dict[str, Tensor]) -> Tensor:
        """Return the values of an example from the outputs of a run of it alone."""
        assert self._name is not None
        value = values[self._name]
        return value if self._is_flat else value[0]

    def run(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Run the model, and return the tensors of its output, with the hidden states below its head."""
        with self._stack_watched() as seen:
            output = self._call(**inputs)
        return named_tensors(output) | seen

    @contextmanager
    def _stack_watched(self) -> Iterator[dict[str, Tensor]]:
        seen: dict[str, Tensor] = {}
        stack = find_stack(self._model)

        def note(_module: nn.Module, _args: object, output: object) -> None:
            value = next(iter(named_tensors(output).values()), None)
            if value is not None:
                seen[STACK] = value

        handle = stack.register_forward_hook(note) if stack is not None else None
        try:
            yield seen
        finally:
            if handle is not None:
                handle.remove()


def find_stack(model: nn.Module) -> nn.Module | None:
    """Return the base model below the head of a transformers model; None for any other model."""
    # Look up the module instead of importing it, so that plain torch models need no transformers.
    loaded = sys.modules.get("transformers.modeling_utils")
    for module in model.modules():
        if loaded is not None and isinstance(module, loaded.PreTrainedModel):
            stack = module.base_model
            return stack if isinstance(stack, nn.Module) and stack is not module else None
    return None


def named_tensors(output: object) -> dict[str, Tensor]:
    """Return the tensors of an output that may be values of examples, by name or number."""
    if isinstance(output, Tensor):
        items: list[tuple[str, object]] = [("output", output)]
    elif isinstance(output, Mapping):
        items = [(str(name), value) for name, value in output.items()]
    elif hasattr(output, "__dataclass_fields__"):
        items = list(vars(output).items())
    else:
        items = [(str(n), v) for n, v in enumerate(output)] if isinstance(output, tuple | list) else []
    return {n: v for n, v in items if isinstance(v, Tensor) and v.dim() > 0 and v.is_floating_point()}
