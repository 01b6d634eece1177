"""A step that compares itself with the plain one holds both gradients, and no copy of anything whole in float64."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.backward.kind.packing import verify
from sparsebp_tools.memory import memory_trace

CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def _peak(when: str) -> tuple[int, int]:
    """Return the most live bytes of forward and backward, and the bytes of all gradients."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).train()
    model.config.use_cache = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = torch.randint(0, CONFIG.vocab_size, (2, 8))
    labels = ids.clone()
    labels[:, :4] = -100
    with (
        sbp.attach(model, sbp.make_policy("lossless", verify=when), optimizer=optimizer) as engine,
        memory_trace(model, optimizer) as trace,
    ):
        engine.backward(model(input_ids=ids, labels=labels).loss)
    return trace.peak.split.total, sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.slow
def test_a_comparison_takes_the_gradients_of_one_more_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CHUNK", 2**12)
    (compared, gradients), (alone, _) = _peak("always"), _peak("never")
    activations = 400_000  # of this batch, logits and all
    assert compared < alone + gradients + activations
    monkeypatch.setattr(verify, "CHUNK", 2**30)
    assert _peak("always")[0] > compared + gradients, "so that this can fail"


def test_parts_give_the_norms_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CHUNK", 7)
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(5, 3, generator=generator) for _ in range(2))
    difference, size = verify._sum_squares(one.t(), other.t())
    torch.testing.assert_close(difference, (one.double() - other.double()).square().sum())
    torch.testing.assert_close(size, other.double().square().sum())
    sizes, differences = verify._measure_rows(one, other)
    torch.testing.assert_close(sizes, one.double().norm(dim=-1))
    torch.testing.assert_close(differences, (one.double() - other.double()).norm(dim=-1))
    kept = other.double()
    verify._sum_squares(kept, kept)
    torch.testing.assert_close(kept, other.double())
