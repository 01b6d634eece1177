"""The calls of the frozen layers in one forward: their arguments, for all examples or for some of them.

Shape letters: B examples, T positions, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.errors import UnsupportedError

HIDDEN = "hidden_states"  # transformers' name for the argument with the residual stream
# transformers passes arguments of the loss to every layer. No layer reads them, and they differ from batch to batch.
OF_THE_LOSS = frozenset({"num_items_in_batch", "labels", "shift_labels"})
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Call:
    """One layer's call. ``run`` runs the layer without the engine."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden(self) -> object:
        """The argument with the residual stream."""
        return self.args[0] if self.args else self.kwargs.get(HIDDEN)


def hidden_of(output: Any) -> Any:
    """Return the hidden states of a layer's output, which is a tensor or a tuple that begins with them."""
    return output[0] if isinstance(output, tuple) else output


class LayerCalls:
    """The calls of consecutive layers. Each layer reads the output of the layer before.

    Raises :class:`UnsupportedError` for arguments that do not belong to examples, or whose content is unknown.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        hidden = calls[0].hidden
        assert isinstance(hidden, Tensor)
        self.hidden_BTD = hidden
        self.num_examples, self.length = hidden.shape[0], hidden.shape[1]
        self._tensors: dict[int, Tensor] = {}  # each tensor once, although most layers get the same ones
        self._order: dict[int, int] = {}
        self._form = "\n".join(self._describe(call) for call in calls)

    def keys(self, context: bytes) -> list[bytes]:
        """Return a key for each example: the digest of all values that determine its output.

        Args:
            context: Digest of the layers, and of how they run.

        Returns:
            B digests of 32 bytes.
        """
        common = hashlib.blake2b(context, digest_size=32)
        common.update(f"{tuple(self.hidden_BTD.shape[1:])} {self.hidden_BTD.dtype}\n{self._form}".encode())
        of_rows = [_to_bytes(self.hidden_BTD)]
        for tensor in self._tensors.values():
            common.update(f"{tuple(tensor.shape[1:])} {tensor.dtype}\n".encode())
            if self._has_rows(tensor):
                of_rows.append(_to_bytes(tensor))
            else:
                common.update(f"{tuple(tensor.shape)}\n".encode())
                common.update(_to_bytes(tensor).reshape(-1).numpy().data)
        keys = []
        for row in range(self.num_examples):
            digest = common.copy()
            for tensor in of_rows:
                digest.update(tensor[row].reshape(-1).numpy().data)
            keys.append(digest.digest())
        return keys

    def compute(self, rows: Sequence[int] | None = None) -> Tensor:
        """Run the layers, for all examples or for some of them, in the given order.

        Args:
            rows: Indices of examples; None: all examples, with unchanged arguments.

        Returns:
            The output of the last layer, with one row of its first dimension for each example.
        """
        picked = None if rows is None else torch.tensor(rows, device=self.hidden_BTD.device)
        memo: dict[int, Tensor] = {}

        def pick(tensor: Tensor) -> Tensor:
            if picked is None or not self._has_rows(tensor):
                return tensor
            return memo.setdefault(id(tensor), tensor.index_select(0, picked))

        hidden = self.hidden_BTD if picked is None else self.hidden_BTD.index_select(0, picked)
        for call in self._calls:
            kwargs = {name: _map(value, pick) for name, value in call.kwargs.items() if name != HIDDEN}
            args = [_map(value, pick) for value in call.args[1:]]
            output = call.run(hidden, *args, **kwargs) if call.args else call.run(**{HIDDEN: hidden}, **kwargs)
            hidden = hidden_of(output)
        return hidden

    def cut(self, row: int, positions: range) -> LayerCalls:
        """Return the calls of one example alone, without padding."""
        span = slice(positions.start, positions.stop)
        memo: dict[int, Tensor] = {}  # layers that share a tensor also share its part

        def part(tensor: Tensor) -> Tensor:
            if id(tensor) not in memo:
                memo[id(tensor)] = self._cut(tensor, row, span)
            return memo[id(tensor)]

        hidden = self._cut(self.hidden_BTD, row, span)
        calls = []
        for call in self._calls:
            kwargs = {name: _map(value, part) for name, value in call.kwargs.items() if name != HIDDEN}
            args = tuple(_map(value, part) for value in call.args[1:])
            named = {} if call.args else {HIDDEN: hidden}
            calls.append(replace(call, args=(hidden, *args) if call.args else (), kwargs=named | kwargs))
        return LayerCalls(calls)

    def _cut(self, tensor: Tensor, row: int, span: slice) -> Tensor:
        """Return the part of an argument that belongs to some positions of one example."""
        if self._has_rows(tensor):
            tensor = tensor[row : row + 1]
        # In tensors with three dimensions the last one is features; with four, as in a mask, it is keys.
        places = {1: (0,), 2: (1,), 3: (1,), 4: (2, 3)}.get(tensor.dim(), ())
        for place in places:
            if tensor.shape[place] == self.length:
                tensor = tensor[(slice(None),) * place + (span,)]
        return tensor.contiguous()

    def _has_rows(self, tensor: Tensor) -> bool:
        """Return whether the first dimension of an argument has the number of examples. If another dimension has this
        length by chance, a comparison of shuffled examples detects it."""
        return tensor.dim() > 1 and tensor.shape[0] == self.num_examples

    def _describe(self, call: Call) -> str:
        """Return a layer's arguments as text, with numbers for tensors."""
        named = {str(number): value for number, value in enumerate(call.args[1:], 1)} | dict(call.kwargs)
        return "; ".join(
            f"{name}={self._show(value, name, call.name)}"
            for name, value in named.items()
            if name not in OF_THE_LOSS and name != HIDDEN
        )

    def _show(self, value: object, name: str, layer: str) -> str:
        if isinstance(value, Tensor):
            self._check_rows(value, name, layer)
            self._tensors[id(value)] = value
            return f"tensor {self._order.setdefault(id(value), len(self._order))}"
        if isinstance(value, tuple | list):
            return f"({', '.join(self._show(item, name, layer) for item in value)})"
        if isinstance(value, PLAIN):
            return repr(value)
        hint = ": set model.config.use_cache = False" if "key_value" in name or "Cache" in type(value).__name__ else ""
        raise UnsupportedError(f"frozen: outputs cannot be cached: {layer} gets {name}, a {type(value).__name__}{hint}")

    def _check_rows(self, tensor: Tensor, name: str, layer: str) -> None:
        count = self.num_examples
        if count > 1 and tensor.dim() > 2 and tensor.shape[0] > count and tensor.shape[0] % count == 0:
            raise UnsupportedError(
                f"frozen: outputs cannot be cached: {layer} gets {name} with {tensor.shape[0]} rows for "
                f"{count} examples, so the rows of an example are not known"
            )


