"""Some positions of every example as rows of one tensor, and the arguments of a layer restricted to them.

Shape letters: B examples, T positions, K rows of an example, H heads, Q queries, S keys, D anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeVar

import torch
from torch import Tensor

from sparsebp_cli.backward.decoder.layout import AttentionLayout
from sparsebp_cli.errors import UnsupportedError

_KNOWN = {"attention_mask", "position_embeddings", "position_ids", "cache_position"}
_SWITCHES = ("output_attentions", "output_hidden_states")
_Value = TypeVar("_Value")


@dataclass(frozen=True, eq=False)
class RowNumbers:
    """Positions of every example, ascending. Examples with fewer rows are padded with arbitrary positions."""

    position_BK: Tensor
    valid_BK: Tensor  # False for padding rows, which no row may attend to
    start: int | None  # set if the rows are positions start to start + K of every example
    shared: bool  # all examples have the same positions
    is_full: bool  # there are no padding rows
    num_rows: int  # K

    @classmethod
    def of(cls, member_BT: Tensor, *, valid_BT: Tensor | None = None) -> Self | None:
        """Return the rows of the positions in ``member_BT``, a mask on the CPU; None if it is empty.

        Rows attend only to members in ``valid_BT``; None: to all members.
        """
        count_B1 = member_BT.sum(1, keepdim=True)
        most = int(count_B1.max())
        if most == 0:
            return None
        columns = member_BT.any(0).nonzero().flatten()
        first, stop = int(columns[0]), int(columns[-1]) + 1
        start = first if stop - first == most else None
        if start is not None:
            position_BK = torch.arange(first, stop).expand(len(member_BT), -1)
        else:
            # A stable sort of 0 and 1 lists members first, in order.
            position_BK = (~member_BT).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        is_valid_BT = member_BT if valid_BT is None else member_BT & valid_BT
        valid_BK = is_valid_BT.gather(1, position_BK)
        shared = start is not None or bool((position_BK == position_BK[:1]).all())
        return cls(position_BK, valid_BK, start, shared, bool(valid_BK.all()), most)

    def among(self, rows: Self) -> RowNumbers:
        """Return the positions of some of these rows; ``rows`` are indices into them."""
        start = None if self.start is None or rows.start is None else self.start + rows.start
        position_BK = self.position_BK.gather(1, rows.position_BK)
        return RowNumbers(position_BK, rows.valid_BK, start, self.shared and rows.shared, rows.is_full, rows.num_rows)

    def take(self, x: Tensor) -> Tensor:
        """Select the rows of a tensor (B, T, D), or (1, T, D) if all examples share it.

        Returns (B, K, D), or (1, K, D) if all examples still share the result.
        """
        if self.start is not None:
            return x.narrow(1, self.start, self.num_rows)
        if self.shared:
            return x.index_select(1, self.position_BK[0])
        num_examples, num_rows = len(self.position_BK), self.num_rows
        rest = x.shape[2:]
        if len(x) == 1:
            return x[0].index_select(0, self.position_BK.flatten()).view(num_examples, num_rows, *rest)
        offset_B1 = torch.arange(num_examples, device=x.device)[:, None] * x.shape[1]
        flat = x.reshape(-1, *rest).index_select(0, (self.position_BK + offset_B1).flatten())
        return flat.view(num_examples, num_rows, *rest)


@dataclass(frozen=True, eq=False)
class AttentionView:
    """The query rows of an attention, and the key rows to which they attend."""

    queries: RowNumbers
    keys: tuple[RowNumbers, ...]  # groups of positions, concatenated
    slot_BQ: Tensor  # index of each query's own key among the keys

    @property
    def is_own(self) -> bool:
        """Whether the keys are exactly the queries' own in the same order, so that plain causal attention applies."""
        return len(self.keys) == 1 and self.keys[0] is self.queries

    @classmethod
    def of(cls, queries: RowNumbers, *before: RowNumbers) -> AttentionView:
        """Return queries that attend to the rows ``before`` and to their own."""
        first = sum(rows.num_rows for rows in before)
        slot_Q = first + torch.arange(queries.num_rows, device=queries.position_BK.device)
        return cls(queries, (*before, queries), slot_Q.expand_as(queries.position_BK))


