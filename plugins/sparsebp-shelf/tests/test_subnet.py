"""The subnet policy: what it chooses, by gradient, by weight and at random, and that a run of it resumes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import Observation, Step
from sparsebp_cli.testing import check_policy
from sparsebp_shelf.part import Subnet, TrainedWeight, WeightBlocks, WeightColumns, WeightPart, WeightRows
from sparsebp_shelf.part.extension import find_divisible, show_weights

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


def _weights(**matrices: list[list[float]]) -> list[TrainedWeight]:
    return [TrainedWeight(name.replace("__", "."), None, torch.tensor(rows)) for name, rows in matrices.items()]


def _choose(policy: Subnet, weights: Any, seed: int = 0) -> dict[str, WeightPart]:
    return dict(policy.parts(weights, Step(0, seed=seed, state=policy.init(weights))))


def _by_gradient(policy: Subnet, *gradients: list[TrainedWeight]) -> dict[str, WeightPart]:
    """Return the parts after trial passes with some gradients."""
    seen = [Observation(magnitude={w.name: w.matrix_OD.abs() for w in each}) for each in gradients]
    first = policy.init(gradients[0])
    state = policy.observe_trials(first, seen, Step(0, state=first))
    return dict(policy.parts(gradients[0], Step(0, state=state)))


def _numbers(parts: Any) -> dict[str, list[int]]:
    return {name: part.index_K.tolist() for name, part in parts.items()}


def _of(model: nn.Module) -> Any:
    return show_weights(model, find_divisible(model))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"by": "random"},
        {"by": "weight"},
        {"blocks": ["*"], "block_size": 32},
        {"blocks": ["*"], "block_size": 64, "scope": "model", "batches": 2},
        {"elements": ["*.up_proj"], "scope": "model"},
        {"rows": ["*.up_proj", "*.gate_proj"], "columns": ["*.down_proj"], "coupled": True},
        {"keep": 1.0},
    ],
)
def test_it_keeps_every_promise_of_the_contract(options: dict[str, object]) -> None:
    check_policy("subnet", **options)


@pytest.mark.parametrize(("keep", "expected"), [(0.2, [1]), (0.4, [1, 2]), (0.6, [1, 2, 3])])
def test_by_weight_takes_the_largest_rows_and_equal_ones_in_their_order(keep: float, expected: list[int]) -> None:
    weights = _weights(up=[[1.0, 0.0], [-3.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.5, 0.0]])
    assert _numbers(_choose(Subnet(keep=keep, by="weight"), weights)) == {"up": expected}


def test_by_weight_takes_the_largest_columns() -> None:
    weights = _weights(up=[[1.0, 0.0, 3.0, 0.0], [1.0, 2.0, 0.0, 0.0]])
    parts = _choose(Subnet(keep=0.5, by="weight", columns=["up"]), weights)
    assert isinstance(parts["up"], WeightColumns)
    assert _numbers(parts) == {"up": [1, 2]}


def test_by_gradient_adds_up_magnitudes_over_the_batches() -> None:
    # Sums of magnitudes of the rows: 1 + 1, 3 + 0, 0 + 2.5. By the gradients' sum the first row would have 0.
    first, second = _weights(up=[[1.0, 0.0], [3.0, 0.0], [0.0, 0.0]]), _weights(up=[[-1.0, 0.0], [0.0, 0.0], [0, 2.5]])
    assert _numbers(_by_gradient(Subnet(keep=0.34), first)) == {"up": [1]}
    assert _numbers(_by_gradient(Subnet(keep=0.67), first, second)) == {"up": [1, 2]}


def test_blocks_go_by_the_mean_magnitude_in_each_weight_or_in_the_whole_model() -> None:
    up = [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, -9.0]]  # sums of the two blocks of 2: 4 and 9
    down = [[2.0, 0.0], [0.0, -3.0]]  # 5
    gradients = _weights(up=up, down=down)
    parts = _by_gradient(Subnet(keep=0.5, blocks=["*"], block_size=2), gradients)
    assert _numbers(parts) == {"up": [1], "down": [0]}
    assert isinstance(parts["up"], WeightBlocks)
    assert torch.equal(parts["up"].restrict(gradients[0].matrix_OD), torch.tensor([[[0.0, 0.0], [0.0, -9.0]]]))
    model = _by_gradient(Subnet(keep=0.3, blocks=["*"], block_size=2, scope="model"), gradients)  # one of the three
    assert _numbers(model) == {"up": [1]}
    assert _numbers(_by_gradient(Subnet(keep=0.7, blocks=["*"], block_size=2, scope="model"), gradients)) == {
        "up": [1],
        "down": [0],
    }


def test_elements_go_by_magnitude() -> None:
    gradients = _weights(up=[[1.0, -5.0], [2.0, 4.0]], down=[[3.0]])
    assert _numbers(_by_gradient(Subnet(keep=0.5, elements=["*"]), gradients)) == {"up": [1, 3], "down": [0]}
    assert _numbers(_by_gradient(Subnet(keep=0.4, elements=["*"], scope="model"), gradients)) == {"up": [1, 3]}


def test_coupled_parts_of_a_module_share_the_channels_of_largest_joint_norm() -> None:
    def rows(*values: float) -> list[list[float]]:
        return [[value, *[0.0] * (WIDTH - 1)] for value in values]

    columns = [[0.0] * CHANNELS, [0.0, 0.0, 0.0, 1.5, 3.4, 2.0]]
    weights = _weights(mlp__up=rows(3, 0, 0, 2, 0, 0), mlp__gate=rows(0, 0, 0, 2, 0, 1), mlp__down=columns)
    # Squares: 9, 0, 0, 4 + 4 + 2.25, 11.56, 1 + 4. Alone, up would take 0 and 3, gate 3 and 5, down 4 and 5.
    parts = _choose(Subnet(keep=1 / 3, by="weight", **COUPLED), weights)
    assert _numbers(parts) == {"mlp.up": [3, 4], "mlp.gate": [3, 4], "mlp.down": [3, 4]}
    assert [type(part) for part in parts.values()] == [WeightRows, WeightRows, WeightColumns]


def test_a_draw_is_even_and_of_the_stated_number() -> None:
    weights, policy, drawn = _of(nn.Sequential(nn.Linear(2, 5))), Subnet(keep=0.4, by="random"), Counter[int]()
    for seed in range(2000):
        (numbers,) = _numbers(_choose(policy, weights, seed)).values()
        assert len(set(numbers)) == 2
        assert numbers == sorted(numbers)
        drawn.update(numbers)
    # 800 expected of each, with a standard deviation of 22
    assert all(abs(drawn[number] - 800) < 5 * 22 for number in range(5))


def test_a_draw_depends_on_seed_and_name_only() -> None:
    weights = _of(_model())
    several = _numbers(_choose(Subnet(keep=0.5, by="random"), weights, 3))
    assert _numbers(_choose(Subnet(keep=0.5, by="random", rows=["1.up"]), weights, 3))["1.up"] == several["1.up"]
    assert several != _numbers(_choose(Subnet(keep=0.5, by="random"), weights, 4))
    coupled = _numbers(_choose(Subnet(keep=0.5, by="random", **COUPLED), weights))
    assert coupled["0.up"] == coupled["0.gate"] == coupled["0.down"]
    assert coupled["1.up"] == coupled["1.gate"] == coupled["1.down"]


def test_the_control_draws_as_much_of_the_same_linears() -> None:
    weights, policy = _of(_model()), Subnet(keep=0.5, **COUPLED)
    control = policy.control
    assert control is not None
    drawn = _choose(Subnet(**{key: value for key, value in control.items() if key != "name"}), weights)  # type: ignore[arg-type]
    chosen = _choose(policy, weights)
    assert {n: (type(p), len(p.index_K)) for n, p in drawn.items()} == {
        n: (type(p), len(p.index_K)) for n, p in chosen.items()
    }


def test_the_gradients_are_those_of_the_first_weights_and_batches_and_train_nothing() -> None:
    model, dense = _model(), _model()
    batches = [torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    sums = {name: torch.zeros_like(p) for name, p in dense.named_parameters() if p.dim() == 2}
    for batch in batches:
        dense.zero_grad()
        dense(batch).square().mean().backward()
        for name in sums:
            sums[name] += dense.get_parameter(name).grad.abs()  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sbp.attach(model, Subnet(keep=0.34, batches=2), optimizer=optimizer)
    assert engine.count_trial_batches() == 2
    losses = [lambda batch=batch: model(batch).square().mean() for batch in batches]
    engine.run_trials(losses[0], others=losses[1:])
    assert not engine.trials_are_due()
    state = engine.states.of(next(part.policy for part in engine.extensions if hasattr(part, "policy")))
    for name, total in sums.items():
        wanted = total.sum(1).argsort(descending=True, stable=True)[: max(1, round(0.34 * len(total)))]
        assert torch.equal(state[name.removesuffix(".weight")], wanted.sort().values), name
    for (name, value), other in zip(model.state_dict().items(), dense.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.0}, "greater than 0"),
        ({"keep": 1.5}, "less than or equal to 1"),
        ({"rows": []}, "rows must name at least one linear layer"),
        ({"rows": ["*"], "coupled": True}, "'coupled: true' needs the options rows and columns"),
        ({"scope": "model"}, "'scope: model' ranks only parts of equal size"),
        ({"rows": ["*"], "blocks": ["*"], "scope": "model"}, "'scope: model' ranks only parts of equal size"),
        ({"batches": 0}, "greater than 0"),
    ],
)
def test_bad_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Subnet(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": ["*.upp"]}, "rows: '.*upp' matches no linear"),
        ({"rows": ["*.up"], "columns": ["0.*"]}, "'0.up' matches both rows and columns"),
        (
            {"rows": ["*.up"], "columns": ["0.down"], "coupled": True},
            "'1.up' is alone: the option columns must name another linear layer of the same module",
        ),
        ({"blocks": ["*"], "block_size": 4}, "blocks: '0.up' has 6 outputs, which must be a multiple of block_size 4"),
        (
            {"rows": ["*.up"], "columns": ["*.gate"], "coupled": True},
            "must be equally many, got 6 of '0.up', 4 of '0.gate'",
        ),
    ],
)
@pytest.mark.parametrize("by", ["gradient", "weight", "random"])
def test_options_that_do_not_fit_the_model_are_refused_when_attached(options: Any, message: str, by: Any) -> None:
    model = _model()
    with pytest.raises(PolicyError, match=message):
        sbp.attach(model, Subnet(by=by, **options), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(parameter.requires_grad for parameter in model.parameters())
