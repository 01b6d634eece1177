"""Parts of weights are trained, and everything else stays as it was."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

import sparsebp_cli as sbp
from sparsebp_cli.backward import saved_bytes
from sparsebp_cli.backward.linear.part_training import PartTraining
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy.part import WeightColumns, WeightPart, WeightRows

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


def _rows(*index: int) -> WeightPart:
    return WeightRows(torch.tensor(index, dtype=torch.int64))


def _columns(*index: int) -> WeightPart:
    return WeightColumns(torch.tensor(index, dtype=torch.int64))


def _parts() -> dict[str, WeightPart]:
    return {"up": _rows(5, 1, 2), "down": _columns(5, 1, 2)}  # the same channels of the MLP


def _input(step: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 5, INPUTS, generator=torch.Generator().manual_seed(step), dtype=dtype)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _by_output(model: Net, name: str, tensor: Tensor) -> Tensor:
    return tensor.t() if isinstance(getattr(model, name), Conv1D) else tensor


def _train(model: Net, parts: PartTraining, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for micro_batch in range(2):
            model(_input(2 * step + micro_batch)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def _start(model: Net, execution: Literal["fast", "reference"] = "fast") -> tuple[PartTraining, torch.optim.Optimizer]:
    parts = PartTraining(model, _parts(), execution=execution)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=0.01)
    parts.follow(optimizer)
    return parts, optimizer


@pytest.mark.parametrize("execution", ["fast", "reference"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_gradient_of_a_part_is_the_dense_one_restricted(
    kind: str, recomputes: bool, execution: Literal["fast", "reference"]
) -> None:
    model, dense = Net(kind, recomputes=recomputes), Net(kind)
    dense(_input()).square().mean().backward()
    parts = PartTraining(model, _parts(), execution=execution)
    model(_input()).square().mean().backward()
    for leaf, (name, part) in zip(parts.parameters(), _parts().items(), strict=True):
        expected = part.restrict(_by_output(dense, name, _grad(dense.get_parameter(f"{name}.weight"))))
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-15)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("execution", ["fast", "reference"])
@pytest.mark.parametrize("make", [_rows, _columns])
def test_the_whole_weight_as_a_part_is_dense_bit_for_bit(make: Any, execution: Literal["fast", "reference"]) -> None:
    model, dense = Net(dtype=torch.float32), Net(dtype=torch.float32)
    size = HIDDEN if make is _rows else INPUTS
    parts = PartTraining(model, {"up": make(*range(size))}, execution=execution)
    for net in (model, dense):
        net(_input(dtype=torch.float32)).square().mean().backward()
    assert parts.shares == {"up": 1.0}
    assert torch.equal(_grad(parts.parameters()[0]), _grad(dense.up.weight))


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_only_the_part_of_a_weight_changes(kind: str) -> None:
    model = Net(kind)
    before = copy.deepcopy(model.state_dict())
    parts, optimizer = _start(model)
    _train(model, parts, optimizer, range(3))
    parts.remove()
    assert list(model.state_dict()) == list(before)
    for key, value in model.state_dict().items():
        name = key.removesuffix(".weight")
        changed = torch.zeros_like(value, dtype=torch.bool)
        if name in _parts():
            mask = _by_output(model, name, changed)
            _parts()[name].write(mask, torch.ones_like(_parts()[name].restrict(mask)))
        assert torch.equal(value != before[key], changed)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_training_a_part_equals_dense_training_with_a_masked_gradient() -> None:
    model, masked = Net(), Net()
    parts, optimizer = _start(model)
    _train(model, parts, optimizer, range(4))
    reference, following = _start(masked, "reference")
    _train(masked, reference, following, range(4))
    own = Net()
    weights = [own.up.weight, own.down.weight]
    adam = torch.optim.AdamW(weights, lr=0.01, weight_decay=0.0)
    for step in range(4):
        for micro_batch in range(2):
            own(_input(2 * step + micro_batch)).square().mean().backward()
        for weight, part in zip(weights, _parts().values(), strict=True):
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


def test_state_of_the_optimizer_has_the_size_of_the_parts() -> None:
    model = Net()
    parts, optimizer = _start(model)
    _train(model, parts, optimizer, range(1))
    counts = [sum(t.numel() for t in state.values() if t.dim()) for state in optimizer.state.values()]
    assert counts == [2 * 3 * INPUTS, 2 * OUTPUTS * 3]


def _count_saved(model: nn.Module, x: Tensor) -> int:
    with saved_bytes() as saved:
        output = model(x)
    assert output.requires_grad
    return saved.total


def test_a_part_of_columns_saves_only_these_columns_of_the_input() -> None:
    linear = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    x = torch.randn(15, INPUTS)
    whole, rows = x.numel() * 4, PartTraining(linear, {"0": _rows(1)})
    assert _count_saved(linear, x) == whole
    rows.remove()
    PartTraining(linear, {"0": _columns(1, 4)})
    assert _count_saved(linear, x) == whole * 2 // INPUTS


@pytest.mark.parametrize("part", [_rows(0, 3), _columns(2)])
def test_executed_work_of_wgrad_is_the_claimed_share(part: WeightPart) -> None:
    linear = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    parts = PartTraining(linear, {"0": part})
    loss = linear(torch.randn(15, INPUTS)).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == parts.shares["0"] * 2 * 15 * INPUTS * OUTPUTS


def test_a_resumed_training_of_parts_is_the_same_bit_for_bit() -> None:
    whole = Net(dtype=torch.float64)
    parts, optimizer = _start(whole)
    _train(whole, parts, optimizer, range(2))
    weights, state = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict())
    _train(whole, parts, optimizer, range(2, 4))
    resumed = Net()
    again, other = _start(resumed)
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    _train(resumed, again, other, range(2, 4))
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key])


def test_under_autocast_the_gradient_of_a_part_has_the_dtype_of_its_weight() -> None:
    model = Net(dtype=torch.float32)
    dense = Net(dtype=torch.float32)
    parts = PartTraining(model, _parts())
    for net in (model, dense):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(_input(dtype=torch.float32)).square().mean()
        loss.backward()
    up = parts.parameters()[0]
    assert up.grad is not None
    assert up.grad.dtype == torch.float32
    torch.testing.assert_close(up.grad, _parts()["up"].restrict(_grad(dense.up.weight)), rtol=2e-2, atol=1e-3)


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS))
    model[1].weight = model[0].weight
    return model


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS))
    model.requires_grad_(False)
    return model


def _parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(INPUTS, INPUTS)))


def _attached() -> nn.Module:
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS))
    sbp.attach(model, {"name": "topk", "keep": 0.5})
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [(_tied, "tied"), (_frozen, "frozen"), (_parametrized, "parametrized"), (_attached, "already attached")],
)
def test_weights_whose_parts_are_not_built_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        PartTraining(make(), {"0": _rows(0)})


def test_a_model_wrapped_by_ddp_is_refused() -> None:
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = Net()
    with pytest.raises(UnsupportedError, match="DDP"):
        PartTraining(wrapper, {"module.up": _rows(0)})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (_rows(), "got none, allowed: 1 to 8"),
        (_rows(8), "got number 8, allowed: 0 to 7"),
        (_columns(-1), "got number -1, allowed: 0 to 5"),
        (_rows(1, 1), "occurs twice"),
        (WeightRows(torch.ones(3)), "allowed: int64"),
    ],
)
def test_a_part_that_does_not_fit_changes_nothing(part: WeightPart, message: str) -> None:
    model = Net()
    with pytest.raises(PolicyError, match=message):
        PartTraining(model, {"down": _rows(0), "up": part})
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_unknown_names_and_other_optimizers_are_refused() -> None:
    model = Net()
    with pytest.raises(UsageError, match="allowed: 1 or more"):
        PartTraining(model, {})
    with pytest.raises(UsageError, match="'upp' is not a linear"):
        PartTraining(model, {"upp": _rows(0)})
    parts = PartTraining(model, _parts())
    with pytest.raises(UsageError, match="does not train the part of 'up'"):
        parts.follow(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="frozen beside"):
        parts.follow(torch.optim.SGD([*parts.parameters(), model.norm.weight], lr=0.1))


def test_a_model_that_was_converted_after_its_parts_were_chosen_is_refused() -> None:
    model = Net()
    PartTraining(model, _parts())
    model.float()
    with pytest.raises(UnsupportedError, match=r"has become torch\.float32"):
        model(_input(dtype=torch.float32))
