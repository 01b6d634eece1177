"""Weights of single targets: the gradient is that of the weighted sum written out by hand, dense and with policies."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

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


@pytest.mark.parametrize("mode", ["exact", "detach"])
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
        with pytest.raises(UnsupportedError, match=r"loss_weight has the shape \(2, 3\), but"):
            model(**batch)
        engine.columns(loss_weight=weights(batch))
        with pytest.raises(UsageError, match="this forward computed no loss: pass labels"):
            model(input_ids=batch["input_ids"])
    linear = nn.Sequential(nn.Linear(2, 2))
    with sbp.attach(linear, []) as engine, pytest.raises(UnsupportedError, match="which Sequential does not compute"):
        engine.columns(loss_weight=torch.ones(1, 2))


MIXING: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "num_key_value_heads": 2},
}


def _mixing(family: str) -> nn.Module:
    """A decoder whose plain step mixes the texts of a row, since its mask does not follow position numbers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    places = {"num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, **places, **MIXING[family])
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model.train()


@pytest.mark.parametrize("family", list(MIXING))
@pytest.mark.parametrize("verify", ["first", "always"])
def test_weights_outlast_a_comparison_with_each_example_alone(family: str, verify: str) -> None:
    """Where the plain step mixes the texts of a row, examples run alone inside of the model's own forward."""
    model, generator = _mixing(family), torch.Generator().manual_seed(3)
    calls: list[int] = []
    hook = model.register_forward_hook(lambda *_: calls.append(0))
    with sbp.attach(model, sbp.make_policy("lossless", verify=verify)) as engine:
        for number in range(2):
            ids = torch.randint(3, 40, (1, 18), generator=generator)
            places = torch.cat([torch.arange(7), torch.arange(11)])[None]
            labels = ids.masked_fill(places == 0, IGNORED)
            weight_BT = torch.randint(0, 3, ids.shape, generator=generator).float()
            wanted = _each_alone(engine, model, ids, labels, weight_BT, places)
            model.zero_grad(set_to_none=True)
            calls.clear()
            engine.columns(loss_weight=weight_BT)
            engine.backward(model(input_ids=ids, position_ids=places, labels=labels, use_cache=False).loss)
            got = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            assert distance(got, wanted) < 2e-5, number
            assert len(calls) == 1, "hooks of a script see the forwards that it makes, and no other"
    hook.remove()


def _each_alone(
    engine: sbp.Engine, model: nn.Module, ids: Tensor, labels: Tensor, weight_BT: Tensor, places: Tensor
) -> list[Tensor]:
    """Autograd on the weighted sum over texts, each in a plain forward of its own."""
    model.zero_grad(set_to_none=True)
    starts = [*(places[0] == 0).nonzero()[:, 0].tolist(), ids.shape[1]]
    loss, count = torch.zeros(()), 0
    with engine.disabled():
        for start, end in pairwise(starts):
            logits = model(input_ids=ids[:, start:end], use_cache=False).logits[0, :-1]
            nll = nn.functional.cross_entropy(logits, labels[0, start + 1 : end], reduction="none")
            loss, count = loss + (nll * weight_BT[0, start + 1 : end]).sum(), count + end - start - 1
        (loss / count).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
