"""A layer that gets some positions only: the others bypass it, and their gradient does too."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.asset.checkpointing import checkpoint_activations
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Step
from sparsebp_shelf.token_router import RandomLTD, RoutedLayer, TokenRouter
from sparsebp_shelf.token_router.suite import check_token_router
from tests.backward.conftest import tiny_model, tokens
from tests.proof import prove

NUM_STEPS, LENGTH, KEPT = 10, 16, 6
POLICY = RandomLTD(min_tokens=KEPT, max_tokens=12, increase_step=1)
FAMILIES = ("llama", "gpt2", "qwen3", "gpt_neox", "gemma2")
PADDED = torch.tensor([[1] * LENGTH, [1] * 11 + [0] * 5])
LAYERS = {"gpt2": {"n_layer": 4}}


def made(family: str = "llama", **options: Any) -> Any:
    off = {"gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}}.get(family, {})
    return tiny_model(family, **(LAYERS.get(family, {"num_hidden_layers": 4}) | off | options)).double()


def layers_of(model: Any) -> Any:
    inner = getattr(model, "model", None) or getattr(model, "transformer", None) or model.gpt_neox
    return getattr(inner, "layers", None) or inner.h


def attach(model: nn.Module, policy: Any = POLICY, **options: Any) -> Any:
    return sbp.attach(model, policy, **{"seed": 1, "num_steps": NUM_STEPS} | options)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def forward(model: Any, mask: Tensor | None = None) -> Tensor:
    ids = tokens(0)
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    return loss


def route_by_mask(model: Any, policy: Any, step: Step) -> None:
    """Run every layer on all positions: no position sees one that bypasses, and those get their input back."""
    layers = layers_of(model)
    for number, layer in enumerate(layers):
        at = RoutedLayer(number, len(layers), 2, LENGTH)
        if policy.count(at, step) == LENGTH:
            continue
        kept = torch.zeros(2, LENGTH, dtype=torch.bool).scatter_(1, policy.route(at, step), True)
        layer.forward = _Masked(layer, kept)


class _Masked:
    def __init__(self, layer: Any, kept_BT: Tensor) -> None:
        self.layer, self.kept_BT = layer, kept_BT

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = ("cache", "attention_mask") if type(self.layer).__name__ == "GPT2Block" else ()
        kwargs |= dict(zip(names, args, strict=False))
        if "past_key_values" in signature(type(self.layer).forward).parameters and "cache" in kwargs:
            kwargs["past_key_values"] = kwargs.pop("cache")
        given = kwargs.get("attention_mask")
        allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
        if given is not None:
            allowed = allowed & (given if given.dtype == torch.bool else given > -1.0)
        allowed = (allowed & self.kept_BT[:, None, None, :]) | torch.eye(LENGTH, dtype=torch.bool)
        kwargs["attention_mask"] = torch.zeros(allowed.shape, dtype=hidden.dtype).masked_fill(~allowed, -torch.inf)
        output = type(self.layer).forward(self.layer, hidden, **kwargs)
        return torch.where(self.kept_BT[:, :, None], output, hidden)


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_a_forward_of_all_positions_with_the_others_masked(family: str, mask: Tensor | None) -> None:
    model, reference = made(family), made(family)
    route_by_mask(reference, POLICY, Step(0, seed=1, num_steps=NUM_STEPS))
    expected = forward(reference, mask)
    expected.backward()
    engine = attach(model)
    loss = forward(model, mask)
    engine.backward(loss)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)  # transformers computes the loss in float32
    ours, theirs = gradients(model), gradients(reference)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-7, msg=name)
    model.zero_grad()
    with engine.disabled():
        assert abs(float(forward(model, mask).detach() - loss.detach())) > 1e-6


def test_the_gradient_of_a_position_that_bypasses_is_the_identity() -> None:
    model, seen = made(), list[Tensor]()
    engine = attach(model)
    layer = layers_of(model)[2]
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]) or args[0].retain_grad())
    layer.register_forward_hook(lambda module, args, output: seen.append(output) or output.retain_grad())
    engine.backward(forward(model))
    before, after = seen
    step = Step(0, seed=1, num_steps=NUM_STEPS)
    kept = torch.zeros(2, LENGTH, dtype=torch.bool).scatter_(1, POLICY.route(RoutedLayer(2, 4, 2, LENGTH), step), True)
    assert torch.equal(before[~kept], after[~kept])
    assert torch.equal(before.grad[~kept], after.grad[~kept])
    assert not torch.isclose(before.grad[kept], after.grad[kept]).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_with_all_positions_every_bit_is_the_dense_one(family: str) -> None:
    model = made(family)
    forward(model, PADDED).backward()
    expected = gradients(model)
    model.zero_grad()
    engine = attach(model, RandomLTD(min_tokens=LENGTH))
    engine.backward(forward(model, PADDED))
    found = gradients(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_checkpointed_layers_get_the_same_positions_again() -> None:
    plain, again = made(), made()
    checkpoint_activations(again)
    for model in (plain, again):
        attach(model).backward(forward(model))
    theirs = gradients(again)
    assert all(torch.equal(theirs[name], gradient) for name, gradient in gradients(plain).items())


def test_evaluation_is_dense_and_detaching_gives_the_model_back() -> None:
    model = made().eval()
    dense = model(input_ids=tokens(0)).logits
    engine = attach(model)
    assert torch.equal(model(input_ids=tokens(0)).logits, dense)
    model.train()
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens(0)).logits, dense)
    with engine.disabled():
        assert torch.equal(model(input_ids=tokens(0)).logits, dense)
    assert not torch.equal(model(input_ids=tokens(0)).logits, dense)
    assert "38% of the positions or more go through each layer" in str(engine.report())
    engine.detach()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_claimed_is_executed(family: str, checkpointing: bool) -> None:
    model = made(family)
    if checkpointing:
        checkpoint_activations(model)
    engine = attach(model)
    proof = prove(model, engine, lambda: forward(model), checkpointing=checkpointing)
    if not checkpointing:
        assert proof.policy.saved.total < 0.85 * proof.dense.saved.total


def test_the_number_grows_as_published() -> None:
    policy, layer = RandomLTD(min_tokens=128, max_tokens=512), RoutedLayer(1, 4, 1, 1024)
    found = [policy.count(layer, Step(index, num_steps=100)) for index in (0, 10, 50, 99, 100)]
    assert found == [128, 160, 320, 496, 512]
    half = RandomLTD(min_tokens=128, max_tokens=512, over=0.5)
    assert [half.count(layer, Step(index, num_steps=100)) for index in (0, 5, 25, 50, 99)] == [128, 160, 320, 512, 512]
    assert policy.count(RoutedLayer(1, 4, 1, 64), Step(0, num_steps=100)) == 64
    assert {policy.count(RoutedLayer(n, 4, 1, 1024), Step(0, num_steps=100)) for n in (0, 3)} == {1024}


def test_every_layer_example_and_micro_batch_has_its_own_draw_each_position_as_often() -> None:
    step = Step(0, num_steps=NUM_STEPS)
    one, other = (POLICY.route(RoutedLayer(n, 4, 2, LENGTH), step) for n in (1, 2))
    later = POLICY.route(RoutedLayer(1, 4, 2, LENGTH), Step(0, 1, num_steps=NUM_STEPS))
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, later)
    many = POLICY.route(RoutedLayer(1, 4, 4000, LENGTH), step)
    share = torch.bincount(many.flatten(), minlength=LENGTH) / 4000
    rate = KEPT / LENGTH
    assert bool(((share - rate).abs() < 5 * (rate * (1 - rate) / 4000) ** 0.5).all())


def test_what_is_not_built_is_refused_by_name() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    with pytest.raises(UsageError, match=r"RandomLTD: its number of positions grows .* attach\(num_steps=...\)"):
        sbp.attach(model, POLICY)
    for other in ({"name": "topk", "keep": 0.5}, {"name": "dropbp", "keep": 0.5}, {"name": "lossless"}):
        with pytest.raises(UnsupportedError, match="in one forward is not supported"):
            attach(model, [other, POLICY], optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(UnsupportedError, match="segments run the layers without gradients first"):
        attach(model, segments=2)
    with pytest.raises(UnsupportedError, match="needs sites='linears'"):
        attach(model, sites="nodes")
    with pytest.raises(UnsupportedError, match=r"not supported with torch\.compile"):
        attach(torch.compile(model, backend="eager"))
    with pytest.raises(PolicyError, match="max_tokens must be at least min_tokens 128, got 64"):
        sbp.make_policy("random-ltd", max_tokens=64)
    model.eval()
    with pytest.raises(UsageError, match="was not called"):
        attach(model).backward(forward(model))


class _First(TokenRouter):
    """The first half of the positions, in every layer."""

    @property
    def exact(self) -> bool:
        return False

    def count(self, layer: RoutedLayer, step: Step) -> int:
        return layer.length // 2

    def route(self, layer: RoutedLayer, step: Step) -> Tensor:
        return torch.arange(layer.length // 2).expand(layer.num_examples, -1)


class _Backwards(_First):
    def route(self, layer: RoutedLayer, step: Step) -> Tensor:
        return super().route(layer, step).flip(1)


class _Many(_First):
    def count(self, layer: RoutedLayer, step: Step) -> int:
        return 2 * layer.length


class _Exact(_First):
    @property
    def exact(self) -> bool:
        return True


class _Global(_First):
    def route(self, layer: RoutedLayer, step: Step) -> Tensor:
        torch.rand(1)
        return super().route(layer, step)


def test_a_router_of_ones_own_is_carried_out_in_every_layer() -> None:
    check_token_router(_First())
    model = made()
    engine = attach(model, _First())
    engine.backward(forward(model))
    assert "50% of the positions" in str(engine.report())


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (_Backwards, "positions must ascend"),
        (_Many, "count must be a whole number"),
        (_Exact, "says it is exact"),
        (_Global, "uses a global random generator"),
    ],
)
def test_the_suite_finds_a_broken_promise(policy: type[TokenRouter], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_token_router(policy())


@pytest.mark.parametrize(
    ("policy", "text"), [(_Backwards, "in ascending order"), (_Many, "must be from 1 to .*, got 32")]
)
def test_a_broken_router_is_refused_in_the_forward(policy: type[TokenRouter], text: str) -> None:
    model = made()
    attach(model, policy())
    with pytest.raises(PolicyError, match=text):
        forward(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_adapters_get_the_gradient_of_the_masked_forward() -> None:
    from peft import LoraConfig, get_peft_model

    found = []
    for routed in (False, True):
        model: Any = get_peft_model(made(), LoraConfig(r=2, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        model.double()
        if routed:
            attach(model).backward(forward(model))
        else:
            route_by_mask(model.base_model.model, POLICY, Step(0, seed=1, num_steps=NUM_STEPS))
            forward(model).backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_under_autocast_it_is_near_the_gradient_of_double_precision() -> None:
    exact, coarse = made(), made().float()
    attach(exact).backward(forward(exact))
    engine = attach(coarse)
    with torch.autocast("cpu", torch.bfloat16):
        loss = forward(coarse)
    engine.backward(loss)
    both = [torch.cat([g.double().flatten() for g in gradients(model).values()]) for model in (exact, coarse)]
    assert float(torch.nn.functional.cosine_similarity(*both, 0)) > 0.99
