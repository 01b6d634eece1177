"""Choice of examples at the output of each layer: an identity whose backward multiplies by the policy's factors.

It lies inside of the layer's forward, so under activation checkpointing it belongs to the graph that is differentiated,
and decides once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward.core.extension import EngineExtension
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import GradientSelector, LayerGradient, LayerOutput, LayerSampler, TrialPass, choice

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.given import Given


EXAMPLES_BY_ROWS = 3  # dimensions, with that of the features


@final
class LayerExtension(EngineExtension):
    """A layer sampler in one model.

    Raises :class:`UnsupportedError` for a model without layers, or with two stacks of them.
    """

    engine: EngineView
    policy: GradientSelector
    layers: list[nn.Module]

    def __init__(self, policy: GradientSelector, model: nn.Module, given: Given) -> None:
        numbers, name = LayerNumbers(model), type(policy).__name__
        if not numbers.layers:
            raise UnsupportedError(f"{name} chooses examples at the output of each layer: this model has no layers")
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise UnsupportedError(f"{name} chooses examples at the output of each layer: one stack of layers, got two")
        self.policy, self._states, self._patches = policy, given.states, ForwardPatches()
        self.layers, self._model = numbers.layers, model

    def install(self, engine: EngineView) -> None:
        self.engine = engine
        for number, layer in enumerate(self.layers):
            self._patches.install(layer, _LayerOverride(layer, LayerOutput(number, len(self.layers)), self))

    def remove(self) -> None:
        self._patches.remove()

    @contextmanager
    def trying(self, decision: Collection[str] | TrialPass) -> Iterator[None]:  # noqa: ARG002 - of the protocol
        """Do nothing: the policy reads the state of the trial pass."""
        yield

    def decide(self, grad: Tensor, output: LayerOutput) -> Tensor | None:
        """Return the factor of each example's gradient, None for 1."""
        policy, step = self.policy, self._states.show(self.policy, self.engine.now())
        assert isinstance(policy, LayerSampler)
        norm_B = choice.norm(grad.reshape(len(grad), -1), 1)
        if self._states.watches(policy, LayerGradient):
            self._states.see(policy, LayerGradient(str(output.layer), self._states.unscale(norm_B)), step)
        return policy.sample(norm_B, output, step)

    def check_shape(self, hidden: Tensor) -> None:
        """Refuse an output whose first dimension is not that of the examples."""
        sizes = self.engine.batch_sizes
        if sizes and len(hidden) not in sizes:
            raise UnsupportedError(
                f"{type(self.policy).__name__} chooses among examples, and the first dimension of a layer's output, "
                f"{tuple(hidden.shape)}, is not that of the batch"
            )


class _LayerOverride(ForwardOverride):
    """Runs a layer, and puts the choice behind its output."""

    def __init__(self, layer: nn.Module, output: LayerOutput, extension: LayerExtension) -> None:
        self._layer, self._output, self._extension = layer, output, extension

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.run_covered(self._layer, *args, **kwargs)
        hidden = result[0] if isinstance(result, tuple) else result
        extension = self._extension
        if self.is_removed or not extension.engine.enabled or not hidden.requires_grad:
            return result
        if hidden.dim() < EXAMPLES_BY_ROWS:
            return result  # rows of no known example: linears count them as one
        extension.check_shape(hidden)
        # Inside of the layer's forward, so that checkpointing decides once. See decision 103.
        sampled = _Sampled.apply(hidden, extension, self._output)  # type: ignore[no-untyped-call]
        return (sampled, *result[1:]) if isinstance(result, tuple) else sampled


class _Sampled(Function):
    """The identity; its backward multiplies each example's gradient by the policy's factor."""

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
        # Not a product alone: zero times an infinite gradient is no zero.
        factor = factor_B.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1))
        return torch.where(factor == 0, 0.0, grad * factor), None, None
