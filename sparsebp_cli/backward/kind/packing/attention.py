"""Attention over packed rows, by the model's own attention function.

A transformers model finds its attention function and its mask function by the name ``_attn_implementation`` in its
configuration. While a model is attached, this is one of our names. Inside a packed forward our mask function returns a
:class:`PackedMask`, which reaches the layers like any mask, even through activation checkpointing. Our attention
function calls the model's own once for each group of segments. Outside of packed forwards both call the model's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import PACKED
from sparsebp_cli.backward.kind.packing.across import PackedMemory
from sparsebp_cli.backward.kind.packing.groups import Padding, SegmentGroup
from sparsebp_cli.backward.kind.packing.layout import PackedLayout
from sparsebp_cli.backward.kind.packing.padding import with_padding, without_padding
from sparsebp_cli.backward.kind.packing.varlen import VarlenPlan, attend, fits
from sparsebp_cli.backward.observe.internals import attention_name, has_attention, use_attention
from sparsebp_cli.errors import UnsupportedError, UsageError

IMPLEMENTATIONS = ("sdpa", "eager")
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
KeysValues = tuple[tuple[Tensor, Tensor], ...]  # keys and values of each attention call in a layer
LAYOUT = "packed_layout"  # argument of the model with the layout, for layers that mix neighbouring rows
KeysOfModules = Mapping[nn.Module, tuple[Tensor, Tensor]]


@dataclass
class PackedState:
    """One packed forward."""

    layout: PackedLayout
    shortens: bool = True  # whether the last layer runs only the rows that are read, if the layout names them
    num_calls: int = 0  # calls of attention
    memory: PackedMemory | None = None  # for a decoder: the rows of the encoder
    before: Sequence[KeysOfModules] = ()  # keys and values of rows that other forwards of the update computed
    keeps: dict[nn.Module, list[tuple[Tensor, Tensor]]] | None = None  # collects keys and values; None: do not collect

    def keep(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        """Store the keys and values of the rows of this forward."""
        if self.keeps is not None:
            self.keeps.setdefault(module, []).append((key, value))

    def with_before(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the rows of this forward, then of the rows in ``before``."""
        if not self.before:
            return key, value
        keys, values = zip(*(rows[module] for rows in self.before), strict=True)
        return torch.cat((key, *keys), 2), torch.cat((value, *values), 2)


_state: ContextVar[PackedState | None] = ContextVar("state", default=None)


_asks: ContextVar[bool] = ContextVar("asks", default=False)


@dataclass(frozen=True)
class AttentionRule:
    """Properties of the masks that a model makes if it receives none; None: unknown, since it made no mask."""

    looks_ahead: bool | None  # whether a position attends to later ones
    splits: bool | None  # whether no position attends to positions before a restart of the position numbers


class MaskMadeError(Exception):
    """Raised when a model makes a mask in a forward that :func:`ask_rule` started."""

    def __init__(self, allowed: MaskFunction) -> None:
        super().__init__()
        self.allowed = allowed


def ask_rule(stack: nn.Module, *, uses_cache: bool) -> AttentionRule:
    """Return the attention rule of a switched base model, from a forward on two texts of two positions each."""
    token = _asks.set(True)
    try:
        weight: Tensor = stack.get_input_embeddings().weight  # type: ignore[operator]
        inputs = torch.zeros(1, 4, weight.shape[1], dtype=weight.dtype, device=weight.device)
        position = torch.tensor([[0, 1, 0, 1]], device=weight.device)
        # Embeddings may have dropout, so fork the generators. Run no hooks: hooks of a sharded model wait for others.
        with torch.no_grad(), torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            type(stack).forward(stack, inputs_embeds=inputs, position_ids=position, use_cache=uses_cache)
    except MaskMadeError as made:
        zero, one, two = (torch.tensor(place, device=weight.device) for place in range(3))
        ahead, over = made.allowed(zero, zero, zero, one), made.allowed(zero, zero, two, one)
        return AttentionRule(bool(ahead), not bool(over))
    except Exception:  # a model may raise anything for so few inputs
        return AttentionRule(None, None)
    finally:
        _asks.reset(token)
    return AttentionRule(None, None)


