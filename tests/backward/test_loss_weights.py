"""Weights of single targets: the gradient is that of the weighted sum written out by hand, dense and with policies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from tests.backward.packing.case import IGNORED, make_batch

from .token.test_families import decoder

EXACT: dict[str, Any] = {
    "dense": [],
    "lossless": ["lossless"],
    "topk of all": [{"name": "topk", "keep": 1.0, "along": "rows"}],
    "tokens": [{"name": "tokens", "score": "random", "keep": 1.0}],
}


def weights(batch: dict[str, Tensor], seed: int = 5) -> Tensor:
    drawn = torch.randn(batch["labels"].shape, generator=torch.Generator().manual_seed(seed))
    drawn[0, -6:] = 0.0  # a token without weight still counts as a target
    return drawn


def by_hand(model: nn.Module, batch: dict[str, Tensor], weight_BT: Tensor, items: float | None = None) -> list[Tensor]:
    """Autograd on the sum written out, target by target."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels, loss, count = batch["labels"], torch.zeros(()), 0
    for row, column in (labels != IGNORED).nonzero().tolist():
        if column == 0:
            continue
        nll = -logits[row, column - 1].float().log_softmax(-1)[labels[row, column]]
        loss, count = loss + weight_BT[row, column] * nll, count + 1
    (loss / (count if items is None else items)).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    assert len(some) == len(others)
    apart = sum(float((a - b).square().sum()) for a, b in zip(some, others, strict=True))
    return (apart / sum(float(b.square().sum()) for b in others)) ** 0.5


def run(model: nn.Module, policies: Any, inputs: dict[str, Any], weight_BT: Tensor | None = None) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    with sbp.attach(model, policies) as engine:
        if weight_BT is not None:
            engine.columns(loss_weight=weight_BT)
        engine.backward(model(**inputs).loss)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", list(EXACT))
@pytest.mark.parametrize("arrangement", [("right", "completion", "tree"), ("left", "dense", "pairs")])
@pytest.mark.parametrize("items", [None, 37.0])
def test_the_gradient_is_that_of_the_weighted_sum_by_hand(
    name: str, arrangement: tuple[str, str, str], items: float | None
) -> None:
    model, batch = decoder("llama"), make_batch(*arrangement)
    weight_BT = weights(batch)
    wanted = by_hand(model, batch, weight_BT, items)
    inputs = batch | ({} if items is None else {"num_items_in_batch": torch.tensor(items)})
    assert distance(run(model, EXACT[name], inputs, weight_BT), wanted) < 2e-6


@pytest.mark.parametrize("mode", ["exact", "detach", "stop"])
def test_chosen_tokens_keep_their_weights(mode: str) -> None:
    model, batch = decoder("llama"), make_batch("right", "completion", "none")
    chosen = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(2)) < 0.4
    policy = {"name": "tokens", "score": "mask", "mask_column": "chosen", "mode": mode}
    weight_BT = weights(batch)
    few = batch | {"labels": batch["labels"].masked_fill(~chosen, IGNORED)}
    fast = run(model, policy, batch | {"chosen": chosen.long()}, weight_BT)
    if mode == "exact":
        assert distance(fast, by_hand(model, few, weight_BT)) < 2e-6
    model.zero_grad(set_to_none=True)
    with sbp.attach(model, policy, execution="reference") as engine:
        engine.columns(loss_weight=weight_BT)
        engine.backward(model(**batch, chosen=chosen.long()).loss)
    assert distance(fast, [p.grad for p in model.parameters() if p.grad is not None]) < 2e-6


def test_weights_of_one_change_nothing_and_weights_last_until_the_next_call() -> None:
    model, batch = decoder("llama"), make_batch("right", "completion", "none")
    plain = run(model, [], batch)
    assert distance(run(model, [], batch, torch.ones(batch["labels"].shape)), plain) < 1e-6
    with sbp.attach(model, "lossless") as engine:
        engine.columns(loss_weight=2.0 * torch.ones(batch["labels"].shape))
        doubled = model(**batch).loss.item()
        assert model(**batch).loss.item() == pytest.approx(doubled)
        engine.columns()
        assert doubled == pytest.approx(2.0 * model(**batch).loss.item())
    assert distance(run(model, [], batch), plain) == 0.0  # nothing is left in the model


def test_what_the_weights_would_not_reach_is_refused() -> None:
    model, batch = decoder("llama"), make_batch("right", "completion", "none")
    with sbp.attach(model, []) as engine:
        engine.columns(loss_weight=torch.ones(2, 3))
        with pytest.raises(UnsupportedError, match=r"loss_weight \(2, 3\) must have the shape of the labels"):
            model(**batch)
        engine.columns(loss_weight=weights(batch))
        with pytest.raises(UsageError, match="this forward computed none: pass it the labels"):
            model(input_ids=batch["input_ids"])
    linear = nn.Sequential(nn.Linear(2, 2))
    with sbp.attach(linear, []) as engine, pytest.raises(UnsupportedError, match="which Sequential does not compute"):
        engine.columns(loss_weight=torch.ones(1, 2))


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_comparison_inside_of_a_forward_leaves_its_weights_and_is_hidden_from_hooks(verify: str) -> None:
    torch.manual_seed(0)
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=60,
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            dropout=0.0,
        )
    ).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(3, 60, (1, 30))
    labels = ids.clone()
    labels[0, [0, 13, 28, 29]] = IGNORED
    weight_BT = torch.randint(0, 3, ids.shape).float()
    total = torch.zeros(())
    for columns in (slice(0, 13), slice(13, 30)):  # each text alone
        logits, target = model(input_ids=ids[:, columns], use_cache=False).logits[0, :-1], labels[0, columns][1:]
        loss_N = nn.functional.cross_entropy(logits, target, ignore_index=IGNORED, reduction="none")
        total = total + (loss_N * weight_BT[0, columns][1:]).sum()
    (total / (labels[:, 1:] != IGNORED).sum()).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    positions = torch.cat([torch.arange(13), torch.arange(17)])[None]
    with sbp.attach(model, sbp.make_policy("lossless", verify=verify)) as engine:
        engine.columns(loss_weight=weight_BT)
        engine.backward(model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss)
        assert "the plain step is wrong" in engine.notes["packing"]  # single examples were asked
    assert distance([p.grad for p in model.parameters() if p.grad is not None], wanted) < 2e-6
    assert len(calls) == 1
