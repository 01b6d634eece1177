"""Parts of weights are chosen at random or by weight, and coupled through the channels that they share."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

from sparsebp_cli.backward import PartTraining, choose_parts
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import WeightColumns, WeightRows

WIDTH, CHANNELS = 4, 6
COUPLED: dict[str, Any] = {"rows": ["*.up", "*.gate"], "columns": ["*.down"], "coupled": True}


class Block(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, CHANNELS), nn.Linear(WIDTH, CHANNELS)
        self.down = nn.Linear(CHANNELS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.down(self.up(x) * self.gate(x).relu())
        return output


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def _numbers(parts: Any) -> dict[str, list[int]]:
    return {name: part.index_K.tolist() for name, part in parts.items()}


def _with_norms(linear: nn.Module, values: list[float]) -> None:
    """Give row i of a linear, or column i of a Conv1D, which stores its weight transposed, the norm of values[i]."""
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    weight.data.zero_()
    rows = weight.data.t() if isinstance(linear, Conv1D) else weight.data
    rows[:, 0] = torch.tensor(values)


@pytest.mark.parametrize("make", [nn.Linear, lambda inputs, outputs: Conv1D(outputs, inputs)])
def test_by_weight_takes_the_largest_rows_and_equal_ones_in_their_order(make: Any) -> None:
    model = nn.Sequential(make(3, 5))
    _with_norms(model[0], [1.0, -3.0, 2.0, 2.0, 0.5])
    for keep, expected in ((0.2, [1]), (0.4, [1, 2]), (0.6, [1, 2, 3])):
        assert _numbers(choose_parts(model, keep, rows=["0"], by="weight")) == {"0": expected}


def test_by_weight_takes_the_largest_columns() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    model[0].weight.data = torch.tensor([[1.0, 0, 3, 0], [1.0, 2, 0, 0]])
    parts = choose_parts(model, 0.5, columns=["0"], by="weight")
    assert isinstance(parts["0"], WeightColumns)
    assert _numbers(parts) == {"0": [1, 2]}


def test_coupled_parts_of_a_module_share_the_channels_of_largest_joint_norm() -> None:
    model = nn.ModuleDict({"mlp": Block()})
    _with_norms(model["mlp"].up, [3, 0, 0, 2, 0, 0])
    _with_norms(model["mlp"].gate, [0, 0, 0, 2, 0, 1])
    model["mlp"].down.weight.data.zero_()
    model["mlp"].down.weight.data[1, 3:6] = torch.tensor([1.5, 3.4, 2.0])
    # Squares: 9, 0, 0, 4 + 4 + 2.25, 11.56, 1 + 4. Alone, up would take 0 and 3, gate 3 and 5, down 4 and 5.
    parts = choose_parts(model, 1 / 3, by="weight", **COUPLED)
    assert _numbers(parts) == {"mlp.up": [3, 4], "mlp.gate": [3, 4], "mlp.down": [3, 4]}
    assert [type(part) for part in parts.values()] == [WeightRows, WeightRows, WeightColumns]


def test_a_draw_is_even_and_of_the_stated_number() -> None:
    model, drawn = nn.Sequential(nn.Linear(2, 5)), Counter[int]()
    for seed in range(2000):
        (numbers,) = _numbers(choose_parts(model, 0.4, rows=["0"], seed=seed)).values()
        assert len(set(numbers)) == 2
        assert numbers == sorted(numbers)
        drawn.update(numbers)
    # 800 expected of each, with a standard deviation of 22
    assert all(abs(drawn[number] - 800) < 5 * 22 for number in range(5))


def test_a_draw_depends_on_seed_and_name_only() -> None:
    model = _model()
    several = _numbers(choose_parts(model, 0.5, rows=["*"], seed=3))
    assert _numbers(choose_parts(model, 0.5, rows=["1.up"], seed=3))["1.up"] == several["1.up"]
    assert several != _numbers(choose_parts(model, 0.5, rows=["*"], seed=4))
    coupled = _numbers(choose_parts(model, 0.5, **COUPLED))
    assert coupled["0.up"] == coupled["0.gate"] == coupled["0.down"]
    assert coupled["1.up"] == coupled["1.gate"] == coupled["1.down"]
    assert len({tuple(each) for each in _numbers(choose_parts(model, 0.5, rows=["*.up", "*.gate"])).values()}) > 1


def test_keep_1_is_the_whole_of_each_weight_and_little_is_one_channel() -> None:
    model = _model()
    assert all(part == list(range(CHANNELS)) for part in _numbers(choose_parts(model, 1, **COUPLED)).values())
    assert all(len(part) == 1 for part in _numbers(choose_parts(model, 1e-9, **COUPLED)).values())


def test_a_resumed_training_of_chosen_parts_is_the_same_bit_for_bit() -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _model()
        training = PartTraining(model, choose_parts(model, 0.5, by="weight", **COUPLED))
        optimizer = torch.optim.AdamW(training.parameters(), lr=0.05)
        training.follow(optimizer)
        return model, optimizer

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            model(torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    straight, optimizer = start()
    train(straight, optimizer)
    saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))  # loading would share the moments
    resumed, its_optimizer = start()  # from the initial weights, so the choice is the same
    resumed.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    train(resumed, its_optimizer)
    train(straight, optimizer)
    for (name, one), two in zip(straight.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    assert not torch.equal(straight.state_dict()["0.up.weight"], saved[0]["0.up.weight"])


@pytest.mark.parametrize(
    ("keep", "options", "message"),
    [
        (0, {"rows": ["*"]}, r"keep must be in \(0, 1\], got 0"),
        (1.5, {"rows": ["*"]}, "keep must be in"),
        (float("nan"), {"rows": ["*"]}, "keep must be in"),
        (0.5, {"rows": ["*"], "by": "gradient"}, "by must be random or weight, got 'gradient'"),
        (0.5, {}, "give rows or columns"),
        (0.5, {"rows": ["*.upp"]}, "rows: '.*upp' matches no linear"),
        (0.5, {"rows": ["*.up"], "columns": ["0.*"]}, "'0.up' is in rows and in columns"),
        (0.5, {"rows": ["*.up"], "coupled": True}, "coupled needs rows and columns"),
        (0.5, {"rows": ["*.up"], "columns": ["0.down"], "coupled": True}, "'1.up' has no linear with columns beside"),
    ],
)
def test_bad_arguments_are_refused_by_name(keep: float, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_parts(_model(), keep, **options)


def test_coupled_linears_of_other_widths_are_refused() -> None:
    model = nn.ModuleDict({"mlp": Block()})
    model["mlp"].gate = nn.Linear(WIDTH, 5)
    with pytest.raises(UsageError, match=r"same number of channels, got 6 of 'mlp.up', 5 of 'mlp.gate'"):
        choose_parts(model, 0.5, **COUPLED)


def test_a_parametrized_linear_is_refused_by_name() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
    with pytest.raises(UnsupportedError, match="'0': parts of a quantised"):
        choose_parts(model, 0.5, rows=["*"])