class LooksAheadError(UnsupportedError):
    """Positions attend to later ones, so that none can be skipped or shared."""


class ReachedAttention(Exception):  # noqa: N818 - no error: it ends the first of two runs of the last layer
    """Raised at the last attention call of a layer, when its keys and values are complete."""

    keys: KeysValues

    def __init__(self, keys: KeysValues) -> None:
        super().__init__()
        self.keys = keys


class ReadsMaskError(UnsupportedError, AttributeError):
    """A layer reads the attention mask itself; also an AttributeError, so that ``hasattr`` is False."""


@dataclass
class PackedMask:
    """The mask of one packed forward: which keys each query of a group attends to.

    ``allowed`` is a rule of the model on places, such as a sliding window; it includes causality.
    """

    state: PackedState
    allowed: MaskFunction
    groups: tuple[SegmentGroup, ...]
    ends: int = 0  # number of the attention call at which ReachedAttention ends the layer; 0: it runs to its end
    kept: KeysValues = ()  # keys and values of all rows, if the layer runs only some rows, or before it ends
    memory: PackedMemory | None = None  # None: rows attend to each other
    _masks: dict[tuple[int, str, torch.dtype | None], Tensor | None] = field(default_factory=dict)
    _pairs: dict[int, Tensor] = field(default_factory=dict)
    _order: list[bool | None] = field(default_factory=list)

    def __getattr__(self, name: str) -> NoReturn:
        raise ReadsMaskError(f"lossless does not support this model, which reads {name} of the attention mask")

    def __getitem__(self, _: object) -> NoReturn:
        raise ReadsMaskError("lossless does not support this model, which slices the attention mask")

    @property
    def layout(self) -> PackedLayout:
        """The rows."""
        return self.state.layout

    def ending_at_attention(self, num_calls: int) -> PackedMask:
        """Return the mask of a run that ends at the last of ``num_calls`` attention calls."""
        return PackedMask(self.state, self.allowed, self.groups, ends=num_calls)

    def with_keys(self, keys: KeysValues) -> PackedMask:
        """Return the mask of a run on the rows that are read. They attend to these keys, which all rows have."""
        assert self.layout.read is not None
        return PackedMask(self.state, self.allowed, self.layout.read.groups, kept=keys)

    def end(self, key: Tensor, value: Tensor) -> None:
        """Store keys and values of all rows, and end the layer if these are the last ones."""
        self.kept = (*self.kept, (key, value))
        if len(self.kept) == self.ends:
            raise ReachedAttention(self.kept)

    def of_group(self, number: int, implementation: str, query: Tensor) -> Tensor | None:
        """Return the mask (G or 1, 1, L, K) of a group in the form of the implementation, on the device and in the
        dtype of ``query``. None: plain causal attention, or no mask."""
        dtype = query.dtype
        key = (number, implementation, dtype if implementation == "eager" else None)
        if key not in self._masks:
            rule = self._make(self.groups[number], implementation, query.device)
            if rule is not None:
                rule = rule.to(query.device, non_blocking=True)[:, None]
            if rule is not None and implementation == "eager":
                # Like transformers' eager masks. With -inf, a row without any allowed key would have no weights.
                rule = torch.zeros_like(rule, dtype=dtype).masked_fill(~rule, torch.finfo(dtype).min)
            self._masks[key] = rule
        return self._masks[key]

    def of_memory(self, number: int, implementation: str, query: Tensor) -> Tensor | None:
        """Return the mask (G, 1, 1, K) of a group that attends to an encoder; None: no mask."""
        assert self.memory is not None
        allowed = self.memory.groups[number].is_key_GK
        if allowed is None or implementation == "sdpa":
            return None if allowed is None else allowed[:, None, None]
        dtype = query.dtype
        return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[:, None, None]

    def bias_of_group(self, number: int, bias_HTT: Tensor) -> Tensor:
        """Return the bias (G or 1, H, L, K) of a group, by the places of its queries and keys."""
        group, size = self.groups[number], bias_HTT.shape[-1]
        if number not in self._pairs:
            pairs_GLK = group.query_GL[:, :, None] * size + group.key_GK[:, None, :]
            if group.num_segments > 1 and bool((pairs_GLK == pairs_GLK[:1]).all()):
                pairs_GLK = pairs_GLK[:1]
            self._pairs[number] = pairs_GLK.to(bias_HTT.device)
        pairs_GLK = self._pairs[number]
        chosen = bias_HTT.flatten(1).index_select(1, pairs_GLK.flatten())
        return chosen.view(len(bias_HTT), *pairs_GLK.shape).transpose(0, 1)

    def is_in_order(self, device: torch.device) -> bool | None:
        """Return True if each query attends to its own key and all earlier ones, False if each attends to all keys,
        else None."""
        if not self._order:
            is_causal = is_full = True
            for group in self.groups:
                rule, order, exists = self._rule(group, device)
                is_causal &= bool((rule == order & exists).all())
                is_full &= bool((rule == exists).all())
            self._order.append(True if is_causal else False if is_full else None)
        return self._order[0]

    def _make(self, group: SegmentGroup, implementation: str, device: torch.device) -> Tensor | None:
        """Return which keys each query attends to (G or 1, L, K), on the host; None: as plain causal attention does, or
        to all."""
        rule, order, _ = self._rule(group, device)
        if self.layout.is_causal and bool((rule & ~order).any()):
            raise LooksAheadError("lossless needs a causal model, but positions attend to later ones")
        if implementation == "sdpa" and (bool(rule.all()) or _is_triangle(rule, group.padding)):
            return None
        return rule

    def _rule(self, group: SegmentGroup, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return which keys each query attends to (G or 1, L, K), which are its own or earlier, and which exist, on the
        host."""
        queries, keys, padding = group.query_GL, group.key_GK, group.padding
        number = 1 if group.is_uniform else group.num_segments
        queries, keys = queries[:number], keys[:number]
        size, place = (queries.shape[1], keys.shape[1]), torch.arange(keys.shape[1], device=keys.device)
        # Apply the model's rule to places, which count the plain step's columns; position numbers may jump or repeat.
        rule = self._ask(queries[:, :, None], keys[:, None, :], device).expand(queries.shape[0], *size)
        last = place[size[1] - size[0] :] if group.order_GL is None else group.order_GL[:number]
        order = place <= last[..., None]
        if not group.attends:
            rule = torch.zeros_like(rule)
        exists = torch.ones_like(place, dtype=torch.bool) if padding is None else padding.is_key_GK[:, None]
        return rule & exists, order, exists

    def _ask(self, query: Tensor, key: Tensor, device: torch.device) -> Tensor:
        """Return the model's rule on places of queries and keys."""
        zero = torch.zeros((), dtype=torch.long, device=key.device)
        try:
            return self.allowed(zero, zero, query, key).cpu()
        except RuntimeError:  # it reads a tensor of the model
            zero, query, key = (part.to(device) for part in (zero, query, key))
            return self.allowed(zero, zero, query, key).cpu()


def _is_triangle(rule_GLK: Tensor, padding: Padding | None) -> bool:
    """Return whether each query i attends exactly to the keys 0 to i. Padded queries may attend to others."""
    num_queries, num_keys = rule_GLK.shape[1:]
    if num_queries != num_keys:
        return False
    is_triangle = (rule_GLK == torch.ones_like(rule_GLK[0]).tril()).all(2)
    return bool((is_triangle if padding is None else is_triangle | ~padding.is_query_GL).all())


@dataclass(frozen=True)
class PackedBias:
    """A position bias that attention adds to its scores, (H, T, T) for the plain batch; None: zeros."""

    values_HTT: Tensor | None


def find_mask(args: tuple[object, ...], kwargs: Mapping[str, object]) -> PackedMask | None:
    """Return the packed mask among the arguments of a module, if any."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, PackedMask)), None)


@contextmanager
def packed(
    layout: PackedLayout,
    *,
    shortens: bool,
    memory: PackedMemory | None = None,
    before: Sequence[KeysOfModules] = (),
    keeps: dict[nn.Module, list[tuple[Tensor, Tensor]]] | None = None,
) -> Iterator[PackedState]:
    """Let switched models build masks for these rows inside the block."""
    state = PackedState(layout, shortens, memory=memory, before=before, keeps=keeps)
    token = _state.set(state)
    try:
        yield state
    finally:
        _state.reset(token)
        state.keeps = None  # a recomputed forward under checkpointing has the same keys


def layout_now() -> PackedLayout | None:
    """Return the layout of the running packed forward; None outside of one."""
    state = _state.get()
    return None if state is None else state.layout


class Switch:
    """The configurations of one model, switched to our attention and mask functions."""

    def __init__(self, model: nn.Module) -> None:
        configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        self._configs = [config for config in configs.values() if has_attention(config)]
        self._own = [attention_name(config) for config in self._configs]
        for implementation in IMPLEMENTATIONS:
            _register(implementation)

    def refuse_unknown(self) -> None:
        """Raise :class:`UnsupportedError` for an attention implementation that cannot run on parts of the rows."""
        for own in self._own:
            if own.startswith(PACKED):
                raise UsageError(
                    "the model shares its configuration with an attached model: give each model a copy of its own "
                    "(copy.deepcopy(config)), or call detach() of the engine of that model"
                )
            if own not in IMPLEMENTATIONS:
                allowed = f"the attention implementations {' and '.join(IMPLEMENTATIONS)}"
                raise UnsupportedError(f"lossless supports the attention {allowed}, got {own!r}")

    @property
    def zeroes_padding(self) -> bool:
        """Whether attention returns zeros for a row without any allowed key. Eager attention averages all rows."""
        return all(own == "sdpa" for own in self._own)

    def on(self) -> None:
        """Switch the model to our functions."""
        for config, own in zip(self._configs, self._own, strict=True):
            use_attention(config, f"{PACKED}{own}")

    @property
    def is_changed(self) -> bool:
        """Whether the script has set another attention implementation since :meth:`on`."""
        return any(not attention_name(config).startswith(PACKED) for config in self._configs)

    def off(self) -> None:
        """Restore the model's own functions, or keep those that the script has set since."""
        for config, own in zip(self._configs, self._own, strict=True):
            if attention_name(config).startswith(PACKED):
                use_attention(config, own)


def _register(implementation: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function

    own_mask = cast("Mapping[str, Callable[..., object]]", ALL_MASK_ATTENTION_FUNCTIONS)[implementation]

    def mask(*args: object, **kwargs: object) -> object:
        state = _state.get()
        if _asks.get():
            raise MaskMadeError(cast("MaskFunction", kwargs["mask_function"]))
        if state is None:
            return own_mask(*args, **kwargs)
        # The only mask of a decoder that is not causal is the mask over the encoder's rows.
        memory = state.memory if kwargs["mask_function"] is bidirectional_mask_function else None
        return PackedMask(state, cast("MaskFunction", kwargs["mask_function"]), state.layout.groups, memory=memory)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        function = _own_attention(module, implementation)
        kwargs.pop(LAYOUT, None)
        if isinstance(attention_mask, PackedMask):
            return _attend(function, implementation, module, (query, key, value), attention_mask, **kwargs)
        return function(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(f"{PACKED}{implementation}", attention)
    AttentionMaskInterface.register(f"{PACKED}{implementation}", mask)


def _own_attention(module: nn.Module, implementation: str) -> AttentionFunction:
    if implementation == "eager":  # each model defines its own, in the module of its attention class
        return cast("AttentionFunction", vars(sys.modules[type(module).__module__])["eager_attention_forward"])
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return cast("Mapping[str, AttentionFunction]", ALL_ATTENTION_FUNCTIONS)[implementation]


def _attend(
    function: AttentionFunction,
    implementation: str,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: PackedMask,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Call an attention function once a group. Query, key and value are (1, H, N, D), the result is (1, N, H, D)."""
    query, key, value = tensors
    read, num_rows = mask.layout.read, mask.layout.num_rows
    if mask.kept and not mask.ends and read is not None:
        num_rows = len(read.row_M)
    num_keys, bias = num_rows if mask.memory is None else mask.memory.num_rows, kwargs.pop("position_bias", None)
    if key.shape[2] != num_keys or query.shape[2] != num_rows or not (bias is None or isinstance(bias, PackedBias)):
        raise UnsupportedError(f"lossless does not support {type(module).__name__}: needs a key for each position")
    if mask.memory is None and (mask.ends or not mask.kept):
        mask.state.keep(module, key, value)
    if mask.ends:
        mask.end(key, value)
        return value.new_zeros(1, num_rows, query.shape[1], value.shape[3]), None
    mask.state.num_calls += 1
    kept = mask.kept[:1]
    mask.kept = (*mask.kept[1:], *kept)  # the next call uses the next entry
    if mask.memory is None:
        key, value = mask.state.with_before(module, *(kept[0] if kept else (key, value)))
    calls = mask.layout.calls if read is None or not kept else read.calls
    is_usual = implementation == "sdpa" and mask.memory is None and bias is None
    if calls is not None and is_usual and fits(query, key, value, kwargs):
        merged = _attend_all(query, key, value, calls, mask, kwargs)
        if merged is not None:
            return merged, None
    outputs = []
    for number, group in enumerate(mask.groups):
        queries = _split(query[:, :, group.start : group.end], group)
        keys, values = (_keys(whole, number, mask, is_kept=bool(kept)) for whole in (key, value))
        find = mask.of_group if mask.memory is None else mask.of_memory
        allowed = find(number, implementation, query)
        if bias is not None and bias.values_HTT is not None:
            kwargs["position_bias"] = mask.bias_of_group(number, bias.values_HTT)
        output, _ = function(module, queries, keys, values, allowed, **kwargs)
        output = output.reshape(-1, *output.shape[2:])
        if group.padding is not None:
            output = without_padding(output, group.padding)
        outputs.append(output[None])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), None


def _attend_all(
    query: Tensor, key: Tensor, value: Tensor, calls: VarlenPlan, mask: PackedMask, options: Mapping[str, object]
) -> Tensor | None:
    """Return the result for all groups by variable-length attention; None where the mask or the kernel rules it out."""
    is_causal = mask.is_in_order(query.device)
    if is_causal is None or (mask.layout.is_causal and not is_causal):
        return None
    return attend(query, key, value, calls, options, is_causal=is_causal)


def _keys(rows_1HND: Tensor, number: int, mask: PackedMask, *, is_kept: bool) -> Tensor:
    """Return the keys or values of a group (G, H, K, D)."""
    group = mask.groups[number]
    if mask.memory is not None:
        return _remembered(rows_1HND, mask.memory.groups[number].row_GK, group.num_segments)
    if is_kept:
        return _before(rows_1HND, group)
    own = _split(rows_1HND[:, :, group.start : group.end], group)
    return torch.cat((_before(rows_1HND, group), own), 2) if group.ancestor_GA.shape[1] else own


def _split(rows_1HND: Tensor, group: SegmentGroup) -> Tensor:
    """Return the rows of a group as (G, H, L, D)."""
    rows_RHD = rows_1HND[0].transpose(0, 1)
    if group.padding is not None:
        rows_RHD = with_padding(rows_RHD, group.padding)
    return rows_RHD.reshape(-1, group.length, *rows_RHD.shape[1:]).transpose(1, 2)


def _before(rows_1HND: Tensor, group: SegmentGroup) -> Tensor:
    """Return the rows before each segment as (G, H, A, D)."""
    if group.has_one_parent or group.num_segments == 1:
        return rows_1HND.index_select(2, group.ancestor_GA[0]).expand(group.num_segments, -1, -1, -1)
    _, num_heads, _, size = rows_1HND.shape
    rows = rows_1HND[0].index_select(1, group.ancestor_GA.flatten())
    return rows.reshape(num_heads, *group.ancestor_GA.shape, size).transpose(0, 1)


def _remembered(rows_1HMD: Tensor, row_GK: Tensor, num_segments: int) -> Tensor:
    """Return the encoder's rows to which each segment attends, as (G, H, K, D)."""
    _, num_heads, _, size = rows_1HMD.shape
    rows = rows_1HMD[0].index_select(1, row_GK.flatten()).view(num_heads, *row_GK.shape, size)
    return rows.transpose(0, 1).expand(num_segments, -1, -1, -1)
