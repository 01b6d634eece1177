"""An attention computed again for some queries, against all keys and values.

The core's own forward does it, by way of the argument that takes a key/value cache: one stand-in for a cache takes the
keys and values of all positions and goes no further, another gives them to the kept queries.

Shape letters: B examples, T positions, D width, K kept, P a part of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.backward.branch.branch import Branch, Call
from sparsebp_cli.backward.branch.stored_outputs import replay_outputs
from sparsebp_cli.backward.decoder.kv_cache import FixedKV, RecordedKV, RecordKV, silence
from sparsebp_cli.backward.decoder.layout import attention_name
from sparsebp_cli.backward.patch.forward import replace_forwards


@dataclass(frozen=True)
class Queries:
    """Some queries of every example.

    Args:
        index_BP: Their row numbers.
        position_BP: Their positions.
        num_keys: So many keys, from the first, may be looked at.
    """

    index_BP: Tensor
    position_BP: Tensor
    num_keys: int


def compute_keys_values(branch: Branch, call: Call, normed: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of all positions, with a graph down to the core's input.

    Args:
        branch: An attention.
        call: Its forward.
        normed: The core's input, (B, T, D).

    Returns:
        Keys and values as the core hands them to a cache.
    """
    assert branch.attention is not None
    with replace_forwards([*replay_outputs(branch, call, None), *silence(branch.core, branch.attention.query)]):
        try:
            branch.run_core(normed, call, **{branch.attention.cache: RecordKV()})
        except RecordedKV as captured:
            return captured.keys, captured.values
    raise AssertionError(f"{branch.name} computes without asking its cache")


def run_queries(
    branch: Branch, call: Call, normed_BPD: Tensor, queries: Queries, keys: Tensor, values: Tensor
) -> Tensor:
    """Run the core for some queries.

    Args:
        branch: An attention.
        call: Its forward.
        normed_BPD: The core's input at the queries.
        queries: Where they are.
        keys: From :func:`compute_keys_values`.
        values: The same.

    Returns:
        The core's output at the queries.
    """
    layout, seen = branch.attention, slice(0, queries.num_keys)
    assert layout is not None
    changes = _take(branch, call, queries) | {layout.cache: FixedKV(keys[:, :, seen], values[:, :, seen])}
    silent = silence(branch.core, () if layout.fused else layout.key_value)
    with replace_forwards([*replay_outputs(branch, call, queries.index_BP.flatten()), *silent]):
        return branch.run_core(normed_BPD, call, **changes)


def is_causal(branch: Branch, call: Call) -> bool:
    """Whether, without a mask, a query looks at no later key: sdpa is causal by the module's attribute."""
    if call.kwargs.get("attention_mask") is not None:
        return False
    return attention_name(branch.core) == "sdpa" and bool(getattr(branch.core, "is_causal", True))


def _take(branch: Branch, call: Call, queries: Queries) -> dict[str, Any]:
    """Return the core's arguments at the queries."""
    position_BP, seen = queries.position_BP, slice(0, queries.num_keys)
    num_examples, changes = len(position_BP), dict[str, Any]()
    embeddings, mask = call.kwargs.get("position_embeddings"), call.kwargs.get("attention_mask")
    if embeddings is not None:
        example_B1 = torch.arange(num_examples, device=position_BP.device)[:, None]
        changes["position_embeddings"] = tuple(
            part.expand(num_examples, -1, -1)[example_B1, position_BP] for part in embeddings
        )
    if call.kwargs.get("position_ids") is not None:
        changes["position_ids"] = call.kwargs["position_ids"].expand(num_examples, -1).gather(1, position_BP)
    if mask is not None:
        mask = mask[..., seen]
        index = position_BP[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
        changes["attention_mask"] = mask.expand(num_examples, -1, -1, -1).gather(2, index)
    elif is_causal(branch, call):
        key = torch.arange(queries.num_keys, device=position_BP.device)
        changes["attention_mask"] = (position_BP[:, :, None] >= key)[:, None]
    return changes
