"""The decision whether the head of a causal language model and its loss run in tiles, and access to the logits.

Tiles replace the head if the model's loss is transformers' mean or sum of cross entropies, the head is a plain linear,
and tiles need less memory. Then the logits of all rows do not exist; the model computes them when the script reads
them. If the script has read the logits of the last forward, the next forward keeps them. Training is bit-identical in
both cases, so that a resumed run does not need to know what the script read.

Shape letters: U rows of the head, I targets, each of a row, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sparsebp_cli.backward.core.loss_weight import has_causal_loss
from sparsebp_cli.backward.kind.packing.groups import Ints, to_tensor
from sparsebp_cli.backward.kind.packing.loss import run_above_layers
from sparsebp_cli.backward.kind.packing.tiles import DTYPES, Tail, TiledLoss, TileJob

# Least rows of a tile, since products of fewer rows are slow. A CPU is as fast with 32 as with 128 (decision 128).
MIN_ROWS = {"cpu": 64}
MIN_ROWS_ELSEWHERE = 256
# Least saving in bytes. Smaller ones, as in a small model, do not pay for the calls. The value is a guess.
MIN_SAVED = 2**24  # bytes
# Peak bytes for each logit of the plain loss: the logits, their logarithms, and two gradients; mostly in float32.
WHOLE_BYTES, WHOLE_BYTES_SCORED = 16, 8
UPDATED = (
    "lossless did not keep the logits of this forward, and the weights have changed since: read output.logits before "
    'optimizer.step(), or set logits: whole (make_policy("lossless", logits="whole"))'
)


@final
class TiledHead:
    """Decides for the head of one model, and records whether the script reads logits."""

    def __init__(
        self, model: nn.Module, head: nn.Module | None, logits: Literal["tiles", "whole"], *, was_read: bool = True
    ) -> None:
        self._model, self._head = model, head
        self._is_wanted = logits == "tiles"
        self._tail: Tail | None = None
        self._is_known = False  # whether the tail has been determined
        self.was_read = was_read  # whether the script read the logits of its last forward with a gradient
        self.batches = self.read_again = 0

    @property
    def note(self) -> str:
        """A sentence for the report; empty for nothing."""
        if not self.batches:
            return ""
        again = f"; it ran again in {self.read_again} of these, whose logits the script read" if self.read_again else ""
        return f"; the head ran in tiles in {self.batches} batches, that is, on some positions at a time{again}"

    def start(
        self,
        index_U: Tensor,
        inverse_I: Ints | None,
        label_I: Tensor,
        weigh: Callable[[], Tensor],
        *,
        keeps: bool,
    ) -> TiledRun | None:
        """Return a run of the head in tiles; None: use the plain head.

        ``index_U`` are the rows of the head. ``inverse_I``, on the host, is the row of each target; None: target i has
        row i. ``weigh`` returns the weights of the targets in the loss.
        """
        head, size = self._head, self.size_of(len(index_U))
        if not size or self._tail is None or not isinstance(head, nn.Linear):
            return None
        differentiates, dtype = torch.is_grad_enabled(), _dtype_of(head.weight)
        weight_I, bounds = weigh(), range(size, len(index_U) + size, size)
        if inverse_I is None:
            row_I = torch.arange(len(index_U), device=index_U.device)
            ends = [min(end, len(index_U)) for end in bounds]
        else:
            order_I = inverse_I.argsort(kind="stable")
            row_on_host_I = inverse_I[order_I]
            row_I, order = (to_tensor(values, index_U.device) for values in (row_on_host_I, order_I))
            label_I, weight_I = label_I[order], weight_I[order]
            ends = np.searchsorted(row_on_host_I, bounds).tolist()
        job = TileJob(row_I, label_I, weight_I, ends, size, self._tail, dtype, differentiates, keeps)
        return TiledRun(head, job)

    def size_of(self, num_rows: int) -> int:
        """Return how many rows a tile has in a forward with the model's own loss; 0: no tiles."""
        head = self._head
        # Exactly this class, since adapters and quantized weights use others.
        if not self._is_wanted or head is None or type(head) is not nn.Linear or "forward" in head.__dict__:
            return 0
        size = self._least_size(num_rows, head, _dtype_of(head.weight), differentiates=torch.is_grad_enabled())
        if not size or not has_causal_loss(self._model):
            return 0
        if not self._is_known:
            self._tail, self._is_known = _find_tail(self._model, head), True
        return 0 if self._tail is None else size

    def _least_size(self, num_rows: int, head: nn.Linear, dtype: torch.dtype, *, differentiates: bool) -> int:
        """Return how many rows a tile has; 0: tiles save no memory, or the model's change of its logits is unknown."""
        weight, (vocabulary, width) = head.weight, head.weight.shape
        plain = type(weight.data) is Tensor or _is_fake(weight)
        if not plain or weight.dtype not in DTYPES or dtype not in DTYPES:
            return 0
        least = MIN_ROWS.get(weight.device.type, MIN_ROWS_ELSEWHERE)
        size = max(least, -(-num_rows * width // vocabulary))  # logits as large as the rows
        whole = num_rows * vocabulary * (WHOLE_BYTES if differentiates else WHOLE_BYTES_SCORED)
        tiled = size * vocabulary * (4 + (0 if dtype == torch.float32 else dtype.itemsize))
        if differentiates:
            tiled += num_rows * width * 4
            if weight.requires_grad:  # tiles hold the weight's gradient from the forward on
                tiled += weight.numel() * (4 + (0 if dtype == torch.float32 else dtype.itemsize))
        return size if size < num_rows and whole - tiled >= MIN_SAVED else 0

    def reader(
        self,
        run: TiledRun,
        later: Callable[[Callable[[], Tensor], str], Callable[[], Tensor]],
        note: Callable[[], None] | None,
    ) -> Callable[[], Tensor]:
        """Return a function that returns the logits (U, V) of a run. ``later`` makes a function that computes them with
        the present weights. ``note`` writes the report; None outside of training forwards."""
        again = None if run.kept else later(run.compute, UPDATED)
        if note is not None:
            self.batches += 1
            self.was_read = False

        def read() -> Tensor:
            if again is None:
                logits = torch.cat(run.kept)
            else:
                logits = again()
                self.read_again += note is not None
            if note is not None:
                self.was_read = True
                note()
            return logits

        return read


@final
class TiledRun:
    """The forward of a head in tiles, which replaces its own forward."""

    loss: Tensor

    def __init__(self, head: nn.Linear, job: TileJob) -> None:
        self._head, self._job = head, job
        self.kept = job.logits

    def __call__(self, take: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Compute the loss of the rows that ``take`` returns, and return placeholder logits of one row."""
        rows_UD, head = take(hidden)[0], self._head
        self._rows = rows_UD.detach()
        loss: Tensor = TiledLoss.apply(rows_UD, head.weight, head.bias, self._job)  # type: ignore[no-untyped-call]
        self.loss = loss
        return rows_UD.new_zeros(1, 1, head.out_features, dtype=self._job.dtype)

    def compute(self) -> Tensor:
        """Compute again and return the logits (U, V) of the plain model, without a graph."""
        dtype, head = self._job.dtype, self._head
        bias = None if head.bias is None else head.bias.to(dtype)
        return self._job.tail.apply_(linear(self._rows.to(dtype), head.weight.to(dtype), bias))


def _dtype_of(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a linear multiplies."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a fake tensor without data, of FakeTensorMode."""
    return hasattr(tensor.data, "fake_mode")


def _find_tail(model: nn.Module, head: nn.Linear) -> Tail | None:
    """Return how a model changes its logits before its loss, according to its configuration. Return None if its own
    forward treats random logits in another way."""
    made = torch.linspace(-60, 60, head.out_features, dtype=torch.float32, device=head.weight.device)[None, None]
    try:
        with torch.no_grad():
            found: Tensor = run_above_layers(model, head, made).logits
            tail = _guess_tail(model)
            if _is_fake(head.weight):
                return tail
            expected = tail.apply_(made.clone())
    except Exception:  # a model that needs more outputs of its layers may raise anything
        return None
    return tail if found.shape == expected.shape and torch.equal(found.float(), expected.float()) else None


def _guess_tail(model: nn.Module) -> Tail:
    config: Any = model.config
    text = config.get_text_config()

    def of(name: str) -> float | None:
        value = next((v for place in (text, config) if (v := getattr(place, name, None)) is not None), None)
        return float(value) if isinstance(value, int | float) and value else None

    multiplier, divisor = of("logit_scale") or 1.0, of("logits_scaling") or 1.0
    return Tail(multiplier, divisor, of("final_logit_softcapping"))
