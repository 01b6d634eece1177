"""The judge of batches: leaks that were planted, batches as they are given, and models that mix on purpose.

Shape letters: B rows, T positions, D width.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers.models.llama import LlamaConfig

from sparsebp_audit.isolation import judge_batch

LENGTHS = (13, 11, 7)
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama(**own: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SMALL | own))).train()


def packed(**own: Any) -> dict[str, Any]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    ids = torch.randint(3, 60, positions.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": positions, "use_cache": False} | own


def padded(side: str, **own: Any) -> dict[str, Any]:
    mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(3, 60, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    return {"input_ids": ids, "attention_mask": mask} | own


class Leaky(nn.Module):
    """Embeddings and a head, with given leaks between examples of ``width`` positions in one row."""

    def __init__(self, leaks: dict[tuple[int, int], float], width: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(64, 16, dtype=dtype), nn.Linear(16, 8, dtype=dtype)
        self.leaks, self.width = leaks, width

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        hidden_BTD = self.table(input_ids).tanh()
        parts = list(hidden_BTD.split(self.width, dim=1))
        for (source, target), size in self.leaks.items():
            if max(source, target) < len(parts):
                parts[target] = parts[target] + size * hidden_BTD.split(self.width, dim=1)[source]
        logits: Tensor = self.head(torch.cat(parts, dim=1))
        return logits


def row_of(count: int, width: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (1, count * width), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.arange(width).repeat(count)[None]}


def test_a_clean_batch_is_alone_whatever_its_arrangement() -> None:
    for batch in (packed(), padded("right"), padded("left"), padded("right", labels=padded("right")["input_ids"])):
        judged = judge_batch(llama(), batch)
        assert judged.verdict == "alone", judged
        assert judged.leak == 0.0  # bit for bit
        assert judged.examples == len(LENGTHS)
        assert judged.cost_steps <= 1.5


def test_dropout_is_no_leak() -> None:
    torch.manual_seed(0)
    rates = {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, **rates)).train()
    assert judge_batch(model, packed()).verdict == "alone"
    assert judge_batch(llama(attention_dropout=0.5), packed()).verdict == "alone"


@pytest.mark.parametrize(
    ("own", "says", "remedy"),
    [
        ({"use_cache": None}, "cache", "use_cache = False"),
        ({"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long)}, "attention_mask of ones", "leave"),
    ],
)
def test_what_turns_off_the_detection_of_packed_rows_is_named_and_mended(
    own: dict[str, Any], says: str, remedy: str
) -> None:
    judged = judge_batch(llama(), packed(**own))
    assert judged.verdict == "mixed"
    assert {(pair.source, pair.target) for pair in judged.pairs} >= {(0, 1), (0, 2), (1, 2)}
    assert all(pair.source < pair.target for pair in judged.pairs)  # causal
    assert judged.module == "model.layers.0.self_attn"
    assert says in judged.cause
    assert remedy in judged.mend
    assert judged.is_mend_tried
    assert judged.cost_steps <= 3.0


def test_position_numbers_that_count_padding_on_the_left_are_found() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)).train()
    judged = judge_batch(model, padded("left"))
    assert (judged.verdict, judged.pairs, judged.affected) == ("mixed", (), (2, 1))
    assert "position numbers count it" in judged.cause
    assert judged.is_mend_tried
    positions = (padded("left")["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert judge_batch(model, padded("left", position_ids=positions)).verdict == "alone"


def test_padding_that_is_read_because_no_mask_says_so_is_found() -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SMALL, pad_token_id=0)).train()
    assert judge_batch(model, padded("right")).verdict == "alone"
    judged = judge_batch(model, {"input_ids": padded("right")["input_ids"]})
    assert judged.verdict == "mixed"
    assert "no attention_mask" in judged.cause
    assert judged.is_mend_tried


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 5, 20, 40])  # above 16 examples there is a third pass
def test_every_planted_pair_is_found_by_the_gradient_however_small(count: int, dtype: torch.dtype) -> None:
    assert judge_batch(Leaky({}, 3, dtype).train(), row_of(count)).leak == 0.0
    size = 2.0**-9 if dtype is torch.float32 else 2.0**-5  # less than a last bit of a sum is lost in any computation
    generator = torch.Generator().manual_seed(count)
    pairs = [(s, t) for s in range(count) for t in range(count) if s != t]
    chosen = torch.randperm(len(pairs), generator=generator)[:12].tolist()
    for pair in (pairs[number] for number in chosen):
        judged = judge_batch(Leaky({pair: size}, 3, dtype).train(), row_of(count))
        assert judged.verdict == "mixed", pair
        if dtype is torch.float32:  # the outputs name the target first
            assert [(found.source, found.target) for found in judged.pairs] == [pair]


def test_the_training_does_not_notice() -> None:
    model = llama(attention_dropout=0.1)
    model.register_buffer("seen", torch.zeros(1))
    model.register_forward_hook(lambda module, *_: module.seen.add_(1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, state = copy.deepcopy(dict(model.state_dict())), torch.get_rng_state()
    judge_batch(model, packed(use_cache=None))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters() if parameter.grad is not None)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules() if module is not model)


def test_the_judgement_costs_at_most_three_plain_steps_in_flops() -> None:
    for own in ({}, {"use_cache": None}, {"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long)}):
        model, batch = llama(), packed(**own)
        with FlopCounterMode(display=False) as plain:
            model(**batch, labels=batch["input_ids"]).loss.backward()
        with FlopCounterMode(display=False) as spent:
            judge_batch(model, batch)
        assert spent.get_total_flops() <= 3 * plain.get_total_flops()


class Normed(nn.Module):
    """Normalises over the batch, and may leak from row to row besides."""

    def __init__(self, leak: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head, self.leak = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), leak

    def forward(self, x: Tensor) -> Tensor:
        hidden_BD = self.norm(self.inner(x))
        result: Tensor = self.head(hidden_BD + self.leak * hidden_BD.roll(1, 0))
        return result


def test_batch_norm_is_named_as_on_purpose_and_hides_nothing_else() -> None:
    batch = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    judged = judge_batch(model := Normed(0.0).train(), batch)
    assert judged.verdict == "purpose"
    assert "norm, which normalises by the statistics of the whole batch" in judged.reason
    assert model.norm.training
    assert judge_batch(model.eval(), batch).verdict == "alone"
    assert judge_batch(Normed(0.1).train(), batch).verdict == "mixed"


def test_sequences_that_share_what_stands_before_them_are_not_judged() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 2, 3]])
    judged = judge_batch(llama(), {"input_ids": torch.arange(3, 9)[None], "position_ids": positions})
    assert judged.verdict == "unjudged"
    assert "restart at 2" in judged.reason
