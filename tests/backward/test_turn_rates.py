"""Learning rates that are held for a turn or a round, and optimizer state that waits for its turn on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import LambdaLR

import sparsebp_cli as sbp
from sparsebp_cli.backward.kind.parameter import optimizer_state
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import make_policy

from .families import tiny_decoder

RATE, STEPS = 0.01, 12
HIFT = {
    "name": "frozen",
    "freeze": ["*embed_tokens*", "*norm.weight", "*lm_head*"],
    "turn": "layers",
    "order": "ascending",
    "optimizer_state": "cpu",
    "learning_rate": "cycle",
}


class Training:
    """A decoder of four layers, AdamW in two groups, and a rate that falls at each step."""

    def __init__(self, policy: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = tiny_decoder("llama", num_hidden_layers=4, tie_word_embeddings=False)
        decayed = [p for p in self.model.parameters() if p.ndim == 2]
        others = [{"params": [p for p in self.model.parameters() if p.ndim != 2], "lr": 2 * RATE, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([{"params": decayed}, *others], RATE, weight_decay=0.1)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1.0 - step / STEPS)
        self.engine: sbp.Engine | None = None
        if policy is not None:
            self.engine = sbp.attach(self.model, policy, optimizer=self.optimizer)
        self.used: list[tuple[float, ...]] = []  # rates of the groups that the optimizer steps, at each step
        self.optimizer.register_step_pre_hook(
            lambda *_: self.used.append(tuple(group["lr"] for group in self.optimizer.param_groups))
        )

    def step(self, index: int) -> None:
        ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(index))
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward() if self.engine is None else self.engine.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def run(self, steps: range = range(STEPS)) -> dict[str, Tensor]:
        for index in steps:
            self.step(index)
        return self.model.state_dict()


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 4),
        ({"at_once": 3}, 2),
        ({"every": 2, "at_once": 2, "order": "random"}, 4),
        ({"every": 3, "learning_rate": "turn"}, 3),
        ({"every": 3, "learning_rate": "turn", "order": "independent"}, 3),
        ({"learning_rate": "step"}, 1),
    ],
)
def test_the_rate_is_constant_in_a_cycle_and_that_of_the_schedule_at_its_start(
    options: dict[str, Any], length: int
) -> None:
    training = Training({**HIFT, **options})
    for index in range(STEPS):
        training.step(index)
        value = 1.0 - index // length * length / STEPS
        assert training.used[index] == (RATE * value, 2 * RATE * value)
        now = 1.0 - (index + 1) / STEPS  # between two steps the groups are those of the schedule
        assert [group["lr"] for group in training.optimizer.param_groups] == [RATE * now, 2 * RATE * now]
    assert training.optimizer.state_dict().keys() == {"state", "param_groups"}
    cycles = training.used[::length]
    assert cycles == [
        (RATE * (1 - c * length / STEPS), 2 * RATE * (1 - c * length / STEPS)) for c in range(len(cycles))
    ]


def test_a_held_rate_trains_what_a_loop_trains_that_sets_it_by_hand() -> None:
    training = Training({**HIFT, "optimizer_state": "keep"})
    expected = Training({**HIFT, "optimizer_state": "keep", "learning_rate": "step"})
    expected.schedule.step = lambda *_: None  # type: ignore[method-assign]
    for index in range(STEPS):
        for group, rate in zip(expected.optimizer.param_groups, (RATE, 2 * RATE), strict=True):
            group["lr"] = rate * (1.0 - index // 4 * 4 / STEPS)
        expected.step(index)
    one, other = training.run(), expected.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stop", [5, 8])
def test_a_run_resumed_within_a_cycle_goes_on_with_its_rate(stop: int) -> None:
    expected = Training(HIFT).run()
    first, second = Training(HIFT), Training(HIFT)
    second.model.load_state_dict(first.run(range(stop)))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.schedule.load_state_dict(first.schedule.state_dict())
    assert first.engine is not None
    assert second.engine is not None
    second.engine.load_state_dict(first.engine.state_dict())
    resumed = second.run(range(stop, STEPS))
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_an_optimizer_that_raises_has_its_rates_back_after_detach() -> None:
    training = Training(HIFT)
    training.step(0)
    training.optimizer.register_step_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        training.step(1)
    assert training.optimizer.param_groups[0]["lr"] == RATE
    assert training.engine is not None
    training.engine.detach()
    assert training.optimizer.param_groups[0]["lr"] == RATE * (1 - 1 / STEPS)


def _fail(*_: object) -> None:
    raise ZeroDivisionError


class Elsewhere:
    """Stands for another device: bytes outside of any tensor, and an empty tensor in the place of the state."""

    def __init__(self) -> None:
        self.held: dict[Tensor, tuple[bytes, Tensor]] = {}

    def send(self, value: Tensor) -> Tensor:
        if value.ndim == 0 or value in self.held:  # Adam's step number is on the CPU anyway
            return value
        left = torch.empty(0)
        self.held[left] = (value.numpy().tobytes(), torch.empty_like(value, device="meta"))
        return left

    def bring(self, value: Tensor, _: torch.device) -> Tensor:
        content, like = self.held.pop(value)
        return torch.frombuffer(bytearray(content), dtype=like.dtype).reshape(like.shape)


def test_state_is_elsewhere_between_turns_and_comes_back_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Training({**HIFT, "optimizer_state": "keep"}).run()
    place = Elsewhere()
    monkeypatch.setattr(optimizer_state, "to_host", place.send)
    monkeypatch.setattr(optimizer_state, "to_device", place.bring)
    training = Training(HIFT)
    names = {p: name for name, p in training.model.named_parameters()}
    for index in range(STEPS):
        training.step(index)
        here = {
            names[p].split(".")[2]
            for p, state in training.optimizer.state.items()
            if any(value.numel() > 1 for value in state.values())
        }
        # the coming layer's state is back before its turn; after the first round all layers have one
        assert here == ({str((index + 1) % 4)} if index >= 3 else set())
        assert len(place.held) == 2 * len({p for p in training.optimizer.state if names[p].split(".")[2] not in here})
    assert training.engine is not None
    training.engine.detach()
    assert place.held == {}
    resumed = training.model.state_dict()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    kept = Training({**HIFT, "optimizer_state": "keep"})
    kept.run()
    for one, other in zip(kept.optimizer.state.values(), training.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_state_on_a_gpu_is_moved_to_the_cpu_and_back() -> None:
    """Placement alone: fake tensors have the devices of a GPU and of the CPU, and no content."""
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(4, 3, device="cuda"))
        optimizer = torch.optim.Adam([weight])
        state = {"step": torch.tensor(1.0), "exp_avg": torch.empty(4, 3, device="cuda", dtype=torch.bfloat16)}
        optimizer.state[weight] = state
        moved = optimizer_state.OffloadedState(optimizer)
        moved.send(weight)
        moved.send(weight)
        assert {name: value.device.type for name, value in state.items()} == {"step": "cpu", "exp_avg": "cpu"}
        assert state["exp_avg"].dtype is torch.bfloat16
        moved.bring(weight)
        moved.bring(weight)
        assert {name: value.device.type for name, value in state.items()} == {"step": "cpu", "exp_avg": "cuda"}


def test_a_cycle_needs_turns_that_go_round_and_no_eager_update() -> None:
    with pytest.raises(
        PolicyError, match="learning_rate: cycle needs rounds through all layers, not order: independent"
    ):
        make_policy("frozen", turn="layers", order="independent", learning_rate="cycle")
    with pytest.raises(PolicyError, match="learning_rate needs turn: layers"):
        make_policy("frozen", freeze=["*norm*"], learning_rate="cycle")
    model = tiny_decoder("llama")
    with pytest.raises(UnsupportedError, match="Frozen sets learning rates, but update='eager' reads them before"):
        sbp.attach(model, HIFT, optimizer=torch.optim.SGD(model.parameters(), 0.1), update="eager")
