"""End the backward in one model by detaching the input of a layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli import PolicyError, UnsupportedError
from sparsebp_cli.backward import (
    DensePass,
    EngineExtension,
    EngineView,
    Given,
    LayerNumbers,
    PassEstimate,
    claim_needed,
)
from sparsebp_cli.policy import Step
from sparsebp_depth.kind import DepthSelector


class DepthExtension(EngineExtension):
    """Carry out a depth selector's choice. Raises UnsupportedError for a model without one stack of layers."""

    def __init__(self, policy: DepthSelector, model: nn.Module, given: Given) -> None:  # noqa: ARG002 - as of all
        layers, name = LayerNumbers(model), type(policy).__name__
        if not layers.layers:
            raise UnsupportedError(
                f"{name} stops the backward pass at a transformer layer, but {type(model).__name__} has no layers"
            )
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{name} supports only models with one stack of layers, got an encoder-decoder model with two"
            )
        self._policy, self._model, self._layers = policy, model, layers
        self._engine: EngineView | None = None
        self._handles: list[RemovableHandle] = []
        self._depths: dict[Step, int] = {}  # of the current step

    @property
    @override
    def frozen(self) -> frozenset[str]:
        """Names of parameters below the layer at which the backward ends."""
        depth = len(self._layers.layers) if self._engine is None else self._depth(self._engine.now())
        return frozenset(self._below(depth))

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        self._handles = [
            layer.register_forward_pre_hook(partial(self._cut, number), with_kwargs=True)
            for number, layer in enumerate(self._layers.layers)
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def start_step(self, step: Step) -> None:  # noqa: ARG002 - of the protocol
        self._depths.clear()

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass at the current step."""
        below = self.frozen
        return claim_needed(self._model, dense, [p for name, p in self._model.named_parameters() if name in below])

    def _below(self, depth: int) -> list[str]:
        last = len(self._layers.layers) - depth
        embedding = getattr(self._model, "get_input_embeddings", lambda: None)()
        head = getattr(self._model, "get_output_embeddings", lambda: None)()
        first = {id(p) for p in embedding.parameters()} if last and isinstance(embedding, nn.Module) else set()
        tied = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
        numbers = {name: self._layers.number_of(name) for name, _ in self._model.named_parameters()}
        return [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
            and (id(parameter) in first - tied or ((number := numbers[name]) is not None and number < last))
        ]

    def _depth(self, step: Step) -> int:
        step = replace(step, micro_batch=0, call=0, draw=0, rank=0)  # one choice for a step and for its probes
        if step not in self._depths:
            num_layers = len(self._layers.layers)
            depth = self._policy.at(step).depth(num_layers, step)
            if not 1 <= depth <= num_layers:
                raise PolicyError(
                    f"{type(self._policy).__name__}.depth must return a number from 1 to {num_layers}, got {depth!r}"
                )
            self._depths[step] = depth
        return self._depths[step]

    def _cut(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
        assert self._engine is not None
        if not (self._engine.enabled and module.training and torch.is_grad_enabled()):
            return None
        if number != len(self._layers.layers) - self._depth(self._engine.now()) or number == 0:
            return None
        if not args or not isinstance(args[0], Tensor):
            raise UnsupportedError(
                f"the layer {self._layers.names[number]!r} must get a tensor as its first positional argument"
            )
        return (args[0].detach(), *args[1:]), kwargs
