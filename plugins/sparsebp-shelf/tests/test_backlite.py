"""BackLite: what is skipped of a table of attention weights."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_cli.policy import Step
from sparsebp_shelf.tile import AttentionTiles, BackLite
from sparsebp_shelf.tile.suite import check_tile_selector

TILES, STEP = AttentionTiles("layers.0.attention", 0, 0), Step(3, num_steps=10)
MASS_HQK = torch.tensor([[[4.0, 0.0, 0.0], [3.9, 0.1, 0.0], [2.1, 0.3, 1.6]]])


def test_the_smallest_shares_of_what_a_tile_of_keys_receives_are_skipped() -> None:
    """Shares: 0.4, 0.39, 0.21 of the first keys; 0, 0.25, 0.75 of the second; 0, 0, 1 of the third."""
    keep = {
        0.2: [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        0.22: [[1, 0, 0], [1, 1, 0], [0, 1, 1]],
        0.3: [[1, 0, 0], [1, 0, 0], [0, 1, 1]],
        0.61: [[1, 0, 0], [0, 0, 0], [0, 1, 1]],
        0.99: [[1, 0, 0], [0, 0, 0], [0, 1, 1]],
    }
    for negligible, wanted in keep.items():
        chosen = BackLite(negligible=negligible).select(MASS_HQK, TILES, STEP)
        assert chosen.int().tolist() == [wanted], negligible


def test_the_sum_of_the_skipped_shares_stays_below_the_limit() -> None:
    """So the gradients of values lose at most that share of the weights that they are summed with."""
    generator = torch.Generator().manual_seed(0)
    mass_HQK = 64.0 * torch.softmax(3.0 * torch.randn(4, 12, 12, generator=generator), -1)
    for negligible in (0.01, 0.05, 0.3):
        keep_HQK = BackLite(negligible=negligible).select(mass_HQK, TILES, STEP)
        lost_HK = (mass_HQK * ~keep_HQK).sum(1) / mass_HQK.sum(1)
        assert float(lost_HK.max()) < negligible
        with_next_HK = lost_HK + (mass_HQK / mass_HQK.sum(1, keepdim=True)).masked_fill(~keep_HQK, 9.0).amin(1)
        assert float(with_next_HK.min()) >= negligible - 1e-6


def test_the_control_skips_as_many_of_the_tiles_that_have_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    score_HQK = 3.0 * torch.randn(4, 12, 12, generator=generator)
    mass_HQK = 64.0 * score_HQK.masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    policy = BackLite(negligible=0.2)
    assert policy.control == {"name": "backlite", "negligible": 0.2, "tile": 64, "score": "random"}
    drawn = BackLite(negligible=0.2, score="random")
    by_mass, at_random = (p.select(mass_HQK, TILES, STEP) for p in (policy, drawn))
    has_weight = mass_HQK > 0.0
    assert torch.equal((by_mass & has_weight).sum(1), (at_random & has_weight).sum(1))
    assert not torch.equal(by_mass, at_random)
    assert float((mass_HQK * at_random).sum()) < float((mass_HQK * by_mass).sum())
    other = drawn.select(mass_HQK, AttentionTiles("layers.0.attention", 0, 1), STEP)
    assert not torch.equal(at_random, other)


@pytest.mark.parametrize("negligible", [0.0, 0.05, 0.5])
def test_it_keeps_the_promises_of_its_kind(negligible: float) -> None:
    check_tile_selector(BackLite(negligible=negligible))
    check_tile_selector(BackLite(negligible=negligible, score="random"))


def test_a_share_of_all_is_refused() -> None:
    with pytest.raises(ValueError, match="less than 1"):
        BackLite(negligible=1.0)


def test_a_measured_step_does_not_count_the_check_that_the_first_step_makes() -> None:
    """Else a run that was resumed would count other FLOPs than one that was left alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model, ids = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).train(), torch.randint(0, 64, (2, 24))
    counts = []
    with sbp.attach(model, BackLite(negligible=0.3, tile=8)) as engine:
        for _ in range(2):
            with engine.probing(), count_flops() as count:
                engine.backward(model(input_ids=ids, labels=ids).loss)
            counts.append(count.total)
            engine.backward(model(input_ids=ids, labels=ids).loss)
    assert counts[0] == counts[1]
