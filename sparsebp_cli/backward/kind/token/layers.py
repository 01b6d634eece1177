"""Runs the layers of a decoder on the rows of a plan instead of all positions.

The model's own forward runs with its layers replaced. The first layer receives the embeddings of all positions and
continues with the rows that carry gradient. When its attention passes keys and values to a cache, the cache runs the
dropped rows through the same layer without a graph. They attend to the carried rows, and the cache adds their keys and
values. So rotary or learned positions, masks and norms are the model's own.

Shape letters: B examples, T positions, K carried rows, M dropped rows, R trained rows, D width, N trained rows of all
examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import Decoder, Layer, dropout_rates, without_checkpointing
from sparsebp_cli.backward.decoder.kv_cache import FixedKV, RecordedKV, RecordKV, StandInKV, is_filled, skip_outputs
from sparsebp_cli.backward.decoder.window import with_window, without_window
from sparsebp_cli.backward.kind.token.row_plan import RowPlan
from sparsebp_cli.backward.kind.token.rows import AttentionArgs, AttentionView, RowNumbers
from sparsebp_cli.backward.observe.internals import run_checkpointed
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards, uncompiled
from sparsebp_cli.errors import UnsupportedError

KeysValues = tuple[Tensor, Tensor]  # each (B, H, T, D)

# A fused linear for queries, keys and values must multiply again for trained rows. Above this fraction of the carried
# rows this costs more than the output projection and the MLP save (3 products against at least 9).
MOST_FUSED = 0.75


class LayerStack:
    """The layers of one forward; ``implementation`` is the name of the attention function, ``shape`` is B and T."""

    def __init__(self, decoder: Decoder, implementation: str, plan: RowPlan, shape: tuple[int, int]) -> None:
        self._decoder, self._plan, self._length = decoder, plan, shape[1]
        self._views = Views.of(decoder, implementation, plan, shape)
        self._dropped: Tensor | None = None
        # Most models pass the same tensors to every layer, so they are restricted only once.
        self._arguments: dict[str, object] | None = None
        self._restricted: dict[int, dict[str, object]] = {}
        self._windowed: dict[tuple[int, int], Tensor] = {}  # by the mask's id and the first layer with an equal window

    @contextmanager
    def installed(self, *others: tuple[nn.Module, Callable[..., object]]) -> Iterator[None]:
        """Replace the model's layers, and the forwards of ``others``, while its own forward runs."""
        modules = [layer.module for layer in self._decoder.layers]
        # Older transformers checkpoint the layer's call instead of its forward; a rerun would miss the override.
        self._again = [getattr(module, "gradient_checkpointing", False) and module.training for module in modules]
        replacements = [(module, partial(self._run, number)) for number, module in enumerate(modules)]
        with replace_forwards([*replacements, *others]), without_checkpointing(*modules):
            yield

    def _run(self, number: int, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, None]:
        layer = self._decoder.layers[number]
        arguments = dict(zip(layer.argument_names, args, strict=False)) | kwargs
        hidden = arguments.pop(layer.argument_names[0])
        assert isinstance(hidden, Tensor)
        # Remove an empty cache only here, because the masks that the model builds depend on it.
        held = arguments.pop(layer.attention.cache, None)
        if number == 0:
            if is_filled(held, layer.core):
                raise UnsupportedError("token selection does not support past_key_values of earlier positions")
            self._views.attention_args.mask_dtype = _mask_dtype(layer.core, hidden)
            if self._plan.is_joined:
                hidden = hidden.flatten(0, 1)[None]
            if self._plan.dropped is not None:
                # See decision 15.
                self._dropped = self._plan.dropped.take(hidden.detach())
            hidden = self._plan.carried.take(hidden)
        mask = arguments.get("attention_mask")
        if layer.attention.window is not None and isinstance(mask, Tensor) and mask.dim() == 4:
            key = id(mask), self._decoder.equal_windows[number]
            if key not in self._windowed:
                self._windowed[key] = with_window(mask, layer.core, layer.attention)
            arguments["attention_mask"] = self._windowed[key]
        if not self._has_same(arguments):
            self._views.attention_args.check(arguments)
            self._arguments, self._restricted = arguments, {}
        run = LayerRun(self._views, layer, arguments, self._restricted, self._dropped)
        is_last = number == len(self._decoder.layers) - 1
        once = run.last if is_last else run.middle
        hidden = run.checkpointed(once, hidden) if self._again[number] else once(hidden)
        self._dropped = run.after
        output = self._spread(hidden) if is_last else hidden
        return (output, None) if run.returns_tuple else output

    def _has_same(self, arguments: dict[str, object]) -> bool:
        """Return whether a layer receives the same objects as the layer before it."""
        before = self._arguments
        if before is None or arguments.keys() != before.keys():
            return False
        return all(before[name] is value for name, value in arguments.items())

    def _spread(self, hidden_BRD: Tensor) -> Tensor:
        """Return the trained rows, zero-padded so that a model such as gpt2 can view them as (B, T, D)."""
        rows_ND = hidden_BRD.flatten(0, 1)
        if self._plan.place_N is not None:
            rows_ND = rows_ND.index_select(0, self._plan.place_N)
        missing = -len(rows_ND) % self._length
        return nn.functional.pad(rows_ND, (0, 0, 0, missing)).view(-1, self._length, rows_ND.shape[-1])


