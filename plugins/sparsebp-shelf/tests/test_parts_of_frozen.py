"""Parts of the weights under adapters: both are trained, and nothing else is (RoSA)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_cli.errors import UsageError
from sparsebp_shelf.part import WeightElements
from tests.backward.conftest import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft
BATCHES = [torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(n)) for n in range(4)]
POLICY = {"name": "subnet", "of": "frozen", "elements": ["*.base_layer"], "keep": 0.01}


def adapted() -> nn.Module:
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return model.train()


def loss_of(model: Any, number: int = 0) -> Tensor:
    ids = BATCHES[number % len(BATCHES)]
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)


def parts_of(engine: Any) -> dict[str, tuple[WeightElements, nn.Parameter]]:
    (extension,) = (part for part in engine.extensions if hasattr(part, "_overrides"))
    return {name: (each.part, each.leaf) for name, each in extension._overrides.items()}


def train(model: Any, engine: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        engine.run_trials(lambda: loss_of(model), others=[lambda: loss_of(model, 1)])
        engine.backward(loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("execution", ["fast", "reference"])
def test_gradients_are_the_dense_ones_restricted_and_those_of_the_adapters_alone(execution: Any) -> None:
    model, dense, alone = adapted(), adapted(), adapted()
    engine = sbp.attach(model, POLICY | {"by": "random"}, optimizer=optimizer_of(model), execution=execution)
    engine.backward(loss_of(model))
    for name, parameter in dense.named_parameters():
        parameter.requires_grad_("base_layer" in name or parameter.requires_grad)
    loss_of(dense).backward()
    loss_of(alone).backward()
    modules, found = dict(dense.named_modules()), parts_of(engine)
    assert len(found) == 4
    for name, (part, leaf) in found.items():
        torch.testing.assert_close(leaf.grad, part.restrict(modules[name].weight.grad), rtol=1e-5, atol=1e-7)
    own = dict(model.named_parameters())
    for name, parameter in alone.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-5, atol=1e-7)
        else:
            assert own[name].grad is None


def test_parts_and_adapters_are_trained_and_the_optimizer_has_state_of_them_alone() -> None:
    model = adapted()
    before, optimizer = copy.deepcopy(model.state_dict()), optimizer_of(model)
    listed = list(optimizer.param_groups[0]["params"])
    engine = sbp.attach(model, POLICY, optimizer=optimizer)
    train(model, engine, optimizer, range(3))
    chosen = {name: part.index_K for name, (part, _) in parts_of(engine).items()}
    numbers = sum(len(index_K) for index_K in chosen.values()) + sum(p.numel() for p in listed)
    held = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert sum(value.nbytes for value in held) == 2 * 4 * numbers
    state = {id(p): optimizer.state[p] for p in listed}
    engine.detach()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in listed]
    assert all(optimizer.state[p] is state[id(p)] for p in listed)
    for name, parameter in model.named_parameters():
        moved = (parameter != before[name]).flatten().nonzero().flatten()
        linear = name.removesuffix(".weight")
        assert parameter.requires_grad == ("lora_" in name)
        if linear in chosen:
            assert torch.equal(moved, chosen[linear])
        else:
            assert bool(len(moved)) == ("lora_" in name), name


def test_the_entries_are_those_of_largest_gradients_over_the_batches() -> None:
    model, dense = adapted(), adapted()
    engine = sbp.attach(model, POLICY | {"batches": 2}, optimizer=optimizer_of(model))
    engine.run_trials(lambda: loss_of(model), others=[lambda: loss_of(model, 1)])
    sums: dict[str, Tensor] = {}
    for number in range(2):
        for name, parameter in dense.named_parameters():
            parameter.requires_grad_("base_layer" in name)
            parameter.grad = None
        loss_of(dense, number).backward()
        for name, parameter in dense.named_parameters():
            if parameter.grad is not None:
                key = name.removesuffix(".weight")
                sums[key] = sums.get(key, torch.zeros(())) + parameter.grad.abs()
    for name, (part, _) in parts_of(engine).items():
        count = round(0.01 * sums[name].numel())
        assert part.index_K.tolist() == sums[name].flatten().topk(count).indices.sort().values.tolist()
    assert all(p.requires_grad == ("lora_" in n) for n, p in model.named_parameters())


def test_a_resumed_run_trains_on_with_the_same_parts_bit_for_bit() -> None:
    straight, resumed = adapted(), adapted()
    optimizer = optimizer_of(straight)
    engine = sbp.attach(straight, POLICY, optimizer=optimizer)
    train(straight, engine, optimizer, range(4))
    first = optimizer_of(resumed)
    engine = sbp.attach(resumed, POLICY, optimizer=first)
    train(resumed, engine, first, range(2))
    state, moments = engine.state_dict(), copy.deepcopy(first.state_dict())
    engine.detach()
    second = optimizer_of(resumed)
    engine = sbp.attach(resumed, POLICY, optimizer=second)
    second.load_state_dict(moments)
    engine.load_state_dict(state)
    train(resumed, engine, second, range(2, 4))
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_without_the_policy_weights_and_adapters_are_trained_whole() -> None:
    model = adapted()
    engine = sbp.attach(
        model,
        {"name": "subnet", "of": "frozen", "columns": ["*.base_layer"], "keep": 0.25, "by": "random"},
        optimizer=optimizer_of(model),
        exclude=["*lm_head"],
    )
    with engine.disabled():
        assert all(p.requires_grad for n, p in model.named_parameters() if "base_layer" in n)
        loss = loss_of(model)
        with count_flops() as dense:
            loss.backward()
    model.zero_grad()
    loss = loss_of(model)
    with count_flops() as executed:
        engine.backward(loss)
    rows = BATCHES[0].numel()
    modules = dict(model.named_modules())
    wgrads = {name: 2 * rows * modules[name].weight.numel() for name in parts_of(engine)}
    others = sum(  # frozen linears without an adapter
        2 * rows * module.weight.numel()
        for name, module in modules.items()
        if type(module) is nn.Linear and "lora" not in name and "base_layer" not in name and name.count("layers")
    )
    assert dense.total - executed.total == 0.75 * sum(wgrads.values()) + others


def test_an_optimizer_with_state_is_refused() -> None:
    model = adapted()
    optimizer = optimizer_of(model)
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(
        UsageError, match="adds parts of frozen weights to the optimizer, but the optimizer already has state"
    ):
        sbp.attach(model, POLICY, optimizer=optimizer)
