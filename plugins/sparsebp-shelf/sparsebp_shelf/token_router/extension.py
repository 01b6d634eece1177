"""Route tokens in one model: a layer runs on the positions that a router selects; the others bypass it.

Shape letters: B examples, T positions, K positions that go through, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward import DensePass, EngineExtension, LayerPositions, PassEstimate, refuse_uncalled
from sparsebp_cli.errors import PolicyError
from sparsebp_shelf.token_router.kind import RoutedLayer, TokenRouter

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given


@final
class RoutingExtension(EngineExtension):
    """Carry out a token router's choices in one model.

    Raises :class:`UnsupportedError` if the model's architecture is unknown, or under reentrant checkpointing.
    """

    engine: EngineView
    policy: TokenRouter

    def __init__(self, policy: TokenRouter, model: nn.Module, given: Given) -> None:  # noqa: ARG002 - as of all
        self.policy, self._model = policy, model
        self._layers = LayerPositions(model, policy)
        self._shares: dict[int, float] = {}  # K / T of the last forward, by layer
        self._was_called = False

    def install(self, engine: EngineView) -> None:
        self.engine = engine
        self._layers.install(engine, self._choose)

    def remove(self) -> None:
        self._layers.remove()

    @override
    def check_called(self) -> None:
        if not self._was_called:
            refuse_uncalled(self.policy, self._model)

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass, for the choice of the last forward."""
        return self._layers.claim(self._shares)

    def _choose(self, number: int, hidden_BTD: Tensor) -> Tensor | None:
        """Return the positions that go through a layer, (B, K) on the CPU; None for all."""
        self._was_called = True
        step = self.engine.now()
        num_examples, length = hidden_BTD.shape[:2]
        layer = RoutedLayer(number, len(self._layers.names), num_examples, length)
        policy = self.policy.at(step)
        kept = policy.count(layer, step)
        if not 1 <= kept <= length:
            raise PolicyError(
                f"the number of positions that {type(policy).__name__} sends through a layer must be from 1 to "
                f"{length}, got {kept}"
            )
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
                f"{type(policy).__name__} must return positions as int64 of shape ({num_examples}, {kept}), in "
                f"ascending order and below {length}"
            )
        return index_BK