def _to_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the host, with its first dimension unchanged."""
    flat = tensor.detach().to("cpu").contiguous()
    if flat.dtype is torch.bool:
        return flat.view(torch.uint8)
    return flat.unsqueeze(-1).view(torch.uint8) if flat.dim() else flat.reshape(1).view(torch.uint8)


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(item, function) for item in value)
    return value


def find_positions(mask_BT: Tensor | None, calls: LayerCalls) -> list[range]:
    """Return the positions of each example that are not padding.

    Args:
        mask_BT: The batch's attention mask; None: no padding.
        calls: The calls of the layers in the same forward.

    Returns:
        B ranges of positions.
    """
    if mask_BT is None:
        return [range(calls.length)] * calls.num_examples
    if mask_BT.shape != (calls.num_examples, calls.length):
        raise UnsupportedError(
            f"cache_padding: drop needs an attention mask of shape (examples, positions), got {tuple(mask_BT.shape)}"
        )
    found = []
    for mask_T in mask_BT.detach().to("cpu") != 0:
        count = int(mask_T.sum())
        # Refuse padding before an example, since its last position predicts the first token, so it is read.
        if not count or not bool(mask_T[:count].all()):
            raise UnsupportedError(
                "cache_padding: drop needs padding only at the end of examples, but the attention mask has 0 before or "
                "inside one; use cache_padding: keep"
            )
        found.append(range(count))
    return found
