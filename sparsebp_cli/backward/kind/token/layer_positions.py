"""Layers that run on some positions in training forwards; other positions bypass the layer unchanged.

Each layer runs the model's own forward, with arguments restricted to the positions. Masks and rotary embeddings are
those of the original positions. Layers that get all positions run unchanged.

Shape letters: B examples, T positions, K positions that go through, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import Decoder, Layer, bind_arguments, find_decoder, find_reentrant
from sparsebp_cli.backward.decoder.kv_cache import is_filled
from sparsebp_cli.backward.kind.token.rows import AttentionArgs, AttentionView, RowNumbers
from sparsebp_cli.backward.observe.flops import PassEstimate
from sparsebp_cli.backward.observe.module_trace import is_in_backward
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, check_free, uncompiled
from sparsebp_cli.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.policy import Policy, Step

ChoosePositions: TypeAlias = Callable[[int, Tensor], Tensor | None]


@final
class LayerPositions:
    """The layers of a decoder. Each runs on the positions that a function chooses; others bypass it unchanged.

    After a layer all positions are at their places again; for positions that bypass it, the layer is the identity. In
    evaluation, without gradients and with a disabled engine all positions go through all layers.

    Args:
        model: The model whose layers :meth:`install` overrides.
        asker: The policy that chooses; errors contain its name.

    Raises:
        UnsupportedError: The model's architecture is unknown, or it is under reentrant checkpointing.
    """

    names: tuple[str, ...]  # names of the layers in the model, from the first

    def __init__(self, model: nn.Module, asker: Policy) -> None:
        name = find_reentrant(model)
        if name is not None:
            raise UnsupportedError(
                f"{type(asker).__name__} with reentrant checkpointing (at {name!r}), which runs layers without "
                "gradients first: enable checkpointing with use_reentrant=False"
            )
        self._decoder = find_decoder(model)
        self.names = tuple(layer.name for layer in self._decoder.layers)
        self._modules = {module: name for name, module in model.named_modules()}
        self._patches = ForwardPatches()
        self._forward_step: Step | None = None  # the step of the last forward
        for layer in self._decoder.layers:
            check_free(layer.name, layer.module)

    def install(self, engine: EngineView, choose: ChoosePositions) -> None:
        """Override the layers, so that they call ``choose``.

        Args:
            engine: View of the engine, the argument of the caller's own ``install``.
            choose: Takes the index of a layer, from 0, and its input, (B, T, D). Returns the positions that go through
                the layer, (B, K), int64, ascending and each once, or None for all.
        """
        for number, layer in enumerate(self._decoder.layers):
            override = _SomePositions(layer, number, self._decoder, engine, self._ask(engine, choose))
            self._patches.install(layer.module, override)

    def remove(self) -> None:
        """Restore the model."""
        self._patches.remove()

    def claim(self, shares: Mapping[int, float]) -> PassEstimate:
        """Return the remaining fractions of a dense pass.

        Args:
            shares: K / T by the index of the layer; a missing layer keeps all positions.

        Returns:
            The fraction for each module of these layers. It is squared for attention, whose work grows with the pairs.
        """
        found = {}
        for number, share in shares.items():
            layer = self._decoder.layers[number]
            for module in layer.module.modules():
                found[self._modules[module]] = share**2 if module is layer.core else share
        return PassEstimate(backward=found, recomputed=found, forward=found)

    def _ask(self, engine: EngineView, choose: ChoosePositions) -> ChoosePositions:
        def ask(number: int, hidden_BTD: Tensor) -> Tensor | None:
            step = engine.now()
            if not is_in_backward():
                self._forward_step = step
            elif self._forward_step != step:
                raise UsageError(
                    f"{self.names[number]!r} is computed again after the step of its forward, with other positions: "
                    "run the backward of each forward before the next one"
                )
            return choose(number, hidden_BTD)

        return ask


class _SomePositions(ForwardOverride):
    """The ``forward`` of one layer."""

    def __init__(
        self, layer: Layer, number: int, decoder: Decoder, engine: EngineView, choose: ChoosePositions
    ) -> None:
        self._layer, self._number, self._decoder = layer, number, decoder
        self._engine, self._choose = engine, choose
        # Do not compile, since the number of rows differs from step to step.
        self._run: Callable[..., Any] = uncompiled(self._restrict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        module = self._layer.module
        if self.is_removed or not (module.training and torch.is_grad_enabled() and self._engine.enabled):
            return self.run_covered(module, *args, **kwargs)
        return self._run(*args, **kwargs)

    def _restrict(self, *args: Any, **kwargs: Any) -> Any:
        layer, module = self._layer, self._layer.module
        arguments = bind_arguments(module, args, kwargs)
        hidden_BTD = arguments.pop(layer.argument_names[0])
        assert isinstance(hidden_BTD, Tensor)
        index_BK = self._choose(self._number, hidden_BTD)
        if index_BK is None:
            return self.run_covered(module, *args, **kwargs)
        if is_filled(arguments.pop(layer.attention.cache, None), layer.core):
            raise UnsupportedError("token routing computes without keys and values of earlier positions")
        index_BK = index_BK.to(hidden_BTD.device)
        kept = index_BK.shape[1]
        valid_BK = torch.ones_like(index_BK, dtype=torch.bool)
        rows = RowNumbers(index_BK, valid_BK, start=None, shared=len(index_BK) == 1, is_full=True, num_rows=kept)
        shape = len(hidden_BTD), hidden_BTD.shape[1]
        restriction = AttentionArgs(self._decoder.implementation, layer.attention, shape)
        restriction.check(arguments)
        restricted = restriction.restrict(arguments, AttentionView.of(rows))
        given = {layer.argument_names[0]: rows.take(hidden_BTD), layer.attention.cache: None}
        output_BKD = self.run_covered(module, **restricted, **given)
        if not isinstance(output_BKD, Tensor):
            raise UnsupportedError(f"{layer.name!r} returns a {type(output_BKD).__name__}, which cannot be routed")
        index_BKD = index_BK[:, :, None].expand_as(output_BKD)
        return hidden_BTD.scatter(1, index_BKD, output_BKD.to(hidden_BTD.dtype))
