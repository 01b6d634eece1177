"""An attention recomputed for some queries against all keys and values.

The core's own forward does this through its key/value-cache argument: one cache stand-in records the keys and values
of all positions and ends the forward; another returns them to the kept queries.

Shape letters: B examples, T positions, D width, K kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebp_cli.backward.branch.branch import Branch, Call
from sparsebp_cli.backward.branch.stored_outputs import replay_outputs
from sparsebp_cli.backward.decoder.decoder import attention_name
from sparsebp_cli.backward.decoder.kv_cache import FixedKV, RecordedKV, RecordKV, skip_outputs
from sparsebp_cli.backward.decoder.window import with_window, without_window
from sparsebp_cli.backward.patch.forward import replace_forwards


@dataclass(frozen=True)
class Queries:
    """Some queries of every example."""

    index_BK: Tensor  # row numbers in B*T
    position_BK: Tensor


def compute_keys_values(branch: Branch, call: Call, normed: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of all positions as the core passes them to a cache, with a graph to its input (B, T,
    D).
    """
    assert branch.attention is not None
    skipped = skip_outputs(branch.core, branch.attention.query, one_head=branch.attention.any_heads)
    with replace_forwards([*replay_outputs(branch, call, None), *skipped]):
        try:
            branch.run_core(normed, call, **{branch.attention.cache: RecordKV()})
        except RecordedKV as captured:
            return captured.keys, captured.values
    raise AssertionError(f"{branch.name} computes without calling its cache")


def run_queries(
    branch: Branch, call: Call, normed_BKD: Tensor, queries: Queries, keys: Tensor, values: Tensor
) -> Tensor:
    """Return the core's output at some queries, given the core's input there and all keys and values."""
    layout = branch.attention
    assert layout is not None
    num_keys, replayed = keys.shape[2], replay_outputs(branch, call, queries.index_BK.flatten())
    changes = _take(branch, call, queries, num_keys) | {layout.cache: FixedKV(keys, values)}
    skipped = skip_outputs(branch.core, () if layout.fused else layout.key_value, one_head=layout.any_heads)
    with replace_forwards([*replayed, *skipped]), without_window(branch.core, layout, num_keys):
        return branch.run_core(normed_BKD, call, **changes)


def is_causal(branch: Branch, call: Call) -> bool:
    """Whether queries attend to no later key although there is no mask: sdpa reads the module's ``is_causal``."""
    if call.kwargs.get("attention_mask") is not None:
        return False
    return attention_name(branch.core) == "sdpa" and bool(getattr(branch.core, "is_causal", True))


def _take(branch: Branch, call: Call, queries: Queries, num_keys: int) -> dict[str, object]:
    """Return the core's position and mask arguments restricted to the queries."""
    position_BK = queries.position_BK
    num_examples, changes = len(position_BK), dict[str, object]()
    embeddings, mask = call.kwargs.get("position_embeddings"), call.kwargs.get("attention_mask")
    example_B1 = torch.arange(num_examples, device=position_BK.device)[:, None]
    if isinstance(embeddings, tuple):
        changes["position_embeddings"] = tuple(
            part.expand(num_examples, -1, -1)[example_B1, position_BK] for part in embeddings
        )
    elif isinstance(embeddings, Tensor):
        changes["position_embeddings"] = embeddings.expand(num_examples, -1, -1)[example_B1, position_BK]
    position_ids = call.kwargs.get("position_ids")
    if isinstance(position_ids, Tensor):
        changes["position_ids"] = position_ids.expand(num_examples, -1).gather(1, position_BK)
    if isinstance(mask, Tensor):
        assert branch.attention is not None
        mask = with_window(mask, branch.core, branch.attention)[..., :num_keys]
        index = position_BK[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
        changes["attention_mask"] = mask.expand(num_examples, -1, -1, -1).gather(2, index)
    elif is_causal(branch, call):
        key = torch.arange(num_keys, device=position_BK.device)
        changes["attention_mask"] = (position_BK[:, :, None] >= key)[:, None]
    return changes
