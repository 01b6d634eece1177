"""Apply lossless packing to a model whose script runs the backward itself and was not written for packing.

Without an engine it is unknown what the script reads of the model's output. So the output is watched: a script that
reads logits beside the loss, or whose loss reads padding, gets the plain forward from then on.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.given import Given
from sparsebp_cli.backward.core.loss_weight import IGNORED, has_causal_loss
from sparsebp_cli.backward.decoder.decoder import argument_names
from sparsebp_cli.backward.kind.packing.balance import balances_experts
from sparsebp_cli.backward.kind.packing.batch import Counts, read_mask, read_positions
from sparsebp_cli.backward.kind.packing.extension import PackingExtension
from sparsebp_cli.backward.kind.packing.layout import make_layout
from sparsebp_cli.backward.kind.packing.pair import is_pair
from sparsebp_cli.backward.kind.packing.refusal import find_model
from sparsebp_cli.backward.observe.internals import find_hook
from sparsebp_cli.backward.patch.deferred import Deferred
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import BatchPacker, make_policy

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView

READS_LOGITS = (
    "the script reads logits besides the loss, but lossless computes them at trained positions only: if these are "
    "enough, attach lossless in the script"
)
READS_PADDING = "the script's loss reads padding positions, which lossless skips"
READS_TUPLE = "the script unpacks the model's output as a tuple, which lossless does not support"


class ScriptPacking:
    """The policy ``lossless`` in one model, switched by ``enabled``, instead of an engine.

    Raises :class:`UnsupportedError` if rows cannot be left out of this model exactly.
    """

    reference = False
    is_probing = False

    enabled: bool
    observes: bool

    def __init__(self, model: nn.Module) -> None:
        self.notes: dict[str, str] = {}
        self.enabled, self.observes = False, True  # whether batches are packed; whether plain outputs are watched
        self.has_watched = False
        self._extension = PackingExtension(cast("BatchPacker", make_policy("lossless")), model, Given())
        hook = find_hook(self._extension.model)
        if hook:
            raise UnsupportedError(hook)
        self._patches = ForwardPatches()

    def install(self) -> None:
        """Watch the model's outputs, and pack while ``enabled``."""
        # The part of an engine that packing uses.
        self._extension.install(cast("EngineView", self))
        self._patches.install(self._extension.model, WatchedForward(self, self._extension.model))

    def remove(self) -> None:
        """Restore the model."""
        self._patches.remove()
        self._extension.remove()

    @property
    def counts(self) -> Counts:
        """Positions of all batches so far."""
        return self._extension.counts

    @property
    def failure(self) -> str:
        """Why the plain step is used from now on; empty: it is not."""
        return self._extension.failure

    def stop(self, reason: str) -> None:
        """Use the plain step from now on."""
        self._extension.failure = self._extension.failure or reason

    def short_forward(self, *, num_rows: int | None = None, scale: float = 1.0) -> AbstractContextManager[None]:
        """Return a context without effect, because no site's work is counted."""
        del num_rows, scale
        return nullcontext()


