"""Restricts the arguments of a decoder layer to some queries and their keys.

Shape letters: B examples, T positions, Q queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.backward.selection.token.rows import RowNumbers
from sparsebp_cli.errors import UnsupportedError

_KNOWN = {"attention_mask", "position_embeddings", "position_ids", "cache_position"}
_SWITCHES = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True, eq=False)
class AttentionView:
    """The query rows of an attention, and the key rows that they attend to."""

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
        first = sum(len(rows) for rows in before)
        slot_BQ = first + torch.arange(len(queries), device=queries.position_BK.device).expand_as(queries.position_BK)
        return cls(queries, (*before, queries), slot_BQ)


@dataclass
class AttentionArgs:
    """Restricts the arguments of every layer; arguments shared by layers are restricted once."""

    implementation: str  # transformers' name of the attention function: eager or sdpa
    # Boolean masks are converted to this dtype once, so that no layer converts and stores its own; None: unchanged.
    mask_dtype: torch.dtype | None = None
    joined: tuple[int, int] | None = None  # B and T, if the examples are concatenated to one; None: they are not
    _known: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)  # by id, with the objects kept alive

    def restrict(self, arguments: dict[str, Any], view: AttentionView, *, mask: bool = True) -> dict[str, Any]:
        """Return a layer's named arguments, without hidden states and cache, for the queries of a view.

        Without ``mask`` the attention itself will not be computed.
        """
        changed: dict[str, Any] = {"attention_mask": None}
        if mask:
            changed["attention_mask"] = self._once(self._restrict_mask, arguments.get("attention_mask"), view)
        if arguments.get("position_embeddings") is not None:
            changed["position_embeddings"] = self._once(self._restrict_parts, arguments["position_embeddings"], view)
        if arguments.get("position_ids") is not None:
            changed["position_ids"] = self._once(self._take, arguments["position_ids"], view)
        return arguments | changed

    def check(self, arguments: dict[str, Any]) -> None:
        """Raise :class:`UnsupportedError` for an argument that cannot be restricted."""
        unknown = [k for k, v in arguments.items() if k not in _KNOWN and isinstance(v, Tensor) and v.dim() > 0]
        unknown += [name for name in ("is_causal", *_SWITCHES) if arguments.get(name)]
        mask, parts = arguments.get("attention_mask"), arguments.get("position_embeddings")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
            unknown.append("an attention_mask that is not of four dimensions")
        if mask is None and self.implementation != "sdpa":
            unknown.append("no attention_mask")
        if parts is not None and not (isinstance(parts, tuple) and all(part.dim() == 3 for part in parts)):
            unknown.append("position_embeddings that are not of three dimensions")
        if unknown:
            raise UnsupportedError(f"token selection cannot cut a layer's arguments: it takes {unknown[0]}")

    def _restrict_mask(self, mask: Tensor | None, view: AttentionView) -> Tensor | None:
        allowed = (
            _restrict_mask(mask, view) if self.joined is None else _restrict_joined_mask(mask, view, self.joined[1])
        )
        if allowed is None or allowed.dtype != torch.bool or self.mask_dtype is None:
            return allowed
        return torch.zeros_like(allowed, dtype=self.mask_dtype).masked_fill_(~allowed, -torch.inf)

    def _restrict_parts(self, parts: tuple[Tensor, ...], view: AttentionView) -> tuple[Tensor, ...]:
        return tuple(self._take(part, view) for part in parts)

    def _take(self, x: Tensor, view: AttentionView) -> Tensor:
        if self.joined is not None:
            x = x.expand(self.joined[0], *x.shape[1:]).flatten(0, 1)[None]
        return view.queries.take(x)

    def _once(self, function: Any, value: Any, view: AttentionView) -> Any:
        key = (id(value), id(view))
        if key not in self._known:
            self._known[key] = ((value, view), function(value, view))
        return self._known[key][1]


def _restrict_mask(mask: Tensor | None, view: AttentionView) -> Tensor | None:
    """Return the attention mask of a view; None if that is plain causal attention among the queries."""
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

    A row that attends to nothing gives NaN, which would spread even when multiplied by zero. A trained row at a
    position of padding is handled by the model's own mask.
    """
    slot = view.slot_BQ[: len(allowed), None, :, None].expand(len(allowed), allowed.shape[1], -1, 1)
    fills = ~view.queries.valid_BK[: len(allowed), None, :, None]
    if allowed.dtype == torch.bool:
        allowed = allowed & valid
        return allowed.scatter(3, slot, allowed.gather(3, slot) | fills)
    # -inf is lower than the finite value in masks: eager attention gives a fully masked row equal weights.
    allowed = allowed.masked_fill(~valid, -torch.inf)
    return allowed.scatter(3, slot, allowed.gather(3, slot).masked_fill(fills, 0.0))


def _is_causal(allowed: Tensor, valid_BQ: Tensor) -> bool:
    """Whether every real row attends to all earlier ones; synchronises with the device once for all layers."""
    size = allowed.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=allowed.device).tril()
    return bool(((allowed == causal) | ~valid_BQ[:, None, :, None]).all())
