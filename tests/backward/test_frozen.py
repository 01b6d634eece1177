"""Nothing is computed or kept for parameters that are not trained, and what is trained has its dense gradient."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsebp_cli as sbp
from sparsebp_cli.backward import ModuleTrace, count_flops, saved_bytes
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

from .conftest import tiny_model, tokens
from .families import tiny_decoder
from .lora_theory import B, T, lora_llama, needed_bytes, needed_flops

EQUAL, UNEQUAL = (32, 32, 32, 32, 32), (32, 64, 128, 64, 32)
ROWS = 32


def stack(widths: tuple[int, ...], *, bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(wide, high, bias=bias) for wide, high in itertools.pairwise(widths)))


def counted(model: nn.Module, engine: Any, forward: Any) -> tuple[dict[str, int], dict[str, int], Tensor]:
    """Return FLOPs of the backward and bytes that are kept, by module, and the loss."""
    with ModuleTrace(model) as trace, count_flops(trace) as flops:
        with saved_bytes(model.parameters(), trace) as saved:
            loss = forward()
        engine.backward(loss)
    return (
        {name: count for name, count in flops.backward.items() if count},
        {name: count for name, count in saved.by_module.items() if count},
        loss.detach(),
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [EQUAL, UNEQUAL])
@pytest.mark.parametrize("input_wants", [True, False])
@pytest.mark.parametrize("frozen", [(0, 2), (1, 3), (0, 1), (2, 3), (0, 1, 2)])
def test_a_stack_multiplies_and_keeps_what_theory_needs_to_the_byte(bias, widths, input_wants, frozen) -> None:
    model = stack(widths, bias=bias)
    x = torch.randn(ROWS, widths[0], requires_grad=input_wants)
    engine = sbp.attach(model, [sbp.make_policy("frozen", freeze=[f"{number}.*" for number in frozen])])
    flops, saved, _ = counted(model, engine, lambda: model(x).sum())
    trained = [number for number in range(4) if number not in frozen]
    needed = {
        str(number): 2 * ROWS * wide * high * ((number in trained) + (input_wants or any(t < number for t in trained)))
        for number, (wide, high) in enumerate(itertools.pairwise(widths))
    }
    assert flops == {name: count for name, count in needed.items() if count}
    assert saved == {str(number): ROWS * widths[number] * 4 for number in trained}
    assert {name.partition(".")[0] for name in gradients(model)} == {str(number) for number in trained}
    assert (x.grad is not None) == input_wants


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_weight_and_bias_are_frozen_apart(frozen) -> None:
    model = stack(UNEQUAL, bias=True)
    engine = sbp.attach(model, [sbp.make_policy("frozen", freeze=[f"*.{frozen}"])])
    flops, saved, _ = counted(model, engine, lambda: model(torch.randn(ROWS, 32)).sum())
    assert {name.rpartition(".")[2] for name in gradients(model)} == {"weight", "bias"} - {frozen}
    wgrads = 0 if frozen == "weight" else 4
    assert sum(flops.values()) == 2 * ROWS * (64 * 128 + 128 * 64 + 64 * 32 + (32 * 64 if wgrads else 0)) + (
        2 * ROWS * (64 * 128 + 128 * 64 + 64 * 32) if wgrads else 0
    )
    assert len(saved) == wgrads


class _Cut(torch.autograd.Function):
    """Its output requires a gradient like that of any other operator; it never returns one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        return None


def test_no_product_runs_for_a_gradient_that_is_never_returned() -> None:
    """Intermediates on the way all say that they require a gradient; what arrives decides."""
    model = stack(UNEQUAL, bias=True)
    engine = sbp.attach(model, [sbp.make_policy("frozen", freeze=["0.weight"])])
    x = torch.randn(ROWS, 32, requires_grad=True)

    def forward() -> Tensor:
        middle = model[1](model[0](x))
        assert middle.requires_grad
        cut: Tensor = _Cut.apply(middle)  # type: ignore[no-untyped-call]
        output: Tensor = model[3](model[2](cut))
        return output.sum()

    flops, _, _ = counted(model, engine, forward)
    assert set(flops) == {"2", "3"}
    assert {name.partition(".")[0] for name in gradients(model)} == {"2", "3"}
    assert x.grad is None


@pytest.mark.parametrize("lowest", [0, 1, 2])
def test_adapters_of_a_llama_multiply_and_keep_what_theory_needs_to_the_byte(lowest) -> None:
    model = lora_llama(3)
    names = [f"*layers.{number}" for number in range(lowest, 3)]
    engine = sbp.attach(model, [sbp.make_policy("frozen", train=names)])
    ids = tokens(0, B, T)
    flops, saved, _ = counted(model, engine, lambda: model(input_ids=ids, labels=ids).loss)
    assert flops == needed_flops(3, lowest)
    assert saved == needed_bytes(3, lowest)


