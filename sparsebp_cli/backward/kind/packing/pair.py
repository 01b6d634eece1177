"""Packing in a model with an encoder and a decoder.

Both stacks embed the plain batch, since each computes its positions in its own way. The first layer of each stack
selects the needed rows. The encoder runs all tokens but padding, once for examples with the same source; the decoder
runs rows up to the last label. The head runs on rows with a label, and the model's own forward computes their loss.

Shape letters: B examples, S positions of the encoder, T of the decoder, M rows of the encoder, N of the decoder, R rows
of the head, D width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch import Tensor, nn

from sparsebp_cli.backward.core.loss_weight import IGNORED
from sparsebp_cli.backward.decoder.decoder import bind_arguments
from sparsebp_cli.backward.decoder.kv_cache import CACHE_NAMES
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.kind.packing.across import PackedMemory
from sparsebp_cli.backward.kind.packing.attention import packed
from sparsebp_cli.backward.kind.packing.batch import PackedBatch, to_place
from sparsebp_cli.backward.kind.packing.bias import BiasedAttention, find_biased
from sparsebp_cli.backward.kind.packing.entry import PackedEntry
from sparsebp_cli.backward.kind.packing.groups import Bools, Ints
from sparsebp_cli.backward.kind.packing.layout import PackedLayout, make_layout
from sparsebp_cli.backward.kind.packing.refusal import calls_interface, is_attention
from sparsebp_cli.backward.patch.deferred import defer_logits
from sparsebp_cli.backward.patch.forward import ForwardPatches, call_module, check_free, replace_forwards
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import BatchPacker, PackedSize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARGUMENTS = {"decoder_input_ids", "decoder_attention_mask"}  # arguments that a decoder-only model does not have


@dataclass(frozen=True)
class PairBatch(PackedBatch):
    """The computed rows of one batch. ``layout`` and ``read_BT`` belong to the decoder."""

    source: PackedLayout | None = None  # the encoder's rows
    decoder_ids: Tensor | None = None  # made from labels like in the model, if the caller passed none

    @property
    def num_positions(self) -> int:
        """Positions of the plain batch, in the encoder and in the decoder."""
        return self.read_BT.numel() + (0 if self.source is None else self.source.row_BT.numel())

    @property
    def num_shared(self) -> int:
        """Positions that use the row of another example, in the encoder and in the decoder."""
        return self.layout.num_shared + (0 if self.source is None else self.source.num_shared)

    @property
    def signature(self) -> tuple[bool, ...]:
        """The kinds of rows that packing skipped."""
        source = self.source
        assert source is not None
        return (*super().signature, bool(source.num_shared), not source.host.computed_BT.all(), len(source.groups) > 1)


@final
class PairPacking:
    """Packs the batches of a model with an encoder and a decoder.

    Raises :class:`UnsupportedError` if skipping rows would change this model's gradient.
    """

    policy: BatchPacker
    model: PreTrainedModel
    encoder: nn.Module
    decoder: nn.Module
    head: nn.Module

    def __init__(self, policy: BatchPacker, model: PreTrainedModel) -> None:
        self.policy, self.model = policy, model
        name = type(model).__name__
        self.encoder, self.decoder = model.get_encoder(), model.get_decoder()
        parts: tuple[Any, ...] = (self.encoder, self.decoder, model.get_output_embeddings())
        # The head of transformers' EncoderDecoderModel belongs to its decoder.
        if not all(isinstance(part, nn.Module) for part in parts) or model in parts or parts[2] in parts[1].modules():
            raise UnsupportedError(
                f"lossless needs a language-model head above the decoder, which the encoder-decoder {name} lacks"
            )
        self._layers: list[nn.Module] = []
        for stack, num_attentions in ((self.encoder, 1), (self.decoder, 2)):
            check_free("the encoder or the decoder", stack)
            layers = LayerNumbers(stack).layers
            if any(sum(map(calls_interface, layer.modules())) < num_attentions for layer in layers):
                raise UnsupportedError(
                    f"lossless needs transformers' attention interface, which {type(stack).__name__} does not use"
                )
            if not layers or "position_embeddings" in inspect.signature(type(layers[0]).forward).parameters:
                raise UnsupportedError(
                    f"lossless does not support an encoder-decoder with rotary position embeddings, such as {name}"
                )
            self._layers.append(layers[0])
        self.head = model.get_output_embeddings()
        self._biased = find_biased(model)

    def install(self, patches: ForwardPatches) -> None:
        """Override the first layers, and attention with a position bias."""
        for layer in self._layers:
            patches.install(layer, PackedEntry(layer))
        for module in self._biased:
            patches.install(module, BiasedAttention(module))

    def plan(self, given: Mapping[str, Any]) -> PairBatch | None:
        """Arrange the rows of a batch; None if packing saves no work, or the masks are not supported."""
        source = self._plan_source(given)
        labels = given.get("labels")
        ids = given.get("decoder_input_ids")
        if ids is None and labels is not None:
            ids = shift_labels(self.model, labels)
        if source is None or ids is None:
            return None
        layout, numbers = source
        mask = given.get("decoder_attention_mask")
        real: Bools = np.ones(ids.shape, bool) if mask is None else mask.cpu().numpy().astype(bool)
        if real.shape != tuple(ids.shape) or not real.any(1).all():
            return None
        read = real if labels is None else (labels != IGNORED).cpu().numpy()
        if (read & ~real).any() or not read.any():
            return None
        needed = self._needed(real, read)
        tokens = ids.cpu().numpy()
        # Rows of two examples are equal only if both examples have the same source.
        keys = tokens + numbers[:, None] * (int(tokens.max()) + 1)
        position = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
        shares = self.policy.prefixes == "share"
        target = make_layout(needed, keys if shares else None, position, ids.device, is_causal=True)
        num_positions = layout.row_BT.numel() + ids.numel()
        head_rows = num_positions * int(read.sum()) // ids.numel()
        if not self.policy.packs(PackedSize(num_positions, layout.num_rows + target.num_rows, head_rows)):
            return None
        padding = int((~layout.host.computed_BT).sum()) + int((~real).sum())
        unread = int((real & ~needed).sum())
        return PairBatch(target, *to_place(read, ids.device), padding, unread, layout, ids)

    def _needed(self, real_BT: Bools, read_BT: Bools) -> Bools:
        """Return the positions that the decoder computes, at least one for each example."""
        if not self.policy.labels:
            return real_BT
        size = real_BT.shape[1]
        last = np.where(read_BT.any(1), size - 1 - read_BT[:, ::-1].argmax(1), real_BT.argmax(1))
        needed: Bools = real_BT & (np.arange(size) <= last[:, None])
        return needed

    def _plan_source(self, given: Mapping[str, Any]) -> tuple[PackedLayout, Ints] | None:
        """Return the encoder's rows, and for each example the first example with the same source."""
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        first = ids if ids is not None else embeds
        if first is None:
            return None
        size = (int(first.shape[0]), int(first.shape[1]))
        mask = given.get("attention_mask")
        real: Bools = np.ones(size, bool) if mask is None else mask.cpu().numpy().astype(bool)
        if real.shape != size or not real.any(1).all():
            return None
        numbers = np.arange(size[0])
        if ids is not None and self.policy.prefixes == "share":
            tokens, seen = ids.cpu().numpy(), dict[bytes, int]()
            for example in range(size[0]):
                numbers[example] = seen.setdefault(real[example].tobytes() + tokens[example].tobytes(), example)
        needed = real & (numbers == np.arange(size[0]))[:, None]
        position = np.broadcast_to(np.arange(size[1]), size).copy()
        layout = make_layout(needed, None, position, first.device, is_causal=False)
        shared = int((real & ~needed).sum())
        return layout.change(layout.host.row_BT[numbers], layout.host.computed_BT[numbers], shared), numbers

    def shares(self, batch: PairBatch) -> dict[str, float]:
        """Return the remaining fraction of work for modules that do not run on the decoder's rows."""
        source = batch.source
        assert source is not None
        inside = {id(module) for module in self.encoder.modules()}
        rows, pairs = (
            source.num_rows / source.row_BT.numel(),
            source.num_pairs / (source.row_BT.numel() * source.shape[1]),
        )
        named = {n: (pairs if is_attention(m) else rows) for n, m in self.model.named_modules() if id(m) in inside}
        heads = {n: batch.read_BT.float().mean().item() for n, m in self.model.named_modules() if m is self.head}
        return named | heads

    def compute(self, batch: PairBatch, given: Mapping[str, Any], options: dict[str, Any]) -> tuple[Any, int]:
        """Return the model's output, and the number of attention calls."""
        source, layout, labels = batch.source, batch.layout, given.get("labels")
        assert source is not None
        calls = 0
        place_R = batch.place_R
        row_R = layout.row_BT.flatten().index_select(0, place_R)
        memory = PackedMemory.of(source, layout)

        def run(stack: nn.Module, packing: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            with packing() as state:
                output = call_module(stack, **bind_arguments(stack, args, kwargs))
            calls += state.num_calls
            return output

        def run_decoder(*args: Any, **kwargs: Any) -> Any:
            output = run(self.decoder, partial(packed, layout, shortens=False, memory=memory), *args, **kwargs)
            hidden = output.last_hidden_state
            hidden = layout.spread(hidden[0]) if labels is None else hidden.index_select(1, row_R)
            return replace(output, last_hidden_state=hidden)

        target = {}
        if labels is not None:
            target["labels"] = labels.flatten().index_select(0, place_R)[None]
        named = {n: given[n] for n in ("input_ids", "inputs_embeds", "attention_mask") if given.get(n) is not None}
        named |= {n: given[n] for n in ("decoder_attention_mask", "num_items_in_batch") if given.get(n) is not None}
        run_encoder = partial(run, self.encoder, partial(packed, source, shortens=False))
        with replace_forwards([(self.encoder, run_encoder), (self.decoder, run_decoder)]):
            output = call_module(self.model, **options | named | target, decoder_input_ids=batch.decoder_ids)
        changes: dict[str, Any] = {name: None for name in CACHE_NAMES if name in vars(output)}
        if (states := getattr(output, "encoder_last_hidden_state", None)) is not None:
            changes["encoder_last_hidden_state"] = source.spread(states[0])
        if labels is None:
            return replace(output, **changes), calls
        logits = output.logits[0].detach()

        def spread() -> Tensor:
            whole: Tensor = logits.new_zeros(batch.read_BT.numel(), logits.shape[-1])
            return whole.index_copy_(0, place_R, logits).view(*batch.read_BT.shape, -1)

        return defer_logits(replace(output, **changes, logits=None), spread), calls


def is_pair(model: nn.Module) -> bool:
    """Return whether a transformers model has an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def shift_labels(model: PreTrainedModel, labels_BT: Tensor) -> Tensor:
    """Return the decoder inputs that the model makes from labels."""
    config = model.config
    # transformers' collator for pairs calls this method. Families without it have a function in their model's module.
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        own_ids: Tensor = own(labels_BT)
        return own_ids
    shift = vars(sys.modules[type(model).__module__]).get("shift_tokens_right")
    if shift is None:
        name = type(model).__name__
        raise UnsupportedError(f"{name} cannot compute decoder inputs from labels: pass decoder_input_ids")
    ids: Tensor = shift(labels_BT, config.pad_token_id, config.decoder_start_token_id)
    return ids
