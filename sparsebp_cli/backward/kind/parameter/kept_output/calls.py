"""The calls of the frozen layers in one forward: what each was given, for all examples or for some of them.

Shape letters: B examples, T positions, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.errors import UnsupportedError

HIDDEN = "hidden_states"  # transformers' name of what the residual stream brings
# transformers hands arguments of the loss on to every layer, and no layer reads them; they differ from batch to batch.
OF_THE_LOSS = frozenset({"num_items_in_batch", "labels", "shift_labels"})
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Call:
    """One layer's call; ``run`` runs the layer as without the engine."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden(self) -> object:
        """What the residual stream brings."""
        return self.args[0] if self.args else self.kwargs.get(HIDDEN)


def hidden_of(output: Any) -> Any:
    """Return the hidden states of a layer's output, which is these or a tuple that begins with them."""
    return output[0] if isinstance(output, tuple) else output


class LayerCalls:
    """The calls of consecutive layers, each of which reads what the one before returned.

    Raises :class:`UnsupportedError` for arguments that are not those of examples, or whose content is not known.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        hidden = calls[0].hidden
        assert isinstance(hidden, Tensor)
        self.hidden_BTD = hidden
        self.num_examples, self.length = hidden.shape[0], hidden.shape[1]
        self._tensors: dict[int, Tensor] = {}  # each once, though most layers get the same ones
        self._order: dict[int, int] = {}
        self._form = "\n".join(self._describe(call) for call in calls)

    def keys(self, context: bytes) -> list[bytes]:
        """Return a key for each example: of all that its output follows from.

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
            rows: Numbers of examples; None: all, with the arguments as they are.

        Returns:
            The output of the last layer, one row of its first dimension for each.
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

    def _has_rows(self, tensor: Tensor) -> bool:
        """Whether the first dimension of an argument is that of the examples. Where the length is the same by chance,
        a comparison of shuffled examples shows it."""
        return tensor.dim() > 1 and tensor.shape[0] == self.num_examples

    def _describe(self, call: Call) -> str:
        """Return a layer's arguments as text, with tensors by their numbers."""
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
        hint = ": call the model with use_cache=False" if "key_value" in name or "Cache" in type(value).__name__ else ""
        raise UnsupportedError(
            f"outputs of frozen layers cannot be kept: {layer} gets {name}, a {type(value).__name__}{hint}"
        )

    def _check_rows(self, tensor: Tensor, name: str, layer: str) -> None:
        count = self.num_examples
        if count > 1 and tensor.dim() > 2 and tensor.shape[0] > count and tensor.shape[0] % count == 0:
            raise UnsupportedError(
                f"outputs of frozen layers cannot be kept: {layer} gets {name} with {tensor.shape[0]} rows for "
                f"{count} examples, so it is not known which of them belong to an example"
            )


def _to_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the host, its first dimension as it is."""
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


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from iterate_tensors(item)