TOP = {"gpt2": "transformer.h.1", "gpt_neox": "gpt_neox.layers.1"}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gpt2", "olmo2"],
)
def test_nothing_at_all_runs_below_the_lowest_trained_layer(family, checkpointing) -> None:
    top = TOP.get(family, "model.layers.1")
    model = tiny_decoder(family, checkpointing=checkpointing)
    dense, ids = copy.deepcopy(model), tokens(0)
    for each, policies in ((dense, []), (model, [sbp.make_policy("frozen", train=[top])])):
        engine = sbp.attach(each, policies)
        torch.manual_seed(0)  # of dropout
        engine.backward(each(input_ids=ids, labels=ids, use_cache=False).loss)
    ours, theirs = gradients(model), gradients(dense)
    assert set(ours) == {name for name in theirs if name.startswith(top)}
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name
    with ModuleTrace(model) as trace, count_flops(trace) as flops:
        with saved_bytes(model.parameters(), trace) as saved:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
    below = top.replace(".1", ".0")
    for name in {**flops.backward, **flops.recomputed, **saved.by_module}:
        assert not name.startswith(below), name
        assert "embed" not in name, name
        assert "wte" not in name, name


def test_training_a_tied_head_trains_the_embedding_and_says_so() -> None:
    model = tiny_model("gpt2")
    engine = sbp.attach(model, [sbp.make_policy("frozen", train=["lm_head"])])
    ids = tokens(0)
    flops, _, _ = counted(model, engine, lambda: model(input_ids=ids, labels=ids).loss)
    assert set(gradients(model)) == {"transformer.wte.weight"}
    assert any(name.startswith("transformer.h.0") for name in flops)
    assert "transformer.wte.weight is also lm_head.weight" in engine.report().notes[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_embeddings_made_to_require_a_gradient_do_not_prolong_the_backward(checkpointing) -> None:
    model = tiny_decoder("llama", checkpointing=checkpointing)
    model.enable_input_require_grads()
    ids = tokens(0)

    def forward() -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    engine = sbp.attach(model, [sbp.make_policy("frozen", train=["model.layers.1", "lm_head"])])
    flops, _, _ = counted(model, engine, forward)
    assert not any(name.startswith("model.layers.0") for name in flops)
    engine.detach()
    plain = sbp.attach(model, [])
    assert any(name.startswith("model.layers.0") for name in counted(model, plain, forward)[0])


def test_reentrant_checkpointing_is_refused_by_name() -> None:
    model = tiny_model("llama")
    checkpoint_activations(model, use_reentrant=True)
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        sbp.attach(model, [sbp.make_policy("frozen", train=["lm_head"])])


def test_what_is_not_trained_keeps_no_gradient_of_an_earlier_step() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    turns = sbp.make_policy("frozen", turn="layers", order="ascending", freeze=["*embed*", "*norm*", "lm_head"])
    names = dict(model.named_parameters())
    with sbp.attach(model, [turns], optimizer=optimizer) as engine:
        for index in range(4):
            before = {name: p.detach().clone() for name, p in names.items()}
            states = {name: copy.deepcopy(optimizer.state[p]) for name, p in names.items() if p in optimizer.state}
            for micro in range(2):  # accumulation
                ids = tokens(2 * index + micro)
                engine.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()  # and no zero_grad: what goes out of turn must not be applied again
            for name, parameter in names.items():
                in_turn = name.startswith(f"model.layers.{index % 3}.") and "norm" not in name
                assert torch.equal(parameter, before[name]) != in_turn, name
                if not in_turn and name in states:
                    assert torch.equal(states[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])
                    assert states[name]["step"] == optimizer.state[parameter]["step"]
            assert all(p.grad is None for p in names.values() if not p.requires_grad)
            optimizer.zero_grad()
    assert {float(optimizer.state[p]["step"]) for p in names.values() if p in optimizer.state} == {1.0, 2.0}
    assert all(p.requires_grad for p in names.values())


@pytest.mark.parametrize("sites", ["linears", "nodes"])
def test_other_policies_decide_about_what_is_left(sites) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    same, ids = copy.deepcopy(model), tokens(0)
    top = sbp.make_policy("topk", keep=0.25, along="rows")
    with sbp.attach(same, [top], sites=sites) as engine:
        engine.backward(same(input_ids=ids, labels=ids).loss)
    frozen = sbp.make_policy("frozen", freeze=["model.embed_tokens", "*layers.0", "*q_proj*", "*layernorm*"])
    engine = sbp.attach(model, [frozen, top], sites=sites)
    engine.backward(model(input_ids=ids, labels=ids).loss)
    ours, theirs = gradients(model), gradients(same)
    assert 0 < len(ours) < len(theirs)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-7, msg=name)
    assert not {name for name in ours if "layers.0" in name or "q_proj" in name or "embed" in name}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tokens", {"score": "mask", "mode": "exact"}),
        ("tokens", {"score": "mask", "mode": "detach"}),
        ("uniform", {"keep": 0.5}),
        ("selective-backprop", {"keep": 0.5}),
    ],
)
def test_tokens_and_examples_are_chosen_beside_it_in_either_order(name, options) -> None:
    frozen = sbp.make_policy("frozen", freeze=["*embed*", "*layers.0*", "*up_proj*"])
    other, ids = sbp.make_policy(name, **options), tokens(0)
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < 8, -100)
    found = []
    for policies in ([other], [frozen, other], [other, frozen]):
        model = tiny_model("llama", num_hidden_layers=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sbp.attach(model, policies, optimizer=optimizer, num_steps=4) as engine:
            engine.backward(model(input_ids=ids, labels=labels).loss)
            found.append(gradients(model))
        assert all(p.requires_grad for p in model.parameters())
    alone, one, another = found
    assert one.keys() == another.keys() == {n for n in alone if not any(f in n for f in ("embed", "rs.0.", "up_proj"))}
    for key, gradient in one.items():
        assert torch.equal(gradient, another[key]), key
        torch.testing.assert_close(gradient, alone[key], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("way", [{"update": "eager"}, {"segments": 2}, {"sites": "nodes"}])
def test_turns_train_to_the_same_weights_in_every_way_of_carrying_a_step_out(way) -> None:
    weights = []
    for options in ({}, way):
        model = tiny_model("llama", num_hidden_layers=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        turns = sbp.make_policy("frozen", turn="layers", freeze=["*embed*"])
        with sbp.attach(model, [turns], optimizer=optimizer, **options) as engine:
            for index in range(5):
                ids = tokens(index)
                engine.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
        weights.append({name: p.detach() for name, p in model.named_parameters()})
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


def test_disabled_is_the_model_without_the_policy_bit_for_bit() -> None:
    model = tiny_model("qwen2")
    plain, ids = copy.deepcopy(model), tokens(0)
    plain(input_ids=ids, labels=ids).loss.backward()
    engine = sbp.attach(model, [sbp.make_policy("frozen", train=["model.norm"])])
    with engine.disabled():
        model(input_ids=ids, labels=ids).loss.backward()
    ours, theirs = gradients(model), gradients(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], gradient) for name, gradient in theirs.items())
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["model.norm.weight"]


def test_what_cannot_be_combined_is_refused_by_name_and_changes_nothing() -> None:
    turns, top = sbp.make_policy("frozen", turn="layers"), sbp.make_policy("frozen", train=["lm_head"])
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"needs attach\(optimizer=\.\.\.\)"):
        sbp.attach(model, [turns])
    with pytest.raises(UnsupportedError, match=r"torch.compile would compile again for each set"):
        sbp.attach(torch.compile(model, backend="eager"), [turns], optimizer=optimizer)
    with pytest.raises(UnsupportedError, match="make the same decision"):
        sbp.attach(model, [turns, top], optimizer=optimizer)
    with pytest.raises(PolicyError, match="did you mean lm_head"):
        sbp.attach(model, [sbp.make_policy("frozen", freeze=["lm_haed"])])
    with pytest.raises(PolicyError, match="'turn: layers' needs a transformer layer with trainable parameters"):
        sbp.attach(model, [sbp.make_policy("frozen", train=["lm_head"], turn="layers")], optimizer=optimizer)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_ddp_around_the_model_before_it_is_attached_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped(DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:  # a process group is not needed to be refused
            nn.Module.__init__(self)
            self.module = module

    with pytest.raises(UnsupportedError, match="call attach before you wrap the model in DDP"):
        sbp.attach(Wrapped(tiny_model("llama")), [sbp.make_policy("frozen", train=["lm_head"])])


def test_what_the_user_freezes_or_thaws_meanwhile_stays_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sbp.attach(model, [sbp.make_policy("frozen", freeze=["0"])], optimizer=optimizer) as engine:

        def step() -> list[bool]:
            before = [layer.weight.clone() for layer in model]
            engine.backward(model(torch.ones(2, 4)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
            return [not torch.equal(old, layer.weight) for old, layer in zip(before, model, strict=True)]

        assert step() == [False, True, True, True]
        model[2].requires_grad_(False)
        assert step() == [False, True, False, True]
        model[0].requires_grad_(True)  # the policy says at the next forward again that it is not
        assert step() == [False, True, False, True]
        model[2].requires_grad_(True)
        assert step() == [False, True, True, True]
        model[3].requires_grad_(False)
    assert [layer.weight.requires_grad for layer in model] == [True, True, True, False]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("update", ["deferred", "eager"])
@pytest.mark.parametrize("between", [False, True])
def test_a_reference_without_adapters_thaws_no_layer_that_rests(update, checkpointing, between) -> None:
    """peft's ``disable_adapter()``, as trl runs it for the reference model, sets ``requires_grad`` of all adapters."""
    model, ids = lora_llama(3), tokens(0)
    if checkpointing:
        checkpoint_activations(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.1)

    def run_reference() -> None:
        with model.disable_adapter(), torch.no_grad():
            model(input_ids=ids)

    with sbp.attach(model, {"name": "frozen", "turn": "layers"}, optimizer=optimizer, update=update) as engine:
        for turn in (2, 1, 0):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            for number in range(2):  # micro-batches
                if not between:
                    run_reference()
                loss = model(input_ids=ids, labels=ids).loss
                if between:
                    run_reference()
                engine.backward(loss, is_last=number == 1)
            optimizer.step()
            optimizer.zero_grad()
            moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
            assert moved
            assert all(f"layers.{turn}." in name for name in moved)
    assert all(p.requires_grad for p in adapters)