def _mask_dtype(core: nn.Module, hidden: Tensor) -> torch.dtype | None:
    """Return the dtype of an attention's queries, which a non-boolean mask must have; None if unknown."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    dtypes = {parameter.dtype for parameter in core.parameters()} | {hidden.dtype}
    return hidden.dtype if len(dtypes) == 1 else None


@dataclass(frozen=True, eq=False)
class Views:
    """The attention views of one forward, and the layer arguments for them."""

    attention_args: AttentionArgs
    carried: AttentionView  # rows that carry gradient
    dropped: AttentionView | None  # dropped rows, if any
    trained: RowNumbers  # rows that the head reads, as indices into the carried rows
    trained_positions: AttentionView  # the same rows, as positions
    is_prompt: bool  # dropped rows attend only to dropped ones
    narrows: bool  # the last layer computes queries only for trained rows

    @classmethod
    def of(cls, decoder: Decoder, implementation: str, plan: RowPlan, shape: tuple[int, int]) -> Views:
        """Return the views of a plan; ``shape`` is B and T."""
        before = () if plan.dropped is None else (plan.dropped,)
        carried = AttentionView.of(plan.carried, *before)
        dropped: AttentionView | None = None
        first = sum(rows.num_rows for rows in before)
        trained_positions = AttentionView(plan.trained_positions, carried.keys, first + plan.trained.position_BK)
        if plan.dropped is not None:
            own = AttentionView.of(plan.dropped)
            dropped = own if plan.is_prompt else AttentionView(plan.dropped, carried.keys, own.slot_BQ)
        attention_args = AttentionArgs(implementation, decoder.layers[0].attention, shape, is_joined=plan.is_joined)
        return cls(
            attention_args,
            carried,
            dropped,
            plan.trained,
            trained_positions,
            plan.is_prompt,
            narrows(decoder, plan),
        )


@dataclass
class LayerRun:
    """One layer of one forward; a checkpointed layer runs again in the backward."""

    views: Views
    layer: Layer
    arguments: dict[str, object]  # arguments of the layer, for all positions
    restricted: dict[int, dict[str, object]]  # arguments for a view, by its id; layers with equal arguments share this
    dropped: Tensor | None  # the dropped rows before the layer
    after: Tensor | None = None  # the dropped rows after the layer
    remembered: KeysValues | None = None  # keys and values of dropped rows, if the layer may run again
    returns_tuple: bool = False  # whether its forward returns a tuple that begins with the hidden states
    _remembers: bool = False

    def checkpointed(self, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Run :meth:`middle` or :meth:`last` under the layer's own activation checkpointing."""
        module = self.layer.module
        # With dropout, a rerun must not skip the dropped rows, which would shift later random numbers.
        self._remembers = not has_dropout(module)

        def again(hidden: Tensor) -> Tensor:
            with without_checkpointing(module):  # the second run comes after the model's forward has ended
                return run(hidden)

        return run_checkpointed(module, again, hidden)

    def middle(self, hidden_BKD: Tensor) -> Tensor:
        """Run the layer for all carried rows, together with the dropped ones; return the carried rows."""
        cache = None if self.dropped is None else ConcatKV(self._run_dropped)
        return self._call(hidden_BKD, self._restrict(self.views.carried), cache)

    def last(self, hidden_BKD: Tensor) -> Tensor:
        """Run the layer for the rows that the head reads, and return them, (B, R, D). Compute only keys and values of
        other rows.
        """
        trained = self.views.trained
        if not self.views.narrows:
            cache = None if self.dropped is None else ConcatKV(self._capture_dropped)
            output = self._call(hidden_BKD, self._restrict(self.views.carried), cache)
            return output if trained.num_rows == self.views.carried.queries.num_rows else trained.take(output)
        keys, values = self._capture(hidden_BKD, self.views.carried)
        if self.dropped is not None:
            keys, values = ConcatKV(self._capture_dropped).update(keys, values)
        skipped = () if self.layer.attention.fused else self.layer.attention.key_value
        with replace_forwards(skip_outputs(self.layer.core, skipped)):
            return self._call(
                trained.take(hidden_BKD), self._restrict(self.views.trained_positions), FixedKV(keys, values)
            )

    def _restrict(self, view: AttentionView) -> dict[str, object]:
        if id(view) not in self.restricted:  # views live as long as the stack
            self.restricted[id(view)] = self.views.attention_args.restrict(self.arguments, view)
        return self.restricted[id(view)]

    def _call(self, hidden: Tensor, arguments: dict[str, object], cache: object) -> Tensor:
        module, layer = self.layer.module, self.layer
        arguments = {**arguments, layer.argument_names[0]: hidden, layer.attention.cache: cache}
        shape = self.views.attention_args.shape
        with replace_forwards(self._expanding()), without_window(layer.core, layer.attention, prod(shape)):
            output = type(module).forward(module, **arguments)
        self.returns_tuple = isinstance(output, tuple)
        hidden_states: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden_states

    def _expanding(self) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """Return replacements for modules that expand cached values, so that dropped rows run without a graph."""
        if self.views.dropped is None:
            return []
        num_dropped = self.views.dropped.queries.num_rows
        modules = [getattr(self.layer.core, name) for name in self.layer.attention.expands]
        return [(module, partial(_expand, module, module.__dict__.get("forward"), num_dropped)) for module in modules]

    def _capture(self, hidden: Tensor, view: AttentionView) -> KeysValues:
        """Return keys and values of some rows, without running the rest of the layer."""
        with replace_forwards(skip_outputs(self.layer.core, self.layer.attention.query)):
            try:
                self._call(hidden, self._restrict(view), RecordKV())
            except RecordedKV as captured:
                return captured.keys, captured.values
        raise self._without_cache()

    def _without_cache(self) -> UnsupportedError:
        return UnsupportedError(
            f"token selection needs layers that write keys and values to past_key_values, which {self.layer.name} does "
            "not: use another policy for this model"
        )

    def _run_dropped(self, keys: Tensor, values: Tensor) -> KeysValues:
        """Run the layer for the dropped rows, which attend to the carried ones' keys and values; return their own."""
        if self.remembered is not None:
            return self.remembered
        assert self.dropped is not None
        assert self.views.dropped is not None
        carried = None if self.views.is_prompt else (keys.detach(), values.detach())
        cache = SharedKV(carried)
        with no_graph(self.dropped.device):
            self.after = self._call(self.dropped, self._restrict(self.views.dropped), cache)
        return self._remember(cache.own)

    def _capture_dropped(self, *_: Tensor) -> KeysValues:
        if self.remembered is not None:
            return self.remembered
        assert self.dropped is not None
        assert self.views.dropped is not None
        with no_graph(self.dropped.device):
            return self._remember(self._capture(self.dropped, self.views.dropped))

    def _remember(self, own: KeysValues | None) -> KeysValues:
        if own is None:
            raise self._without_cache()
        if self._remembers:
            self.remembered = own
        return own


