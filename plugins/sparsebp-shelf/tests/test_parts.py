"""Parts of weights are trained, and everything else stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

import sparsebp_cli as sbp
from sparsebp_cli.backward import Engine, saved_bytes
from sparsebp_cli.errors import PolicyError, SparseBPError, UnsupportedError, UsageError
from sparsebp_cli.policy import Step
from sparsebp_shelf.part import (
    PartSelector,
    TrainedWeight,
    WeightBlocks,
    WeightColumns,
    WeightElements,
    WeightPart,
    WeightRows,
)

INPUTS, HIDDEN, OUTPUTS = 6, 8, 4


class Net(nn.Module):
    """An MLP of linears, with its activations recomputed if asked for."""

    def __init__(self, kind: str = "linear", *, recomputes: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(INPUTS)
        self.up = Conv1D(HIDDEN, INPUTS) if kind == "conv1d" else nn.Linear(INPUTS, HIDDEN)
        self.down = Conv1D(OUTPUTS, HIDDEN) if kind == "conv1d" else nn.Linear(HIDDEN, OUTPUTS)
        self.recomputes = recomputes
        self.to(dtype)

    def _run(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.up(x).relu())
        return output

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return checkpoint(self._run, x, use_reentrant=False) if self.recomputes else self._run(x)


@final
class Given(PartSelector):
    """Parts as they are given, by kind, numbers, inputs and size of a block."""

    given: dict[str, tuple[str, list[int], int, int]]

    def parts(self, weights: Sequence[TrainedWeight], step: Step) -> Mapping[str, WeightPart]:
        return {name: _part(kind, index, *more) for name, (kind, index, *more) in self.given.items()}


def _part(kind: str, index: Sequence[int], inputs: int = 0, size: int = 0) -> WeightPart:
    index_K = torch.tensor(index, dtype=torch.int64)
    if kind == "blocks":
        return WeightBlocks(index_K, inputs, size)
    if kind == "elements":
        return WeightElements(index_K, inputs)
    return {"rows": WeightRows, "columns": WeightColumns}[kind](index_K)


def _given(**parts: tuple[str, list[int]]) -> Given:
    inputs = {"up": INPUTS, "down": HIDDEN, "0": INPUTS}
    return Given(given={name: (kind, index, inputs[name], 2) for name, (kind, index) in parts.items()})


KINDS = {
    "rows and columns": _given(up=("rows", [5, 1, 2]), down=("columns", [5, 1, 2])),
    "blocks": _given(up=("blocks", [11, 0, 3, 9]), down=("blocks", [2])),
    "elements": _given(up=("elements", [47, 0, 13]), down=("elements", [31, 30, 1])),
}


def _parts(policy: Given) -> dict[str, WeightPart]:
    return dict(policy.parts((), Step(0)))


def _input(step: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 5, INPUTS, generator=torch.Generator().manual_seed(step), dtype=dtype)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _by_output(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    return tensor.t() if isinstance(getattr(model, name), Conv1D) else tensor


def _leaves(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _start(
    model: nn.Module, policy: Given, execution: Literal["fast", "reference"] = "fast"
) -> tuple[Engine, torch.optim.Optimizer]:
    weights = [p for name, p in model.named_parameters() if name.endswith(("up.weight", "down.weight"))]
    optimizer = torch.optim.AdamW(weights or model.parameters(), lr=0.01)
    return sbp.attach(model, policy, optimizer=optimizer, execution=execution), optimizer


def _train(model: nn.Module, engine: Engine, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for micro_batch in range(2):
            engine.backward(model(_input(2 * step + micro_batch)).square().mean())
        torch.nn.utils.clip_grad_norm_(_leaves(optimizer), 0.1)
        optimizer.step()
        model.zero_grad()  # the engine frees the gradients of parts


@pytest.mark.parametrize("execution", ["fast", "reference"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("policy", KINDS.values(), ids=KINDS)
def test_gradient_of_a_part_is_the_dense_one_restricted(
    policy: Given, kind: str, recomputes: bool, execution: Literal["fast", "reference"]
) -> None:
    model, dense = Net(kind, recomputes=recomputes), Net(kind)
    dense(_input()).square().mean().backward()
    engine, optimizer = _start(model, policy, execution)
    engine.backward(model(_input()).square().mean())
    for leaf, (name, part) in zip(_leaves(optimizer), _parts(policy).items(), strict=True):
        expected = part.restrict(_by_output(dense, name, _grad(dense.get_parameter(f"{name}.weight"))))
        torch.testing.assert_close(_grad(leaf), expected, rtol=1e-12, atol=1e-15)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("execution", ["fast", "reference"])
@pytest.mark.parametrize(("kind", "number"), [("rows", HIDDEN), ("columns", INPUTS), ("elements", HIDDEN * INPUTS)])
def test_the_whole_weight_as_a_part_is_dense_bit_for_bit(
    kind: str, number: int, execution: Literal["fast", "reference"]
) -> None:
    model, dense = Net(dtype=torch.float32), Net(dtype=torch.float32)
    engine, optimizer = _start(model, _given(up=(kind, list(range(number)))), execution)
    x = _input(dtype=torch.float32)
    engine.backward(model(x).square().mean())
    dense(x).square().mean().backward()
    assert torch.equal(_grad(_leaves(optimizer)[0]).view(HIDDEN, INPUTS), _grad(dense.up.weight))


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("policy", KINDS.values(), ids=KINDS)
def test_only_the_parts_change_and_detach_gives_the_model_back(policy: Given, kind: str) -> None:
    model = Net(kind)
    before = copy.deepcopy(model.state_dict())
    engine, optimizer = _start(model, policy)
    _train(model, engine, optimizer, range(3))
    engine.detach()
    assert list(model.state_dict()) == list(before)
    for key, value in model.state_dict().items():
        changed = torch.zeros_like(value, dtype=torch.bool)
        name = key.removesuffix(".weight")
        if (part := _parts(policy).get(name)) is not None:
            mask = _by_output(model, name, changed)
            part.write(mask, torch.ones_like(part.restrict(mask)))
        assert torch.equal(value != before[key], changed), key
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert {id(p) for p in _leaves(optimizer)} == {id(model.up.weight), id(model.down.weight)}


@pytest.mark.parametrize("policy", KINDS.values(), ids=KINDS)
def test_training_a_part_equals_dense_training_with_a_masked_gradient(policy: Given) -> None:
    model, masked, own = Net(), Net(), Net()
    _train(model, *_start(model, policy), range(4))
    _train(masked, *_start(masked, policy, "reference"), range(4))
    weights = [own.up.weight, own.down.weight]
    adam = torch.optim.AdamW(weights, lr=0.01, weight_decay=0.0)
    for step in range(4):
        for micro_batch in range(2):
            own(_input(2 * step + micro_batch)).square().mean().backward()
        for weight, part in zip(weights, _parts(policy).values(), strict=True):
            kept = torch.zeros_like(weight)
            part.write(kept, part.restrict(_grad(weight)))
            part.write(weight.data, part.restrict(weight.data) * (1 - 0.01 * 0.01))  # decay of the part alone
            weight.grad = kept
        torch.nn.utils.clip_grad_norm_(weights, 0.1)
        adam.step()
        own.zero_grad()
    for key in ("up.weight", "down.weight"):
        torch.testing.assert_close(model.state_dict()[key], masked.state_dict()[key], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model.state_dict()[key], own.state_dict()[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("policy", "sizes"),
    list(zip(KINDS.values(), [(3 * INPUTS, OUTPUTS * 3), (4 * 4, 4), (3, 3)], strict=True)),
    ids=KINDS,
)
def test_state_of_the_optimizer_has_the_size_of_the_parts(policy: Given, sizes: tuple[int, int]) -> None:
    model = Net()
    engine, optimizer = _start(model, policy)
    _train(model, engine, optimizer, range(1))
    counts = [sum(t.numel() for t in state.values() if t.dim()) for state in optimizer.state.values()]
    assert counts == [2 * size for size in sizes]


def _count_saved(model: nn.Module, x: Tensor) -> int:
    with saved_bytes() as saved:
        output = model(x)
    assert output.requires_grad
    return saved.total


@pytest.mark.parametrize(
    ("kind", "index", "features"),
    [("rows", [1], INPUTS), ("elements", [7], INPUTS), ("columns", [1, 4], 2), ("blocks", [0, 2, 3, 5], 4)],
)
def test_a_part_saves_only_the_features_of_the_input_that_it_reads(kind: str, index: list[int], features: int) -> None:
    linear, x = nn.Sequential(nn.Linear(INPUTS, OUTPUTS)), torch.randn(15, INPUTS)
    with _start(linear, _given(**{"0": (kind, index)}))[0]:
        assert _count_saved(linear, x) == x.numel() * 4 * features // INPUTS


@pytest.mark.parametrize(
    ("kind", "index", "share"),
    [("rows", [0, 3], 0.5), ("columns", [2], 1 / 6), ("blocks", [1, 2, 4], 0.5), ("elements", [3], 1.0)],
)
def test_executed_work_of_wgrad_is_the_claimed_share(kind: str, index: list[int], share: float) -> None:
    linear, policy = nn.Sequential(nn.Linear(INPUTS, OUTPUTS)), _given(**{"0": (kind, index)})
    assert _parts(policy)["0"].claim(OUTPUTS, INPUTS) == share
    engine, _ = _start(linear, policy)
    loss = linear(torch.randn(15, INPUTS)).sum()
    with FlopCounterMode(display=False) as counter:
        engine.backward(loss)
    assert counter.get_total_flops() == share * 2 * 15 * INPUTS * OUTPUTS


@pytest.mark.parametrize("policy", KINDS.values(), ids=KINDS)
def test_a_resumed_training_of_parts_is_the_same_bit_for_bit(policy: Given) -> None:
    whole = Net()
    engine, optimizer = _start(whole, policy)
    _train(whole, engine, optimizer, range(2))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), engine.state_dict()))
    _train(whole, engine, optimizer, range(2, 4))
    resumed = Net()
    its_engine, other = _start(resumed, policy)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    its_engine.load_state_dict(saved[2])
    _train(resumed, its_engine, other, range(2, 4))
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_a_disabled_pass_is_dense_and_a_probe_shows_gradients_at_the_weights() -> None:
    model, dense, policy = Net(), Net(), KINDS["rows and columns"]
    engine, optimizer = _start(model, policy)
    dense(_input()).square().mean().backward()
    with engine.disabled():
        model(_input()).square().mean().backward()
        for (name, parameter), other in zip(model.named_parameters(), dense.parameters(), strict=True):
            assert torch.equal(_grad(parameter), _grad(other)), name
    model.zero_grad()
    with engine.probing():
        engine.backward(model(_input()).square().mean())
    assert all(leaf.grad is None for leaf in _leaves(optimizer))
    for name, part in _parts(policy).items():
        wanted = torch.zeros_like(dense.get_parameter(f"{name}.weight"))
        part.write(wanted, part.restrict(_grad(dense.get_parameter(f"{name}.weight"))))
        torch.testing.assert_close(_grad(model.get_parameter(f"{name}.weight")), wanted, rtol=1e-12, atol=1e-15)


def test_under_autocast_the_gradient_of_a_part_has_the_dtype_of_its_weight() -> None:
    model, dense = Net(dtype=torch.float32), Net(dtype=torch.float32)
    engine, optimizer = _start(model, KINDS["rows and columns"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, other = (net(_input(dtype=torch.float32)).square().mean() for net in (model, dense))
    engine.backward(loss)
    other.backward()
    up = _leaves(optimizer)[0]
    assert _grad(up).dtype == torch.float32
    expected = _parts(KINDS["rows and columns"])["up"].restrict(_grad(dense.up.weight))
    torch.testing.assert_close(_grad(up), expected, rtol=2e-2, atol=1e-3)


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS))
    model[1].weight = model[0].weight
    return model


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS))
    model[0].requires_grad_(False)
    return model


def _parametrized() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(INPUTS, INPUTS)), nn.Linear(INPUTS, INPUTS))


@pytest.mark.parametrize("make", [_tied, _frozen, _parametrized])
def test_weights_of_which_no_part_can_be_trained_are_not_offered(make: Any) -> None:
    model = make()
    with pytest.raises(PolicyError, match=r"must name linear layers of this model, got '0'|has no linear"):
        _start(model, _given(**{"0": ("rows", [0])}))
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "index", "message"),
    [
        ("rows", [], "must choose 1 to 8 rows of a weight, got none"),
        ("rows", [8], "rows of a weight must be from 0 to 7, got 8"),
        ("columns", [-1], "must be from 0 to 5, got -1"),
        ("rows", [1, 1], "occurs twice"),
        ("blocks", [12], "must be from 0 to 11, got 12"),
        ("elements", [48], "must be from 0 to 47, got 48"),
    ],
)
def test_a_part_that_does_not_fit_changes_nothing(kind: str, index: list[int], message: str) -> None:
    model = Net()
    with pytest.raises(PolicyError, match=message):
        _start(model, _given(down=("rows", [0]), up=(kind, index)))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_numbers_of_another_type_and_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(PolicyError, match="must be an int64 tensor"):
        WeightRows(torch.ones(3)).check(4, 4)
    with pytest.raises(PolicyError, match="the number of inputs must be a multiple of the block size 4, got 6"):
        WeightBlocks(torch.tensor([0]), 6, 4).check(8, 6)


def _other(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([model.get_parameter("norm.weight")], lr=0.1)


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(_input()).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_other, "the weight of 'up', but the optimizer does not contain"),
        (_stepped, "call attach before the first optimizer step"),
    ],
)
def test_other_optimizers_are_refused(make: Any, message: str) -> None:
    model = Net()
    with pytest.raises(UsageError, match=message):
        sbp.attach(model, KINDS["blocks"], optimizer=make(model))


def _ddp(model: nn.Module) -> nn.Module:
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = model
    return wrapper


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": None}, "needs attach"),
        ({"sites": "nodes"}, "needs sites='linears'"),
        ({"update": "eager"}, "needs update='deferred'"),
        ({"segments": 2}, "segments support whole parameters"),
        ({"wrap": _ddp}, "DDP"),
        ({"policies": [KINDS["blocks"], {"name": "topk", "keep": 0.5}]}, "in one training is not supported"),
    ],
)
def test_what_is_not_built_is_refused_by_name(options: Any, message: str) -> None:
    model = Net()
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **options}
    wrap, policies = given.pop("wrap", lambda net: net), given.pop("policies", KINDS["blocks"])
    with pytest.raises(SparseBPError, match=message):
        sbp.attach(wrap(model), policies, **given)


def test_a_model_that_was_converted_after_its_parts_were_chosen_is_refused() -> None:
    model = Net()
    _start(model, KINDS["rows and columns"])
    model.float()
    with pytest.raises(UnsupportedError, match=r"is torch\.float32 on .* was chosen as"):
        model(_input(dtype=torch.float32))
