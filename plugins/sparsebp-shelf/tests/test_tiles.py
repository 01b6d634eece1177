"""Attention whose backward skips tiles: right by the equations, the forward to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.asset.checkpointing import checkpoint_activations
from sparsebp_cli.backward import ModuleTrace, count_flops
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Step
from sparsebp_shelf.tile import AttentionTiles, BackLite, TileSelector
from sparsebp_shelf.tile.extension import _find as find_attention
from sparsebp_shelf.tile.gradient import masked_gradients, tiled_gradients
from tests.backward.conftest import tiny_model, tokens
from tests.tile import tiling_by_hand

NO_DROPOUT = {"gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}}
SOME = BackLite(negligible=0.4, tile=4)
ALL = BackLite(negligible=1e-12, tile=4)
FAMILIES = ("llama", "gpt2", "qwen3", "gpt_neox")
PADDED = torch.tensor([[1] * 16, [1] * 9 + [0] * 7])
Found = tuple[Tensor, dict[str, Tensor]]


def made(family: str = "llama", **options: Any) -> Any:
    return tiny_model(family, **NO_DROPOUT.get(family, {}) | options).double()


def loss_of(model: Any, length: int = 16, mask: Tensor | None = None) -> Tensor:
    ids = tokens(0, length=length)
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    return loss


def take(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def dense(model: Any, *args: Any) -> Found:
    loss = loss_of(model, *args)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), take(model)


def attached(model: Any, policy: TileSelector, *args: Any, **options: Any) -> Found:
    with sbp.attach(model, policy, seed=1, **options) as engine:
        loss = loss_of(model, *args)
        engine.backward(loss)
    return loss.detach(), take(model)


def differ(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_equations(family: str, mask: Tensor | None) -> None:
    model = made(family)
    with tiling_by_hand(SOME, Step(0, seed=1)) as choices:
        _, by_hand = dense(model, 16, mask)
    assert 0.2 < float(torch.stack([choice.double().mean() for choice in choices]).mean()) < 0.8
    loss, gradient = attached(made(family), SOME, 16, mask)
    assert differ(gradient, by_hand) < 1e-14
    dense_loss, dense_gradient = dense(made(family), 16, mask)
    assert torch.equal(loss, dense_loss)
    assert differ(gradient, dense_gradient) > 1e-3


@pytest.mark.parametrize("length", [16, 13, 3])
@pytest.mark.parametrize("policy", [SOME, BackLite(negligible=0.4, tile=4, score="random"), ALL])
def test_the_tiles_alone_are_the_masked_matrices(policy: BackLite, length: int) -> None:
    _, fast = attached(made(), policy, length)
    _, reference = attached(made(), policy, length, execution="reference")
    assert differ(fast, reference) < 1e-15


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tiles_are_the_dense_gradient(family: str) -> None:
    loss, gradient = dense(made(family))
    ours, every = attached(made(family), ALL)
    assert torch.equal(ours, loss)
    assert differ(every, gradient) < 1e-15


def test_nothing_negligible_is_dense_bit_for_bit() -> None:
    loss, gradient = dense(made())
    ours, same = attached(made(), BackLite(negligible=0.0))
    assert torch.equal(ours, loss)
    assert differ(same, gradient) == 0.0


def test_a_schedule_begins_dense() -> None:
    policy = sbp.make_policy("backlite", negligible={"from": 0.0, "to": 0.5, "over": 1.0}, tile=4)
    loss, gradient = dense(made())
    ours, same = attached(made(), policy, num_steps=10)
    assert torch.equal(ours, loss)
    assert differ(same, gradient) == 0.0


def test_gradients_of_values_lose_less_than_the_limit() -> None:
    """One attention of one head: the rows of dV in a tile differ by at most the skipped weights times a row of dO."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 24, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    weight = (3.0 * query @ key.mT).softmax(-1)
    for negligible in (0.05, 0.3):
        mass = weight.view(1, 6, 4, 6, 4).sum((2, 4))
        keep = BackLite(negligible=negligible, tile=4).select(mass, AttentionTiles("", None, 0), Step(0))
        assert not bool(keep.all())
        rows = query, key, value, weight @ value
        *_, kept = tiled_gradients(weight, grad, rows, keep, 4, 1.0, num_tiles=36)
        error_K = (kept - weight.mT @ grad).norm(dim=2).view(6, 4).sum(1)
        assert bool((error_K <= negligible * mass.sum((0, 1)) * grad.norm(dim=2).max()).all())
        for ours, theirs in zip(
            tiled_gradients(weight, grad, rows, keep, 4, 1.0, num_tiles=36),
            masked_gradients(weight, grad, rows, keep, 4, 1.0),
            strict=True,
        ):
            assert torch.allclose(ours, theirs, rtol=0.0, atol=1e-13)


def test_checkpointing_decides_once_and_alike() -> None:
    policy = BackLite(negligible=0.4, tile=4, score="random")
    _, plain = attached(made(), policy)
    model = made()
    checkpoint_activations(model, use_reentrant=False)
    _, again = attached(model, policy)
    assert differ(again, plain) == 0.0