@dataclass
class AttentionArgs:
    """Restricts the arguments of every layer. Arguments that layers share are restricted once."""

    implementation: str  # transformers' name of the attention function: eager or sdpa
    layout: AttentionLayout
    shape: tuple[int, int]  # B and T
    is_joined: bool = False  # the examples are concatenated into one
    # Boolean masks are converted to this dtype once, so that no layer converts and stores its own; None: unchanged.
    mask_dtype: torch.dtype | None = None
    # Results by the ids of value and view. The entry holds both, so that no other object gets their ids meanwhile.
    _known: dict[tuple[int, int], tuple[object, AttentionView, object]] = field(default_factory=dict)

    def restrict(self, arguments: Mapping[str, object], view: AttentionView) -> dict[str, object]:
        """Return a layer's named arguments, without hidden states and cache, for the queries of a view.

        Call :meth:`check` on the arguments first.
        """
        mask, parts, ids = (arguments.get(name) for name in ("attention_mask", "position_embeddings", "position_ids"))
        assert mask is None or isinstance(mask, Tensor)
        changed: dict[str, object] = {"attention_mask": self._once(self._restrict_mask, mask, view)}
        if isinstance(parts, tuple):
            changed["position_embeddings"] = self._once(self._restrict_parts, parts, view)
        elif isinstance(parts, Tensor):
            changed["position_embeddings"] = self._once(self._take, parts, view)
        if isinstance(ids, Tensor):
            changed["position_ids"] = self._once(self._take, ids, view)
        name = self.layout.bias
        if name is not None and isinstance(bias := arguments.get(name), Tensor):
            changed[name] = self._once(self._restrict_bias, bias, view)
        return {**arguments, **changed}

    def check(self, arguments: Mapping[str, object]) -> None:
        """Raise :class:`UnsupportedError` for an argument that cannot be restricted."""
        known = _KNOWN | {self.layout.bias}
        unknown = [k for k, v in arguments.items() if k not in known and isinstance(v, Tensor) and v.dim() > 0]
        unknown += [name for name in ("is_causal", *_SWITCHES) if arguments.get(name)]
        mask, parts = arguments.get("attention_mask"), arguments.get("position_embeddings")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
            unknown.append("an attention_mask that is not of four dimensions")
        if mask is None and self.implementation != "sdpa":
            unknown.append("no attention_mask")
        listed = (parts,) if isinstance(parts, Tensor) else parts
        if listed is not None and not (isinstance(listed, tuple) and all(part.dim() == 3 for part in listed)):
            unknown.append("position_embeddings that are not of three dimensions")
        if unknown:
            raise UnsupportedError(f"token selection does not support layers with this input: {unknown[0]}")

    def _restrict_mask(self, mask: Tensor | None, view: AttentionView) -> Tensor | None:
        if self.layout.excludes and mask is not None:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(mask, torch.finfo(torch.float32).min)
        allowed = _restrict_joined_mask(mask, view, self.shape[1]) if self.is_joined else _restrict_mask(mask, view)
        if self.layout.excludes and allowed is not None:  # the bias excludes keys of other concatenated examples
            return (allowed < 0) & allowed.isfinite() if self.is_joined else allowed < 0
        if allowed is None or allowed.dtype != torch.bool or self.mask_dtype is None:
            return allowed
        return torch.zeros_like(allowed, dtype=self.mask_dtype).masked_fill_(~allowed, -torch.inf)

    def _restrict_parts(self, parts: tuple[Tensor, ...], view: AttentionView) -> tuple[Tensor, ...]:
        return tuple(self._take(part, view) for part in parts)

    def _restrict_bias(self, bias: Tensor, view: AttentionView) -> Tensor:
        """Return the bias for a view's keys, by their positions."""
        num_examples, length = self.shape
        key_BS = torch.cat([rows.position_BK for rows in view.keys], 1)
        if self.layout.is_one_bias:
            bias_HQS = bias[:, :, bias.shape[2] - length + key_BS[0] % length]
            if not self.is_joined:
                return bias_HQS
            other_QS = view.queries.position_BK[0][:, None] // length != key_BS // length
            return bias_HQS.masked_fill(other_QS, -torch.inf)
        bias_BHT = bias.reshape(num_examples, -1, length)
        if self.is_joined:
            bias_BHT = bias_BHT.transpose(0, 1).flatten(1)[None]
        bias_BHS = bias_BHT.gather(2, key_BS[:, None].expand(-1, bias_BHT.shape[1], -1))
        return (bias_BHS.flatten(0, 1) if bias.dim() == 3 else bias_BHS).unsqueeze(-2)

    def _take(self, x: Tensor, view: AttentionView) -> Tensor:
        if self.is_joined:
            x = x.expand(self.shape[0], *x.shape[1:]).flatten(0, 1)[None]
        return view.queries.take(x)

    def _once(self, function: Callable[[_Value, AttentionView], object], value: _Value, view: AttentionView) -> object:
        key = (id(value), id(view))
        if key not in self._known:
            self._known[key] = (value, view, function(value, view))
        return self._known[key][2]


