"""Token routing in one model: a layer runs on the positions that a router sends through it; the others bypass it.

Each layer's forward is the model's own, with arguments restricted to the positions: masks and rotary positions are
those of their places. Only the layers that get fewer positions are touched.

Shape letters: B examples, T positions, K positions that go through, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.extension import refuse_uncalled
from sparsebp_cli.backward.decoder.decoder import Decoder, Layer, bind_arguments, find_decoder, find_reentrant
from sparsebp_cli.backward.decoder.kv_cache import is_filled
from sparsebp_cli.backward.observe.flops import DensePass, PassEstimate
from sparsebp_cli.backward.observe.module_trace import is_in_backward
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, check_free, uncompiled
from sparsebp_cli.backward.selection.token.rows import AttentionArgs, AttentionView, RowNumbers
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import RoutedLayer, Step, TokenRouter

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView


@final
class RoutingExtension:
    """A token router in one model; see :class:`~sparsebp_cli.backward.core.extension.EngineExtension`.

    Raises :class:`UnsupportedError` if the model's architecture is unknown, or under reentrant checkpointing.
    """

    engine: EngineView
    policy: TokenRouter
    decoder: Decoder

    def __init__(self, policy: TokenRouter, model: nn.Module) -> None:
        name = find_reentrant(model)
        if name is not None:
            raise UnsupportedError(
                f"{type(policy).__name__} with reentrant checkpointing (at {name!r}), which runs layers without "
                "gradients first: enable checkpointing with use_reentrant=False"
            )
        self.policy, self._model, self.decoder = policy, model, find_decoder(model)
        self._names = {module: name for name, module in model.named_modules()}
        self._patches = ForwardPatches()
        self._shares: dict[int, float] = {}  # K / T of the last forward, by layer
        self._forward_step: Step | None = None  # of the last forward
        self._was_called = False
        for layer in self.decoder.layers:
            check_free(layer.name, layer.module)

    def install(self, engine: EngineView) -> None:
        self.engine = engine
        for number, layer in enumerate(self.decoder.layers):
            self._patches.install(layer.module, RoutedOverride(layer, number, self))

    def remove(self) -> None:
        self._patches.remove()

    def enable(self, enabled: bool) -> None:
        """Do nothing: the forward reads the engine's state."""

    def start_step(self, step: Step) -> None:
        """Do nothing: positions are chosen in the forward."""

    def check_called(self) -> None:
        if not self._was_called:
            refuse_uncalled(self.policy, self._model)

    def choose(self, number: int, hidden_BTD: Tensor) -> Tensor | None:
        """Return the positions that go through a layer, (B, K) on the CPU; None for all."""
        self._was_called = True
        step = self.engine.now()
        if not is_in_backward():
            self._forward_step = step
        elif self._forward_step != step:
            raise UsageError(
                f"{self.decoder.layers[number].name!r} is computed again after the step of its forward, with other "
                "positions: run the backward of each forward before the next one"
            )
        num_examples, length = hidden_BTD.shape[:2]
        layer = RoutedLayer(number, len(self.decoder.layers), num_examples, length)
        policy = self.policy.at(step)
        kept = policy.count(layer, step)
        if not 1 <= kept <= length:
            raise PolicyError(f"{type(policy).__name__} counts {kept} positions, allowed: 1 to {length}")
        self._shares[number] = kept / length
        self.engine.notes["routing"] = (
            f"at step {step.index} {min(self._shares.values()):.0%} of the positions or more go through each layer, "
            "and the others bypass it"
        )
        if kept == length:
            return None
        index_BK = policy.route(layer, step)
        good = index_BK.dtype == torch.int64 and index_BK.shape == (num_examples, kept)
        good = good and bool(
            (index_BK[:, 1:] > index_BK[:, :-1]).all() and 0 <= index_BK.min() <= index_BK.max() < length
        )
        if not good:
            raise PolicyError(
                f"{type(policy).__name__} must route ({num_examples}, {kept}) ascending positions below {length}, int64"
            )
        return index_BK

    def claim(self, dense: DensePass) -> PassEstimate:  # noqa: ARG002 - the interface
        """Return the remaining shares of a dense pass, by the choice of the last forward; see
        :class:`~sparsebp_cli.backward.core.extension.EstimatesFlops`.
        """
        shares = {}
        for number, share in self._shares.items():
            layer = self.decoder.layers[number]
            for module in layer.module.modules():
                shares[self._names[module]] = share**2 if module is layer.core else share
        return PassEstimate(backward=shares, recomputed=shares, forward=shares)


class RoutedOverride(ForwardOverride):
    """The ``forward`` of one layer."""

    def __init__(self, layer: Layer, number: int, extension: RoutingExtension) -> None:
        self._layer, self._number, self._extension = layer, number, extension
        # Not compiled, since the number of rows differs from step to step.
        self._run: Callable[..., Any] = uncompiled(self._route)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        module = self._layer.module
        if self.is_removed or not (module.training and torch.is_grad_enabled() and self._extension.engine.enabled):
            return self.run_covered(module, *args, **kwargs)
        return self._run(*args, **kwargs)

    def _route(self, *args: Any, **kwargs: Any) -> Any:
        layer, module = self._layer, self._layer.module
        arguments = bind_arguments(module, args, kwargs)
        hidden_BTD = arguments.pop(layer.argument_names[0])
        assert isinstance(hidden_BTD, Tensor)
        index_BK = self._extension.choose(self._number, hidden_BTD)
        if index_BK is None:
            return self.run_covered(module, *args, **kwargs)
        if is_filled(arguments.pop(layer.attention.cache, None), layer.core):
            raise UnsupportedError("token routing computes without keys and values of earlier positions")
        index_BK = index_BK.to(hidden_BTD.device)
        kept = index_BK.shape[1]
        valid_BK = torch.ones_like(index_BK, dtype=torch.bool)
        rows = RowNumbers(index_BK, valid_BK, start=None, shared=len(index_BK) == 1, is_full=True, num_rows=kept)
        restriction = AttentionArgs(
            self._extension.decoder.implementation, layer.attention, (len(hidden_BTD), hidden_BTD.shape[1])
        )
        restriction.check(arguments)
        restricted = restriction.restrict(arguments, AttentionView.of(rows))
        given = {layer.argument_names[0]: rows.take(hidden_BTD), layer.attention.cache: None}
        output_BKD = self.run_covered(module, **restricted, **given)
        if not isinstance(output_BKD, Tensor):
            raise UnsupportedError(f"{layer.name!r} returns a {type(output_BKD).__name__}, which cannot be routed")
        index_BKD = index_BK[:, :, None].expand_as(output_BKD)
        return hidden_BTD.scatter(1, index_BKD, output_BKD.to(hidden_BTD.dtype))