def test_the_backward_of_a_disabled_engine_is_dense() -> None:
    model = made()
    _, gradient = dense(made())
    with sbp.attach(model, SOME) as engine:
        with engine.disabled():
            loss_of(model).backward()  # type: ignore[no-untyped-call]
        assert differ(take(model), gradient) == 0.0


def test_a_model_attached_beside_another_keeps_its_own_attention() -> None:
    first, second = made(), made()
    _, gradient = dense(made())
    with sbp.attach(first, SOME):
        assert differ(dense(second)[1], gradient) == 0.0
    before = find_attention()
    with sbp.attach(second, SOME):
        assert find_attention() is not before
    assert find_attention() is before
    second.zero_grad()
    assert differ(dense(second)[1], gradient) == 0.0


def test_executed_products_are_those_of_the_kept_tiles() -> None:
    """Scores again, whole, and four products of the kept share of the tiles under the mask."""
    size = {"num_hidden_layers": 1, "num_key_value_heads": 4}
    flops = {}
    for name, policy in (("dense", None), ("some", SOME)):
        model = made(**size)
        with ModuleTrace(model) as trace, count_flops(trace) as counted:
            if policy is None:
                dense(model, 16)
            else:
                attached(model, policy, 16)
        flops[name] = counted.backward["model.layers.0.self_attn"]
    with tiling_by_hand(SOME, Step(0, seed=1)) as choices:
        dense(made(**size), 16)
    under = torch.ones(4, 4, dtype=torch.bool).tril()
    kept = torch.stack([(choice & under).sum() / 40 for choice in choices]).mean()  # four heads of ten tiles
    assert flops["some"] == pytest.approx(flops["dense"] * (1 + 4 * float(kept)) / 5, rel=1e-3)


def test_the_report_says_what_was_kept() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sbp.attach(model, SOME, optimizer=optimizer) as engine:
        engine.backward(loss_of(model))
        optimizer.step()
        assert "% of the tiles that the mask leaves had a backward" in " ".join(engine.report().notes)


def test_encoders_and_windows_have_tiles_too() -> None:
    from transformers import AutoModelForMaskedLM, BertConfig, MistralConfig, MistralForCausalLM

    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    bert = BertConfig(
        **small, num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0
    )
    mistral = MistralConfig(**small, num_attention_heads=4, num_key_value_heads=2, sliding_window=5)

    def encoder() -> Any:
        torch.manual_seed(0)
        return AutoModelForMaskedLM.from_config(bert).double().train()

    def windowed() -> Any:
        torch.manual_seed(0)
        return MistralForCausalLM(mistral).double().train()

    for make in (encoder, windowed):
        with tiling_by_hand(SOME, Step(0, seed=1)):
            _, by_hand = dense(make(), 16, PADDED)
        _, gradient = attached(make(), SOME, 16, PADDED)
        assert differ(gradient, by_hand) < 1e-14
        assert differ(attached(make(), ALL, 16, PADDED)[1], dense(make(), 16, PADDED)[1]) < 1e-14


def test_bfloat16_is_as_close_to_the_dense_gradient_as_rounding_lets_it() -> None:
    _, gradient = dense(made().to(torch.bfloat16))
    _, ours = attached(made().to(torch.bfloat16), ALL)
    assert differ(ours, gradient) < 0.05


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(attn_implementation="eager"), "skips tiles of transformers' attention sdpa, got eager"),
        (lambda: nn.Linear(3, 3), "attention sdpa, got Linear, which has none"),
        (
            lambda: made("llama", attention_dropout=0.1),
            "'model.layers.0.self_attn' has dropout, which is not supported",
        ),
    ],
)
def test_another_attention_is_refused(make: Any, message: str) -> None:
    model = make()
    with pytest.raises(UnsupportedError, match=message), sbp.attach(model, SOME) as engine:
        engine.backward(loss_of(model))
    assert find_attention().__module__.startswith("transformers.")


def test_an_attention_that_is_no_softmax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: 1.01 * own(*a, **k))
    model = made()
    with sbp.attach(model, SOME), pytest.raises(UnsupportedError, match="does not compute the softmax of scaled"):
        loss_of(model)


def test_a_backward_without_its_forward_is_refused() -> None:
    model = made()
    loss = loss_of(model)
    with sbp.attach(model, SOME) as engine, pytest.raises(UsageError, match="BackLite was not called"):
        engine.backward(loss)


class Broken(BackLite):
    """Of another shape."""

    def select(self, mass_HQK: Tensor, tiles: AttentionTiles, step: Step) -> Tensor:
        return super().select(mass_HQK, tiles, step)[0]


def test_a_choice_of_another_shape_is_refused() -> None:
    model = made()
    with sbp.attach(model, Broken(tile=4)) as engine, pytest.raises(PolicyError, match=r"must return bool of shape"):
        engine.backward(loss_of(model))


def test_rows_of_other_policies_are_refused_together() -> None:
    for other in ({"name": "tokens", "score": "random", "keep": 0.5}, "lossless"):
        with pytest.raises(UnsupportedError, match="in one forward is not supported"):
            sbp.attach(made(), [SOME, other], num_steps=10)
    with pytest.raises(UnsupportedError, match="needs sites='linears', got 'nodes'"):
        sbp.attach(made(), SOME, sites="nodes")