def _expand(module: nn.Module, covered: Callable[[Tensor], Tensor] | None, num_dropped: int, x_B1SD: Tensor) -> Tensor:
    """Run a module on dropped rows, which come first, without a graph, and on the others."""
    run: Callable[[Tensor], Tensor] = partial(call_module, module) if covered is None else covered
    with no_graph(x_B1SD.device):
        dropped = run(x_B1SD[..., :num_dropped, :])
    return torch.cat([dropped, run(x_B1SD[..., num_dropped:, :])], -2)


@contextmanager
def no_graph(device: torch.device) -> Iterator[None]:
    """Run the block without a graph inside a forward with a graph.

    The context disables autocast's cache, which would return weights cast without a graph to code that needs one.
    """
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def has_dropout(module: nn.Module) -> bool:
    """Return whether a layer has dropout in training."""
    return any(rate > 0.0 for part in module.modules() for rate in dropout_rates(part))


def narrows(decoder: Decoder, plan: RowPlan) -> bool:
    """Return whether computing queries only for trained rows saves work in the last layer."""
    fused = decoder.layers[-1].attention.fused
    share = plan.trained.num_rows / plan.carried.num_rows
    return share <= MOST_FUSED if fused else share < 1.0


class ConcatKV(StandInKV):
    """A cache that prepends keys and values of other positions to the added ones.

    ``before`` returns them, each (B, H, T, D), given the added ones.
    """

    def __init__(self, before: Callable[[Tensor, Tensor], KeysValues]) -> None:
        self._before = partial(_uncompiled(), before)

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> KeysValues:
        """Return both together."""
        before_keys, before_values = self._before(keys, values)
        return torch.cat([before_keys, keys], 2), torch.cat([before_values, values], 2)


class SharedKV(StandInKV):
    """A cache that stores added keys and values as ``own``, and appends those of other positions, (B, H, T, D)."""

    def __init__(self, behind: KeysValues | None) -> None:
        self._behind = behind
        self.own: KeysValues | None = None

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> KeysValues:
        """Return both together."""
        self.own = keys, values
        if self._behind is None:
            return keys, values
        return torch.cat([keys, self._behind[0]], 2), torch.cat([values, self._behind[1]], 2)


def _apply(function: Callable[[Tensor, Tensor], KeysValues], keys: Tensor, values: Tensor) -> KeysValues:
    return function(keys, values)


@cache
def _uncompiled() -> Callable[[Callable[[Tensor, Tensor], KeysValues], Tensor, Tensor], KeysValues]:
    """Return a function that calls another outside of torch.compile, since a compiled attention may call a cache that
    runs a layer.
    """
    return uncompiled(_apply)
