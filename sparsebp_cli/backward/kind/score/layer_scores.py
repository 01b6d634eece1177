"""Scores of positions from inside the layers: attention received, updates of the residual stream, and the gradient at
the input of the last layer.

Hooks read them in the scoring forward. For the gradient, that forward builds a graph only from the last layer on.

Shape letters: B examples, T positions, H heads, N rows (= B*T), D width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import Decoder
from sparsebp_cli.backward.observe.internals import attention_name, use_attention
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Score

INSIDE: frozenset[Score] = frozenset({"attention", "update", "last_gradient"})
_MASK_DIMENSIONS = 4  # dimensions of a mask by example, head, query and key


@final
class LayerScores:
    """The scores of one forward of a decoder.

    Args:
        decoder: Layers of the model that runs the forward.
        wanted: Names among ``INSIDE``; others are ignored.
        real_BT: Whether a position is not padding.
    """

    found: dict[Score, Tensor]  # each (B, T), float32

    def __init__(self, decoder: Decoder, wanted: Collection[Score], real_BT: Tensor) -> None:
        self._decoder, self._wanted, self._real_BT = decoder, INSIDE & set(wanted), real_BT
        self._input: Tensor | None = None  # input of the last layer, a leaf
        self.found = {}

    @property
    def differentiates(self) -> bool:
        """Whether the last layer's output has a graph."""
        return "last_gradient" in self._wanted

    @contextmanager
    def watching(self, arguments: Mapping[str, object]) -> Iterator[None]:
        """Read the scores of the forward in the block.

        Args:
            arguments: Arguments of this forward by name, including the attention mask.

        Yields:
            None: While the forward runs.
        """
        layers, handles, mode = self._decoder.layers, [], torch.is_grad_enabled()
        config = layers[-1].core.config
        name = attention_name(config)
        if "update" in self._wanted:
            for layer in layers:
                see = partial(self._see_update, layer.argument_names[0])
                handles.append(layer.module.register_forward_hook(see, with_kwargs=True))
        if "attention" in self._wanted:
            mask = arguments.get("attention_mask")
            if isinstance(mask, Tensor) and mask.ndim == _MASK_DIMENSIONS:
                raise UnsupportedError(
                    "a score of attention needs an attention_mask of shape (B, T), got one with more dimensions"
                )
            handles.append(layers[-1].core.register_forward_hook(self._see_attention))
            use_attention(config, "eager")  # the only implementation that returns its weights
        if self.differentiates:
            begin = partial(self._begin_graph, layers[-1].argument_names[0])
            handles.append(layers[-1].module.register_forward_pre_hook(begin, with_kwargs=True))
        try:
            yield
        finally:
            torch.set_grad_enabled(mode)
            use_attention(config, name)
            for handle in handles:
                handle.remove()

    def differentiate(self, hidden_ND: Tensor, grad_ND: Tensor) -> None:
        """Find the norm of the gradient at the input of the last layer.

        Args:
            hidden_ND: Input of the head, with a graph down to the input of the last layer.
            grad_ND: Gradient of the loss at the input of the head.
        """
        assert self._input is not None
        (grad,) = torch.autograd.grad(hidden_ND, self._input, grad_ND)
        self.found["last_gradient"] = _norm(grad)

    def _see_update(
        self, argument: str, _: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: object
    ) -> None:
        before = args[0] if args else kwargs[argument]
        after = output[0] if isinstance(output, tuple) else output
        assert isinstance(before, Tensor)
        assert isinstance(after, Tensor)
        norm_BT = _norm(after.detach() - before.detach())
        self.found["update"] = self.found["update"] + norm_BT if "update" in self.found else norm_BT

    def _see_attention(self, module: nn.Module, _: tuple[object, ...], output: object) -> None:
        weight = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        length = self._real_BT.shape[1]
        if not isinstance(weight, Tensor) or weight.shape[2:] != (length, length):
            raise UnsupportedError(f"a score of attention needs its weights, {type(module).__name__} returns none")
        mean_BTT = weight.detach().float().mean(1)
        self.found["attention"] = (mean_BTT * self._real_BT[:, :, None]).sum(1)

    def _begin_graph(
        self, argument: str, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Replace the last layer's input by a leaf, and record a graph from there on."""
        given = args[0] if args else kwargs[argument]
        assert isinstance(given, Tensor)
        self._input = given.detach().requires_grad_()
        torch.set_grad_enabled(True)
        return ((self._input, *args[1:]), kwargs) if args else (args, kwargs | {argument: self._input})


def _norm(vector: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(vector, dim=-1, dtype=torch.float32)
    return norm