def _restrict_mask(mask: Tensor | None, view: AttentionView) -> Tensor | None:
    """Return the attention mask of a view; None for plain causal attention among the queries."""
    if mask is None and view.is_own:  # rows ascend, and padding rows come last
        return None
    query_BQ = view.queries.position_BK
    key_BS = torch.cat([rows.position_BK for rows in view.keys], 1)
    valid_BS = torch.cat([rows.valid_BK for rows in view.keys], 1)
    if all(rows.shared for rows in (view.queries, *view.keys)) and all(rows.is_full for rows in view.keys):
        query_BQ, key_BS, valid_BS = query_BQ[:1], key_BS[:1], valid_BS[:1]
    causal = (query_BQ[:, :, None] >= key_BS[:, None, :])[:, None]
    allowed = causal if mask is None else _gather(mask, query_BQ, key_BS)
    allowed = _exclude(allowed, valid_BS[:, None, None, :], view)
    if view.is_own and allowed.dtype == torch.bool and _is_causal(allowed, view.queries.valid_BK[: len(allowed)]):
        return None
    return allowed


def _restrict_joined_mask(mask: Tensor | None, view: AttentionView, length: int) -> Tensor:
    """Return the attention mask of concatenated examples: positions attend only to their own example."""
    query_1Q1 = view.queries.position_BK[:, :, None]
    key_11S = torch.cat([rows.position_BK for rows in view.keys], 1)[:, None, :]
    same = (query_1Q1 // length == key_11S // length)[:, None]
    if mask is None:
        return same & (query_1Q1 >= key_11S)[:, None]
    example = query_1Q1 // length if len(mask) > 1 else torch.zeros_like(query_1Q1)
    found = mask.transpose(0, 1)[:, example, query_1Q1 % length, key_11S % length].transpose(0, 1)
    return found & same if found.dtype == torch.bool else found.masked_fill(~same, -torch.inf)


def _gather(mask: Tensor, query_BQ: Tensor, key_BS: Tensor) -> Tensor:
    num_examples = max(len(mask), len(query_BQ))
    example = torch.arange(num_examples, device=mask.device)[:, None, None]
    query, key = query_BQ[:, :, None], key_BS[:, None, :]
    whole = mask.expand(num_examples, -1, -1, -1)
    return whole.transpose(0, 1)[:, example, query, key].transpose(0, 1)


def _exclude(allowed: Tensor, valid: Tensor, view: AttentionView) -> Tensor:
    """Mask padding rows as keys, and let each padding row attend to itself.

    A row that attends to nothing yields NaN, which would spread even when multiplied by zero. The model's own mask
    handles a trained row at a position of padding.
    """
    slot = view.slot_BQ[: len(allowed), None, :, None].expand(len(allowed), allowed.shape[1], -1, 1)
    fills = ~view.queries.valid_BK[: len(allowed), None, :, None]
    if allowed.dtype == torch.bool:
        allowed = allowed & valid
        return allowed.scatter(3, slot, allowed.gather(3, slot) | fills)
    # -inf is lower than the finite value in masks, with which eager attention gives a fully masked row equal weights.
    allowed = allowed.masked_fill(~valid, -torch.inf)
    return allowed.scatter(3, slot, allowed.gather(3, slot).masked_fill(fills, 0.0))


def _is_causal(allowed: Tensor, valid_BQ: Tensor) -> bool:
    """Return whether every real row attends to all earlier ones; synchronises with the device once for all layers."""
    size = allowed.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=allowed.device).tril()
    return bool(((allowed == causal) | ~valid_BQ[:, None, :, None]).all())
