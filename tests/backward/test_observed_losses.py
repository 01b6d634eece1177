"""What policies of examples and tokens observe of a step: the losses that were read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sparsebp_cli.backward.attachment import attach
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policies.lossless import Lossless
from sparsebp_cli.policy import (
    Measure,
    Observation,
    Observed,
    ReadTokens,
    Score,
    ScoredTokenSelector,
    SiteGradient,
    Stateful,
    Step,
    Tokens,
)
from sparsebp_shelf.example import Examples, ExampleSelector, ReadExamples
from sparsebp_shelf.policies.selective_backprop import SelectiveBackprop, rank
from tests.backward.families import tiny_decoder
from tests.promise import Nothing

ALWAYS: dict[str, Any] = {"start": 0.0, "end": 1.0, "interrupt": 0, "keep": 0.5}
SEEN: list[Any] = []  # what the policies below were shown, in order


class Watching(Nothing, Stateful[object]):
    """Counts the steps that it observes."""

    what: ClassVar[type[Observed]]

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset({self.what})

    def init(self, places: Sequence[object], /) -> dict[str, Any]:
        return {"steps": 0}

    def observe(self, state: Any, observation: Observation, step: Step) -> dict[str, Any]:
        SEEN.append(observation["seen"])
        return {"steps": state["steps"] + 1}


class WatchingExamples(Watching, ExampleSelector):
    what: ClassVar[type[Observed]] = ReadExamples

    def measure(self, seen: Any, step: Step) -> dict[str, Measure]:
        return {"seen": Measure(seen.examples.loss_B)}

    @property
    def budget(self) -> float:
        return 0.5

    def needs_loss(self, step: Step) -> bool:
        return True

    def choose(self, examples: Examples, step: Step) -> Tensor:
        SEEN.append((step.state["steps"], examples.loss_B))
        return torch.tensor([0])


class WatchingTokens(Watching, ScoredTokenSelector):
    what: ClassVar[type[Observed]] = ReadTokens

    def measure(self, seen: Any, step: Step) -> dict[str, Measure]:
        return {"seen": Measure(seen.tokens.scores["loss"])}

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset({"loss"})

    def score_tokens(self, tokens: Tokens, step: Step) -> Tensor:
        SEEN.append((step.state["steps"], tokens.scores["loss"]))
        return tokens.scores["loss"]


def batch(seed: int) -> dict[str, Tensor]:
    ids_BT = torch.randint(3, 40, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids_BT, "labels": ids_BT}


def train(policy: Any, steps: int = 2, micro_batches: int = 2, state: Any = None) -> tuple[Any, Any]:
    model = tiny_decoder("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = attach(model, policy, optimizer=optimizer, num_steps=steps)
    for step in range(steps):
        for number in range(micro_batches):
            engine.backward(model(**batch(10 * step + number)).loss)
        optimizer.step()
        optimizer.zero_grad()
    return model, engine


@pytest.mark.parametrize("policy", [WatchingExamples(), WatchingTokens(keep=0.5)], ids=["examples", "tokens"])
def test_losses_that_were_read_are_observed_and_the_state_reaches_the_decision(policy: Any) -> None:
    SEEN.clear()
    train(policy)
    for step, (first, second, observed) in enumerate((SEEN[:3], SEEN[3:])):
        assert (first[0], second[0]) == (step, step)
        assert list(observed) == ["0", "1"]
        assert torch.equal(observed["0"], first[1])
        assert torch.equal(observed["1"], second[1])
        assert float(first[1].max()) > 0


def test_a_probe_leaves_what_the_step_has_read_alone() -> None:
    SEEN.clear()
    model = tiny_decoder("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = attach(model, WatchingExamples(), optimizer=optimizer)
    engine.backward(model(**batch(0)).loss)
    with engine.probing():
        engine.backward(model(**batch(1)).loss)
    optimizer.step()
    assert list(SEEN[-1]) == ["0"]


def test_the_history_ranks_as_the_paper_does() -> None:
    before_R, loss_B = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.5, 4.0, 5.0])
    window = torch.cat([torch.full((4,), torch.inf), before_R])
    share = [float(rank(loss_B[i : i + 1], window)[0]) * 5 for i in range(4)]  # each enters the window first
    assert share == pytest.approx([0.5, 2.0, 3.0, 4.0])  # none below counts as half a place
    whole = (before_R < loss_B[:, None]).double().mean(1)
    assert whole.tolist() == [0.0, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(("beta", "mean"), [(1.0, 1 / 2), (2.0, 1 / 3)])
def test_the_mean_chance_of_the_paper_is_the_share_that_is_kept(beta: float, mean: float) -> None:
    window = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    chance = rank(window, window) ** beta  # a batch as long as the window takes its place
    assert float(chance.mean()) == pytest.approx(mean, abs=1e-3)
    assert SelectiveBackprop(keep=1 / (beta + 1)).keep == pytest.approx(mean)


def test_the_window_keeps_the_latest_losses() -> None:
    policy = SelectiveBackprop(**ALWAYS, history=3)
    state = policy.init(())
    for losses in ([1.0, 2.0], [3.0, 4.0]):
        state = policy.observe(state, Observation(loss={"0": torch.tensor(losses)}), Step(0))
    assert torch.as_tensor(state["loss_R"]).tolist() == [2.0, 3.0, 4.0]
    assert rank(torch.tensor([3.5]), torch.as_tensor(state["loss_R"])).tolist() == pytest.approx([1 / 3])


def test_ranks_in_the_window_give_the_chances_within_a_batch() -> None:
    policy = SelectiveBackprop(**ALWAYS | {"keep": 0.25}, history=8)
    step = {"loss_R": torch.tensor([9.0] * 4 + [0.5] * 4)}
    chosen = torch.zeros(4)
    for index in range(2000):
        index_K = policy.choose(Examples(4, torch.tensor([0.1, 0.2, 1.0, 2.0])), Step(index, state=step))
        assert index_K is not None
        chosen[index_K] += 1
    # The window is [0.5] * 4 and the batch: ranks 1/2, 1, 6 and 7 of 8, to the third power.
    weight = torch.tensor([0.5, 1.0, 6.0, 7.0]) ** 3
    assert torch.allclose(chosen / 2000, weight / weight.sum(), atol=0.04)


def test_a_resumed_history_is_the_uninterrupted_one_bit_for_bit() -> None:
    policy = SelectiveBackprop(**ALWAYS, history=16)
    whole, _ = train(policy, steps=4)
    model = tiny_decoder("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = attach(model, policy, optimizer=optimizer, num_steps=4)
    for step in range(4):
        for number in range(2):
            engine.backward(model(**batch(10 * step + number)).loss)
            saved = engine.state_dict()
            engine.detach()
            gradients = [p.grad for p in model.parameters()]
            engine = attach(model, policy, optimizer=optimizer, num_steps=4)
            engine.load_state_dict(saved)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))


class WatchingPacks(Watching, Lossless):
    what: ClassVar[type[Observed]] = SiteGradient


def test_a_kind_that_is_given_no_state_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match="WatchingPacks keeps a state, but SparseBP supports no state for a BatchPacker"
    ):
        train(WatchingPacks())
