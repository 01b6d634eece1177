"""Token selection inside a graph of ``torch.compile``, in mode ``detach``.

One operator chooses the positions when the graph runs. The numbers of carried and dropped positions are dynamic sizes
for the compiler, so one graph serves every batch. As in eager mode, carried rows run with an autograd graph and dropped
rows without one. In contrast to eager mode, examples are padded to the longest, the attention mask is explicit, and
the head computes all carried rows. In the last layer the compiler keeps only keys and values of dropped rows.

Shape letters: B examples, T positions, K carried rows, M dropped rows, Q queries, S keys, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.loss_weight import IGNORED
from sparsebp_cli.backward.decoder.kv_cache import StandInKV, is_filled
from sparsebp_cli.backward.kind.token.loss import loss_function_of
from sparsebp_cli.backward.kind.token.row_plan import PositionMask, find_needed
from sparsebp_cli.backward.kind.token.rows import AttentionArgs
from sparsebp_cli.backward.kind.transfer import upload
from sparsebp_cli.backward.linear.compiled import UNSAFE, register, require_site
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, call_module
from sparsebp_cli.errors import UnsupportedError

if TYPE_CHECKING:
    from sparsebp_cli.backward.decoder.decoder import Decoder, Layer
    from sparsebp_cli.backward.kind.model_output import ModelOutput


@torch.library.custom_op(
    "sparsebp::choose_positions",
    mutates_args=(),
    schema="(Tensor labels, Tensor[] others, SymInt site, str names) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor)",
    tags=UNSAFE,
)
def _choose(labels: Tensor, others: list[Tensor], site: int, names: str) -> tuple[Tensor, ...]:
    found: Any = require_site(site)
    known = dict(zip(names.split(",") if names else (), others, strict=True))
    chosen: tuple[Tensor, ...] = found.choose_rows({"labels": labels} | known)
    return chosen


@_choose.register_fake
def _choose_shapes(labels: Tensor, *_: object) -> tuple[Tensor, ...]:
    context = torch.library.get_ctx()
    num_examples = labels.shape[0]
    made = []
    for _number in range(2):
        # Compilers treat sizes 0 and 1 as constants, so `_list` returns at least two rows.
        num_rows = context.new_dynamic_size(min=2)
        made.append(labels.new_empty(num_examples, num_rows, dtype=torch.long))
        made.append(labels.new_empty(num_examples, num_rows, dtype=torch.bool))
    return *made, torch.empty_like(made[0]), labels.new_empty(2, dtype=torch.float64)


def list_rows(marks: PositionMask, labels_BT: Tensor) -> tuple[Tensor, ...]:
    """Return positions, masks and labels as ``TokenExtension.choose_rows`` does."""
    trained, needed = find_needed(marks)
    carried = needed & (marks.carries | trained)
    position_BK, valid_BK = _list(carried)
    dropped = _list(needed & ~carried)
    is_trained_BK = trained.gather(1, position_BK) & valid_BK
    num_targets, num_trained = int(marks.target.sum()), int(marks.trained.sum())
    share = num_trained / num_targets if num_trained else 1.0
    numbers = torch.tensor([share, float(num_trained > 0)], dtype=torch.float64).to(labels_BT.device)
    *moved, is_trained_BK = upload(labels_BT.device, position_BK, valid_BK, *dropped, is_trained_BK)
    label_BK = labels_BT.roll(-1, 1).gather(1, moved[0])
    if num_trained == 0:  # the placeholder's label may be ignored, and the mean over no label is NaN
        label_BK = label_BK.clamp(min=0)
    return *moved, label_BK.masked_fill(~is_trained_BK, IGNORED), numbers


def _list(member_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the members of each example in order, and which of them are not padding; at least two rows."""
    num_rows = max(2, int(member_BT.sum(1).max()))
    position_BK = (~member_BT).to(torch.uint8).argsort(dim=1, stable=True)[:, :num_rows].contiguous()
    return position_BK, member_BT.gather(1, position_BK)


