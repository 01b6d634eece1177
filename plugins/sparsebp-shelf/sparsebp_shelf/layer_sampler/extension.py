"""Choose examples at each layer's output, by an identity whose backward multiplies by the policy's factors.

The identity lies inside the layer's forward. Under activation checkpointing it therefore belongs to the differentiated
graph and decides once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward import ForwardOverride, ForwardPatches, LayerNumbers, TrialExtension
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import GradientSelector, LayerGradient, TrialPass, choice
from sparsebp_shelf.layer_sampler.kind import LayerOutput, LayerSampler

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given


EXAMPLES_BY_ROWS = 3  # dimensions of a hidden state with examples, rows and features


@final
class LayerExtension(TrialExtension):
    """Carry out a layer sampler's choices in one model.

    Raises :class:`UnsupportedError` for a model without layers, or with two stacks of layers.
    """

    engine: EngineView
    policy: GradientSelector
    layers: list[nn.Module]

    def __init__(self, policy: GradientSelector, model: nn.Module, given: Given) -> None:
        numbers, name = LayerNumbers(model), type(policy).__name__
        if not numbers.layers:
            raise UnsupportedError(
                f"{name} chooses examples at the output of each transformer layer, but the model has no layers"
            )
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{name} supports only models with one stack of layers, got an encoder-decoder model with two"
            )
        self.policy, self._states, self._patches = policy, given.states, ForwardPatches()
        self.layers, self._model = numbers.layers, model

    def install(self, engine: EngineView) -> None:
        self.engine = engine
        for number, layer in enumerate(self.layers):
            self._patches.install(layer, _LayerOverride(layer, LayerOutput(number, len(self.layers)), self))

    def remove(self) -> None:
        self._patches.remove()

    @contextmanager
    def trying(self, decision: Collection[str] | TrialPass) -> Iterator[None]:  # noqa: ARG002 - of the base class
        """Do nothing: the policy reads the state of the trial pass."""
        yield

    def decide(self, grad: Tensor, output: LayerOutput) -> Tensor | None:
        """Return the factor of each example's gradient; None means 1."""
        policy, step = self.policy, self._states.show(self.policy, self.engine.now())
        assert isinstance(policy, LayerSampler)
        norm_B = choice.norm(grad.reshape(len(grad), -1), 1)
        if self._states.watches(policy, LayerGradient):
            self._states.see(policy, LayerGradient(str(output.layer), self._states.unscale(norm_B)), step)
        return policy.at(step).sample(norm_B, output, step)

    def check_shape(self, hidden: Tensor) -> None:
        """Raise an error unless the first dimension of an output is that of the examples."""
        sizes = self.engine.batch_sizes
        if sizes and len(hidden) not in sizes:
            raise UnsupportedError(
                f"{type(self.policy).__name__} needs the batch size as the first dimension of each layer's "
                f"output, got the shape {tuple(hidden.shape)}"
            )


class _LayerOverride(ForwardOverride):
    """Replace a layer's ``forward``: apply the choice to its output."""

    def __init__(self, layer: nn.Module, output: LayerOutput, extension: LayerExtension) -> None:
        self._layer, self._output, self._extension = layer, output, extension

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.run_covered(self._layer, *args, **kwargs)
        hidden = result[0] if isinstance(result, tuple) else result
        extension = self._extension
        if self.is_removed or not extension.engine.enabled or not hidden.requires_grad:
            return result
        if hidden.dim() < EXAMPLES_BY_ROWS:
            return result  # rows of unknown examples: the linears count them as one example
        extension.check_shape(hidden)
        # Inside the layer's forward, so that checkpointing decides once. See decision 103.
        sampled = _Sampled.apply(hidden, extension, self._output)  # type: ignore[no-untyped-call]
        return (sampled, *result[1:]) if isinstance(result, tuple) else sampled


class _Sampled(Function):
    """Return the input; the backward multiplies each example's gradient by the policy's factor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, extension: LayerExtension, output: LayerOutput) -> Tensor:
        ctx.extension, ctx.output = extension, output
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.extension.engine.enabled:
            return grad, None, None
        factor_B = ctx.extension.decide(grad, ctx.output)
        if factor_B is None:
            return grad, None, None
        # A product alone is wrong: zero times an infinite gradient is not zero.
        factor = factor_B.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1))
        return torch.where(factor == 0, 0.0, grad * factor), None, None
