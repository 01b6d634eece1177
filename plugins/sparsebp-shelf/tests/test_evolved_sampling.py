"""Evolved sampling: the two averages over several visits, what is drawn by them, and data without rows refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebp_cli.backward import attach
from sparsebp_cli.backward.phase import attach_phases
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Examples, Observation, Step
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.data import EncodedExample
from sparsebp_shelf.example import WeightedExamples
from sparsebp_shelf.policies.evolved_sampling import EvolvedSampling
from tests.backward.families import tiny_decoder
from tests.backward.score.test_scorer import batch

NUM_EXAMPLES = 10


def rows(*numbers: int) -> dict[str, Tensor]:
    return {"example_row": torch.tensor(numbers)}


def test_three_visits_give_the_averages_of_the_recursion() -> None:
    """s: 1/4 -> 0.9 / 4 + 0.1 * 2 = 0.425 -> 0.9 * 0.425 + 0.1 * 1 = 0.4825; w at the third visit from the second s."""
    policy = EvolvedSampling(keep=0.5)
    state = policy.init(range(4))
    assert torch.as_tensor(state["average_N"]).tolist() == [0.25] * 4
    for loss, average in ((2.0, 0.425), (1.0, 0.4825), (4.0, 0.83425)):
        observation = Observation(loss={"0": torch.tensor([loss])}, row={"0": torch.tensor([2])})
        state = policy.observe(state, observation, Step(0))
        assert torch.as_tensor(state["average_N"]).tolist() == pytest.approx([0.25, 0.25, average, 0.25])


def test_examples_are_drawn_in_proportion_to_their_weights() -> None:
    """w = 0.2 s + 0.8 l: of s = 1, 2, 3, 4 and l = 0.5, 2, 1, 1 these are 0.6, 2, 1.4, 1.6; one is drawn."""
    policy = EvolvedSampling(keep=0.25, weighted=True)
    state = {"average_N": torch.tensor([4.0, 9.0, 3.0, 2.0, 1.0])}
    examples = Examples(4, torch.tensor([0.5, 2.0, 1.0, 1.0]), row_B=torch.tensor([4, 3, 2, 0]))
    share = [0.6 / 5.6, 2.0 / 5.6, 1.4 / 5.6, 1.6 / 5.6]
    counts = torch.zeros(4)
    for index in range(2000):
        choice = policy.choose(examples, Step(index, state=state))
        assert isinstance(choice, WeightedExamples)
        (drawn,) = choice.index_K.tolist()
        counts[drawn] += 1
        assert float(choice.weight_K) == pytest.approx(1 / share[drawn], rel=1e-5)
    for number, expected in enumerate(share):
        assert abs(float(counts[number]) / 2000 - expected) <= 6 * (expected * (1 - expected) / 2000) ** 0.5, number


def test_the_table_follows_the_losses_of_every_visit_and_survives_a_resume() -> None:
    policy = EvolvedSampling(keep=0.5)

    def run(*, stops: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        model, arguments = tiny_decoder("llama"), batch(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        expected, state = torch.full((NUM_EXAMPLES,), 1.0 / NUM_EXAMPLES), None
        engine = attach(model, policy, optimizer=optimizer, num_examples=NUM_EXAMPLES)
        for number in range(4):
            row_B = torch.tensor([7, 1, 2 + number, 9])
            with torch.no_grad(), engine.disabled():
                losses = [float(model(**{k: v[i : i + 1] for k, v in arguments.items()}).loss) for i in range(4)]
            expected[row_B] = 0.9 * expected[row_B] + 0.1 * torch.tensor(losses)
            engine.backward(model(**arguments, example_row=row_B).loss)
            optimizer.step()
            optimizer.zero_grad()
            state = engine.state_dict()
            if stops:
                engine.detach()
                engine = attach(model, policy, optimizer=optimizer, num_examples=NUM_EXAMPLES)
                engine.load_state_dict(state)
        assert state is not None
        return state["policy_state"]["0/average_N"], expected, [p.detach() for p in model.parameters()]

    table, expected, weights = run(stops=False)
    torch.testing.assert_close(table, expected, rtol=1e-5, atol=1e-6)
    again, _, same = run(stops=True)
    assert torch.equal(table, again)
    assert all(map(torch.equal, weights, same))


def test_evaluation_and_a_disabled_engine_ignore_the_rows() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    plain = model(**arguments).loss
    with attach(model, EvolvedSampling(), num_examples=NUM_EXAMPLES) as engine, engine.disabled():
        assert torch.equal(model(**arguments, **rows(0, 1, 2, 3)).loss, plain)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ({}, r"the batch needs a column 'example_row', int64 of shape \(B,\)"),
        (rows(0, 1), r"example_row must be int64 of shape \(4,\), got torch.int64 \(2,\)"),
        ({"example_row": torch.zeros(4)}, r"must be int64 of shape \(4,\), got torch.float32"),
        (rows(0, 1, 2, NUM_EXAMPLES), r"must be in \[0, 10\), because of attach\(num_examples=10\), got 0 to 10"),
    ],
)
def test_batches_that_do_not_say_which_examples_they_hold_are_refused(column: Any, text: str) -> None:
    model = tiny_decoder("llama")
    with attach(model, EvolvedSampling(), num_examples=NUM_EXAMPLES), pytest.raises(UsageError, match=text):
        model(**batch(4), **column)


def test_data_without_rows_is_refused_before_anything_starts() -> None:
    model = tiny_decoder("llama")
    text = r"EvolvedSampling keeps state for each training example: pass attach\(num_examples=...\)"
    with pytest.raises(UsageError, match=text):
        attach(model, EvolvedSampling())
    schedule: Any = [{"until": 0.5, "policy": "dense"}, {"policy": EvolvedSampling()}]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(UsageError, match=text):
        attach_phases(model, schedule, optimizer=optimizer, num_steps=4)
    attach_phases(model, schedule, optimizer=optimizer, num_steps=4, num_examples=4).detach()


def test_a_batch_of_the_worker_says_which_examples_it_holds() -> None:
    examples = [
        EncodedExample(torch.full((4,), number).numpy(), torch.full((4,), number).numpy()) for number in range(7)
    ]
    order = BatchOrder(examples, 3, seed=1, pad_token_id=0, columns={"example_row"})
    for number in range(5):  # over the end of an epoch
        drawn = order[number]
        assert torch.equal(drawn["example_row"], drawn["input_ids"][:, 0])
        others = next(order.other_batches(number, 2))
        assert torch.equal(others["example_row"], others["input_ids"][:, 0])


def test_everything_kept_keeps_no_table_and_its_control_draws_as_many() -> None:
    assert not EvolvedSampling(keep=1.0).reads_rows
    assert EvolvedSampling(keep=0.25).control == {
        "name": "uniform",
        "start": 0,
        "end": 1,
        "interrupt": 0,
        "keep": 0.25,
    }
    assert not EvolvedSampling().unbiased
    assert EvolvedSampling(weighted=True).unbiased