@dataclass
class _Rows:
    """Some positions of every example, and which of them are not padding."""

    position_BQ: Tensor
    valid_BQ: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Select the rows of a tensor (B, T, D) or (1, T, D)."""
        index = self.position_BQ[:, :, None].expand(-1, -1, x.shape[-1])
        return x.expand(len(self.position_BQ), -1, -1).gather(1, index)


@dataclass
class _Run:
    """One forward that torch.compile traces."""

    decoder: Decoder
    carried: _Rows
    dropped: _Rows
    length: int  # T
    implementation: str
    hidden: Tensor | None = None  # hidden states of the dropped rows before the running layer

    def run(self, number: int, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a layer for carried and dropped rows; return the carried rows, padded to T rows after the last layer."""
        layer = self.decoder.layers[number]
        arguments = dict(zip(layer.argument_names, args, strict=False)) | kwargs
        hidden = arguments.pop(layer.argument_names[0])
        held = arguments.pop(layer.attention.cache, None)
        assert isinstance(hidden, Tensor)
        if number == 0:
            if is_filled(held, layer.core):
                raise UnsupportedError("token selection does not support past_key_values of earlier positions")
            self.hidden = self.dropped.take(hidden.detach())
            hidden = self.carried.take(hidden)
        AttentionArgs(self.implementation, layer.attention, (len(self.carried.position_BQ), self.length)).check(
            arguments
        )
        cache = _Joined(self, layer, arguments)
        output = _call(layer, hidden, self._restrict(arguments, self.carried, _count(self.dropped)), cache)
        self.hidden = cache.after
        result = output[0] if isinstance(output, tuple) else output
        if number == len(self.decoder.layers) - 1:
            result = nn.functional.pad(result, (0, 0, 0, self.length - result.shape[1]))
        return (result, None) if isinstance(output, tuple) else result

    def run_dropped(self, layer: Layer, arguments: dict[str, object], cache: object) -> Tensor:
        """Run a layer for the dropped rows, without an autograd graph."""
        assert self.hidden is not None
        output = _call(layer, self.hidden, self._restrict(arguments, self.dropped, 0), cache)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def _restrict(self, arguments: Mapping[str, object], rows: _Rows, first: int) -> dict[str, object]:
        mask, parts, ids = (arguments.get(name) for name in ("attention_mask", "position_embeddings", "position_ids"))
        changed: dict[str, object] = {"attention_mask": self._mask(cast("Tensor | None", mask), rows, first)}
        if isinstance(parts, tuple):
            changed["position_embeddings"] = tuple(rows.take(part) for part in parts)
        if isinstance(ids, Tensor):
            changed["position_ids"] = ids.expand(len(rows.position_BQ), -1).gather(1, rows.position_BQ)
        return {**arguments, **changed}

    def _mask(self, mask: Tensor | None, rows: _Rows, first: int) -> Tensor:
        """Return to which keys rows attend, (B, 1, Q, S); ``first`` is the number of keys before the rows' own."""
        key_BS = torch.cat([self.dropped.position_BQ, self.carried.position_BQ], 1)
        valid_B11S = torch.cat([self.dropped.valid_BQ, self.carried.valid_BQ], 1)[:, None, None]
        query_BQ, fills = rows.position_BQ, ~rows.valid_BQ[:, None, :, None]
        slot_Q = torch.arange(query_BQ.shape[1], device=key_BS.device) + first
        own_QS = slot_Q[:, None] == torch.arange(key_BS.shape[1], device=key_BS.device)
        if mask is None:
            allowed = (query_BQ[:, :, None] >= key_BS[:, None])[:, None]
        else:
            of_query = query_BQ[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
            allowed = mask.expand(len(query_BQ), -1, -1, -1).gather(2, of_query)
            of_key = key_BS[:, None, None].expand(-1, mask.shape[1], query_BQ.shape[1], -1)
            allowed = allowed.gather(3, of_key)
        # Let padding rows attend to themselves, since a row that attends to nothing yields NaN.
        if allowed.dtype == torch.bool:
            return (allowed & valid_B11S) | (own_QS & fills)
        return allowed.masked_fill(~valid_B11S, -torch.inf).masked_fill(own_QS & fills, 0.0)


def _count(rows: _Rows) -> int:
    return rows.position_BQ.shape[1]


def _call(layer: Layer, hidden: Tensor, arguments: dict[str, object], cache: object) -> Any:
    arguments = {**arguments, layer.argument_names[0]: hidden, layer.attention.cache: cache}
    return call_module(layer.module, **arguments)


class _Joined(StandInKV):
    """A cache that prepends the keys and values of dropped rows, for which it runs the layer."""

    def __init__(self, run: _Run, layer: Layer, arguments: dict[str, object]) -> None:
        self._run, self._layer, self._arguments = run, layer, arguments
        self.after: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return both together."""
        behind = _Behind(keys.detach(), values.detach())
        with torch.no_grad():
            self.after = self._run.run_dropped(self._layer, self._arguments, behind)
        own_keys, own_values = behind.own
        return torch.cat([own_keys, keys], 2), torch.cat([own_values, values], 2)


class _Behind(StandInKV):
    """A cache that stores added keys and values, and appends others to them."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        self.own: tuple[Tensor, Tensor] = (keys, values)

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return both together."""
        self.own = (keys, values)
        return torch.cat([keys, self._keys], 2), torch.cat([values, self._values], 2)


class GraphTokens:
    """The forward of a causal language model in graphs."""

    fits: bool

    def __init__(self, decoder: Decoder, source: object, patches: ForwardPatches) -> None:
        self._decoder, self._number, self._implementation = decoder, register(source), decoder.implementation
        self.current: _Run | None = None
        # If attention has further arguments about positions besides masks and rotations, the forward runs eagerly.
        layouts = {layer.attention for layer in decoder.layers}
        self.fits = not any(layout.bias or layout.window or layout.excludes or layout.expands for layout in layouts)
        for number, layer in enumerate(decoder.layers):
            patches.install(layer.module, _LayerOverride(self, number, layer.module))
        patches.install(decoder.head, _HeadOverride(self, decoder.head))

    def run(self, known: Mapping[str, object], own: dict[str, object]) -> ModelOutput:
        """Run the model while torch.compile traces. ``known`` are all arguments by name, ``own`` the arguments of the
        model's own forward.
        """
        labels, num_items = known["labels"], own.pop("num_items_in_batch", None)
        own["labels"] = None
        assert num_items is None or isinstance(num_items, Tensor | int | float)
        assert isinstance(labels, Tensor)
        names: list[str] = []
        others: list[Tensor] = []
        for name, value in known.items():
            if isinstance(value, Tensor) and name != "labels":
                names.append(name)
                others.append(value)
        carried, is_carried, dropped, is_dropped, label_BK, numbers = _choose(
            labels, others, self._number, ",".join(names)
        )
        model = self._decoder.model
        length = labels.shape[1]
        torch._check(carried.shape[1] <= length)  # noqa: SLF001 - documented for sizes that depend on data
        torch._check(dropped.shape[1] <= length)  # noqa: SLF001
        self.current = _Run(
            self._decoder, _Rows(carried, is_carried), _Rows(dropped, is_dropped), length, self._implementation
        )
        output = call_module(model, **own)
        self.current = None
        logits = output.logits
        items = None if num_items is None else num_items * numbers[0].to(torch.float32)
        function: Callable[..., Tensor] = loss_function_of(model)
        loss = function(logits, label_BK, logits.shape[-1], num_items_in_batch=items, shift_labels=label_BK)
        changed: ModelOutput = type(output)(loss=loss * numbers[1].to(loss.dtype))
        return changed


@final
class _LayerOverride(ForwardOverride):
    """The ``forward`` of a layer. It changes the layer only in graphs."""

    def __init__(self, graph: GraphTokens, number: int, module: nn.Module) -> None:
        self.graph, self.number, self.module = graph, number, module

    def __call__(self, *args: object, **kwargs: object) -> object:
        run = self.graph.current
        if run is None or self.is_removed:
            return self.run_covered(self.module, *args, **kwargs)
        return run.run(self.number, args, kwargs)


@final
class _HeadOverride(ForwardOverride):
    """The ``forward`` of the head. In graphs it runs only on the carried rows."""

    def __init__(self, graph: GraphTokens, module: nn.Module) -> None:
        self.graph, self.module = graph, module

    def __call__(self, x: Tensor) -> object:
        run = self.graph.current
        if run is not None and not self.is_removed:
            x = x[:, : run.carried.position_BQ.shape[1]]
        return self.run_covered(self.module, x)