class WatchedForward(ForwardOverride):
    """Replace the ``forward`` of a model in a script that does not know about packing."""

    def __init__(self, packing: ScriptPacking, model: nn.Module) -> None:
        self._packing, self._model, self._names = packing, model, argument_names(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, packed or plain; after any error of packing, plain."""
        if args and args[0] is self._model:  # accelerate passes the model itself
            args = args[1:]
        given = dict(zip(self._names, args, strict=False)) | kwargs
        packing, plain = self._packing, functools.partial(self._run_plain, given)
        if self.is_removed or packing.failure or not (self._model.training and torch.is_grad_enabled()):
            return plain()
        if not packing.enabled:
            return self._watch(plain(), given, lambda: None) if packing.observes else plain()
        if given.get("return_dict") is False:
            packing.stop(READS_TUPLE)
            return plain()
        before = packing.counts.packed
        try:
            output = self.run_covered(self._model, **given)
        except Exception as error:  # the script must continue as without packing
            packing.stop(str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}")
            return plain()
        if packing.failure or packing.counts.packed == before:
            return output  # output of the plain forward
        return self._watch(output, given, plain)

    def __reduce_ex__(self, _: object) -> Any:
        """Return the plain forward, because a copy of the model is not packed."""
        return functools.partial, (type(self._model).forward, self._model)

    def _run_plain(self, given: Mapping[str, Any]) -> Any:
        enabled, self._packing.enabled = self._packing.enabled, False
        try:
            return self.run_covered(self._model, **given)
        finally:
            self._packing.enabled = enabled

    def _watch(self, output: Any, given: Mapping[str, Any], plain: Callable[[], Any]) -> Any:
        self._packing.has_watched = True
        if not hasattr(output, "to_tuple"):
            self._packing.stop(READS_TUPLE)
            return output
        if getattr(output, "loss", None) is not None:

            def read() -> Any:
                self._packing.stop(READS_LOGITS)
                return plain()

            return watch_reads(output, read)
        self._watch_padding(output[0], given, packed=self._packing.enabled)
        return output

    def _watch_padding(self, values: Tensor, given: Mapping[str, Any], *, packed: bool) -> None:
        """Stop packing if a gradient arrives at padding, where a packed output is zero."""
        mask, kept = given.get("attention_mask"), given.get("logits_to_keep")
        if mask is None or mask.dim() != 2 or not values.requires_grad:
            return
        padding = (mask == 0)[:, kept if isinstance(kept, Tensor) else slice(-kept if kept else None, None)]
        if values.dim() < 3 or values.shape[:2] != padding.shape:
            return

        def check(grad: Tensor) -> Tensor | None:
            if not bool((grad[padding] != 0).any()):
                return None
            self._packing.stop(READS_PADDING)
            # A packed output would raise; this lets the script continue.
            return grad.masked_fill(padding.view(*padding.shape, *[1] * (grad.dim() - 2)), 0) if packed else None

        values.register_hook(check)


def watch_reads(output: Any, read: Callable[[], Any]) -> Any:
    """Return a transformers output that calls ``read`` when a value other than its loss is read first. ``read`` returns
    an output whose values replace the others, or None to leave them."""
    # The class from transformers itself, because the output's class may be made at run time.
    kind = next(base for base in type(output).__mro__ if "__dataclass_fields__" in vars(base))
    # A packed output computes logits when they are read, so this code must not read them.
    if fields(kind)[0].name != "loss":
        return output
    values = {f.name: output.__dict__.get(f.name) for f in fields(output)}
    values = {name: None if isinstance(value, Deferred) else value for name, value in values.items()}
    watched = _watched(kind)(**values)
    watched.__dict__[_READ] = read
    return watched


_READ = "_sparsebp_read"


@functools.cache
def _watched(kind: type[Any]) -> type[Any]:
    guarded = {field.name for field in fields(kind)} - {"loss"} | {"to_tuple", "items", "values", "keys", "get"}

    def fill(self: Any) -> None:
        read = self.__dict__.pop(_READ, None)
        found = read() if read is not None else None
        for name, value in {} if found is None else found.items():
            if name != "loss":
                self[name] = value

    class Watched(kind):  # type: ignore[misc] # a class made at run time
        def __getattribute__(self, name: str) -> Any:
            if name in guarded:
                fill(self)
            return super().__getattribute__(name)

        def __getitem__(self, key: Any) -> Any:
            if key == "loss" or (isinstance(key, int) and key == 0):
                return self.__dict__["loss"]
            fill(self)
            return super().__getitem__(key)

        def __iter__(self) -> Any:
            fill(self)
            return super().__iter__()

    Watched.__name__ = kind.__name__
    return Watched


def refusal_of(model: nn.Module) -> str:
    """Return why rows of a model cannot be left out exactly, in one line; empty if they can, as far as is known without
    a batch."""
    try:
        ScriptPacking(model)
    except UnsupportedError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Leftover:
    """Positions of one batch of a causal language model, by what packing does with them."""

    real: int  # without padding
    unread: int  # of them, after the last label of their example
    shared: int  # of the rest, in a prefix of an earlier example


def count_leftover(model: nn.Module, inputs: Mapping[str, object]) -> Leftover | None:
    """Count what packing would leave out of a batch; None for other models, and for unknown batches."""
    try:
        causal = find_model(model)
        ids = inputs.get("input_ids")
        # find_head would run a forward inside the forward that is watched
        has_head = has_causal_loss(causal) and causal.get_output_embeddings() is not None
        if is_pair(causal) or not has_head or not isinstance(ids, Tensor) or ids.dim() != 2:
            return None
    except UnsupportedError:
        return None
    size, labels = (int(ids.shape[0]), int(ids.shape[1])), inputs.get("labels")
    real, position = read_mask(inputs, size), read_positions(cast("Any", causal).base_model, inputs, size)
    if real is None or position is None or not real.any():
        return None
    needed = real
    # the load-balancing loss of experts reads every position that is no padding
    reads_all = balances_experts(causal, inputs)
    if isinstance(labels, Tensor) and labels.shape == ids.shape and not reads_all:
        read = np.zeros(size, bool)
        read[:, :-1] = (labels[:, 1:] != IGNORED).cpu().numpy()
        last = np.where(read.any(1), size[1] - 1 - read[:, ::-1].argmax(1), -1)
        needed = real & (np.arange(size[1]) <= last[:, None])
    if not needed.any():
        return Leftover(int(real.sum()), int(real.sum()), 0)
    layout = make_layout(needed, ids.cpu().numpy(), position, torch.device("cpu"), is_causal=True)
    return Leftover(int(real.sum()), int((real & ~needed).sum()), layout.num_shared)
