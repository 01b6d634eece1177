"""Linears in float8 give torchao's numbers, and neither multiply nor keep what nobody reads. torchao is the control."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import sparsebp_cli as sbp
from sparsebp_cli.backward import ModuleTrace, count_flops, saved_bytes
from sparsebp_cli.errors import DataError
from sparsebp_cli.policy import Policy
from sparsebp_cli.worker.model import convert_to_float8

from .conftest import tiny_model, tokens
from .lora_theory import B, T, lora_llama, needed_bytes, needed_flops
from .test_frozen import EQUAL, ROWS, UNEQUAL, _Cut, stack

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
SCALE = 4  # bytes of the one factor of a cast with one scale


def float8_stack(
    widths: tuple[int, ...],
    recipe: str,
    *,
    bias: bool,
    frozen: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    model = stack(widths, bias=bias).to(dtype)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(model, config=config)
    for number in frozen:
        model[number].weight.requires_grad_(False)
    return model


@dataclasses.dataclass
class Ran:
    """What a pass gave, multiplied and kept, by module."""

    numbers: list[Tensor | None]
    flops: dict[str, int]
    products: int
    saved: dict[str, int]


def run(model: nn.Module, forward: Any, policies: list[Policy] | None) -> Ran:
    """Run a copy of a model: stock, where ``policies`` is None, or attached."""
    mine = copy.deepcopy(model)
    engine = None if policies is None else sbp.attach(mine, policies)
    loss, x = forward(mine)
    loss.backward() if engine is None else engine.backward(loss)
    numbers = [loss.detach(), x.grad if x is not None else None, *(p.grad for p in mine.parameters())]
    mine.zero_grad()
    with ModuleTrace(mine) as trace, count_flops(trace) as flops:
        with saved_bytes(mine.parameters(), trace) as saved:
            loss, _ = forward(mine)
        with count_flops() as backward:
            loss.backward() if engine is None else engine.backward(loss)
    one = {name: flops.forward[name] for name in flops.forward}
    products = sum(count // one[name] for name, count in flops.backward.items() if one.get(name))
    assert backward.total == flops.backward.total()
    kept = {name: count for name, count in saved.by_module.items() if name}  # without what the loss itself keeps
    return Ran(numbers, {name: count for name, count in flops.backward.items() if count}, products, kept)


def feed(*shape: int, dtype: torch.dtype = torch.float32, input_wants: bool = True) -> Any:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def forward(model: nn.Module) -> tuple[Tensor, Tensor]:
        mine = x.clone().requires_grad_(input_wants)
        return (model(mine).float() ** 2).sum(), mine

    return forward


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(ROWS, 32), (2, ROWS // 2, 32)])
@pytest.mark.parametrize("frozen", [(), (0, 2), (0, 1, 2, 3)])
def test_every_number_is_torchaos_to_the_last_bit(recipe, bias, dtype, shape, frozen) -> None:
    model = float8_stack(UNEQUAL, recipe, bias=bias, frozen=frozen, dtype=dtype)
    forward = feed(*shape, dtype=dtype)
    ours, stock = run(model, forward, []), run(model, forward, None)
    assert same(ours.numbers, stock.numbers)
    assert ours.products == 8 - len(frozen)
    assert stock.products == 8


def test_inputs_that_do_not_lie_in_a_row_and_autocast_change_no_bit() -> None:
    model = float8_stack(UNEQUAL, "tensorwise", bias=True)
    x = torch.randn(32, 4, 8, generator=torch.Generator().manual_seed(1))

    def forward(each: nn.Module) -> tuple[Tensor, None]:
        with torch.autocast("cpu", torch.bfloat16):
            return each(x.permute(1, 2, 0)).float().square().sum(), None

    assert same(run(model, forward, []).numbers, run(model, forward, None).numbers)


@pytest.mark.parametrize("widths", [EQUAL, UNEQUAL])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_with_every_second_weight_frozen_does_what_theory_needs(widths, recipe, dtype) -> None:
    """torchao multiplies eight times where six products have a reader, and keeps every input in high precision."""
    model = float8_stack(widths, recipe, bias=False, dtype=dtype)
    forward = feed(ROWS, 32, dtype=dtype)
    ours = run(model, forward, [sbp.make_policy("frozen", freeze=["0", "2"])])
    sizes = list(itertools.pairwise(widths))
    assert ours.flops == {
        str(number): 2 * ROWS * wide * high * (1 + number % 2) for number, (wide, high) in enumerate(sizes)
    }
    size = 1 if recipe == "tensorwise" else dtype.itemsize
    scale = SCALE if recipe == "tensorwise" else 0
    assert ours.saved == {str(number): ROWS * widths[number] * size + scale for number in (1, 3)}
    for number in (0, 2):
        model[number].weight.requires_grad_(False)
    stock = run(model, forward, None)
    assert stock.flops == {str(number): 2 * ROWS * wide * high * 2 for number, (wide, high) in enumerate(sizes)}
    assert stock.saved == {str(number): ROWS * widths[number] * dtype.itemsize for number in range(4)}
    assert same(ours.numbers, stock.numbers)


def test_a_stack_whose_input_wants_no_gradient_runs_four_products_and_not_six() -> None:
    """Only what lies above the first trained weight has a gradient to hand on."""
    model = float8_stack(EQUAL, "tensorwise", bias=False, frozen=(0, 2))
    forward = feed(ROWS, 32, input_wants=False)
    ours, stock = run(model, forward, []), run(model, forward, None)
    assert (ours.products, stock.products) == (4, 6)
    assert "0" not in ours.flops
    assert same(ours.numbers, stock.numbers)


def test_no_product_runs_for_a_gradient_that_is_never_returned() -> None:
    model = float8_stack(UNEQUAL, "tensorwise", bias=True)

    def forward(each: Any) -> tuple[Tensor, None]:
        x = torch.ones(ROWS, 32, requires_grad=True)
        cut: Tensor = _Cut.apply(each[1](each[0](x)))  # type: ignore[no-untyped-call]
        return each[3](each[2](cut)).sum(), None

    assert set(run(model, forward, []).flops) == {"2", "3"}


@pytest.mark.parametrize("lowest", [0, 1])
def test_adapters_of_a_float8_llama_multiply_and_keep_what_theory_needs_to_the_byte(lowest) -> None:
    """Frozen linears multiply once backward and keep nothing: as in high precision, so one theory serves both."""
    model = lora_llama(3, convert=lambda each: convert_to_float8(each, "emulated"))
    ids = tokens(0, B, T)

    def forward(each: nn.Module) -> tuple[Tensor, None]:
        return each(input_ids=ids, labels=ids).loss, None

    ours = run(model, forward, [sbp.make_policy("frozen", train=[f"*layers.{number}" for number in range(lowest, 3)])])
    assert ours.flops == needed_flops(3, lowest)
    assert ours.saved == needed_bytes(3, lowest)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and f"layers.{lowest - 1}" not in name)
    stock = run(model, forward, None)
    assert same(ours.numbers, stock.numbers)
    for name in ("mlp.gate_proj", "mlp.down_proj", "self_attn.o_proj"):
        place = f"base_model.model.model.layers.2.{name}"
        assert stock.flops[place] == 2 * ours.flops[place]
    assert sum(stock.saved.values()) > sum(ours.saved.values())


def test_linears_that_read_one_input_keep_its_cast_once() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    convert_to_float8(model, "emulated")
    ids = tokens(0, B, T)

    def forward(each: nn.Module) -> tuple[Tensor, None]:
        return each(input_ids=ids, labels=ids).loss, None

    ours, stock = run(model, forward, []), run(model, forward, None)
    cast, layer = B * T * 32 + SCALE, "model.layers.1."
    assert ours.saved[f"{layer}self_attn.q_proj"] == ours.saved[f"{layer}self_attn.o_proj"] == cast
    assert ours.saved[f"{layer}mlp.gate_proj"] == cast
    assert not {f"{layer}self_attn.k_proj", f"{layer}self_attn.v_proj", f"{layer}mlp.up_proj"} & set(ours.saved)
    assert sum(ours.saved.values()) < sum(stock.saved.values())
    assert same(ours.numbers, stock.numbers)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("along", ["rows", "columns", "elements"])
def test_selections_multiply_as_their_reference_does(recipe, along) -> None:
    """Rows of a cast with one scale are picked; all else is masked, then multiplied whole, and claims no less."""
    model = float8_stack(UNEQUAL, recipe, bias=True, frozen=(2,))
    policy = sbp.make_policy("topk", keep=0.25, along=along)
    gradients, claims = [], []
    for how in ("fast", "reference"):
        mine = copy.deepcopy(model)
        engine = sbp.attach(mine, [policy], execution=how)
        loss, x = feed(2, ROWS // 2, 32)(mine)
        engine.backward(loss)
        gradients.append([x.grad, *(p.grad for p in mine.parameters() if p.grad is not None)])
        claims.append(engine.claim())
    for fast, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-5, atol=1e-5)
    share = 0.25 if (recipe, along) == ("tensorwise", "rows") else 1.0
    assert claims[0].claimed_flops == pytest.approx(share * claims[0].dense_flops)


def test_where_the_engine_is_disabled_the_numbers_are_torchaos() -> None:
    model = float8_stack(UNEQUAL, "tensorwise", bias=True)
    stock, forward = copy.deepcopy(model), feed(ROWS, 32)
    engine = sbp.attach(model, [sbp.make_policy("topk", keep=0.1)])
    with engine.disabled():
        forward(model)[0].backward()
    forward(stock)[0].backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in stock.parameters()])
    engine.detach()
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_is_not_built_is_refused_by_name() -> None:
    model = tiny_model("llama")
    convert_to_float8(model, "emulated")
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[0].mlp.down_proj).__name__ == "Float8Linear"
    with pytest.raises(DataError, match="no linear layer whose widths are multiples of 16"):
        convert_to_float8(tiny_model("llama", hidden_size=24, num_attention_heads=2), "emulated")


def test_native_float8_without_a_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DataError, match=r"native needs a GPU of compute capability 8\.9 or more; use emulated"):
        convert_to_float8(tiny_model("llama"), "native")
