"""Phases in a loop are an engine that is detached and another one that is attached, at the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError, SparseBPError, UnsupportedError, UsageError

from .families import tiny_decoder

STEPS, RATE = 10, 0.01
DENSE: list[Any] = ["dense"]
ROWS = [{"name": "topk", "keep": 0.25, "along": "rows"}]
FEEDBACK = [{"name": "topk", "keep": 0.3, "along": "columns", "error_feedback": True}]
DRAWN = [{"name": "random", "keep": 0.5, "along": "rows", "weighted": True}]
TURNS = [{"name": "frozen", "turn": "layers", "optimizer_state": "drop"}]
TOKENS = [{"name": "tokens", "score": "random", "keep": 0.5}]
BLOCKS = [{"name": "dropbp", "keep": 0.5}]
COMPARING = [{"name": "tokens", "score": "excess", "reference": "other", "keep": 0.5}]


def phases(*policies: Any, ends: Sequence[float] = (0.4, 0.7)) -> list[Any]:
    return [{"until": end, "policy": p} for end, p in zip(ends, policies[:-1], strict=False)] + [
        {"policy": policies[-1]}
    ]


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = tiny_decoder("llama", num_hidden_layers=3, tie_word_embeddings=False)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)


def loss_of(model: nn.Module, index: int) -> Tensor:
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(index))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def train(engine: Any, model: nn.Module, optimizer: Any, rates: Any, index: int, passes: int = 1) -> None:
    for number in range(passes):
        engine.backward(loss_of(model, 10 * index + number), is_last=number == passes - 1)
    optimizer.step()
    rates.step()
    optimizer.zero_grad()


def by_hand(policies: Sequence[Any], boundaries: Sequence[int], passes: int = 1, **options: Any) -> nn.Module:
    """Attach, detach and attach again, as a user of ``attach`` would write it."""
    model, optimizer, rates = make()
    given: Any = {"optimizer": optimizer, "num_steps": STEPS, **options}
    engine = sbp.attach(model, policies[0], **given)
    for index in range(STEPS):
        if index in boundaries:
            before = engine.state_dict()
            engine.detach()
            engine = sbp.attach(model, policies[boundaries.index(index) + 1], **given)
            own = engine.state_dict() | {"index": index}
            engine.load_state_dict(own | {key: before[key] for key in own if key == "gradient_norm"})
        train(engine, model, optimizer, rates, index, passes)
    engine.detach()
    return model


def assert_same(one: nn.Module, two: nn.Module) -> None:
    other = dict(two.named_parameters())
    assert all(torch.equal(value, other[name]) for name, value in one.named_parameters())


EAGER = {"update": "eager", "eager_clip": "previous", "max_grad_norm": 0.3}


@pytest.mark.parametrize(
    ("policies", "options"),
    [
        ((DENSE, ROWS, DENSE), {}),
        ((FEEDBACK, DRAWN, FEEDBACK), {}),
        ((DENSE, TURNS, ROWS), {}),
        ((TOKENS, BLOCKS, DRAWN), {}),
        ((ROWS, DENSE, DRAWN), EAGER),
        ((ROWS, DENSE, DRAWN), {"segments": 2}),
    ],
    ids=["rows", "feedback", "turns", "tokens", "eager", "segments"],
)
@pytest.mark.parametrize("passes", [1, 2])
def test_phases_equal_detaching_and_attaching_by_hand(policies: Any, options: Any, passes: int) -> None:
    expected = by_hand(policies, (4, 7), passes, **options)
    model, optimizer, rates = make()
    with sbp.attach_phases(model, phases(*policies), optimizer=optimizer, num_steps=STEPS, **options) as phased:
        for index in range(STEPS):
            train(phased, model, optimizer, rates, index, passes)
    assert_same(expected, model)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("stop", [2, 4, 6, 7, 9])
@pytest.mark.parametrize("policies", [(FEEDBACK, TURNS, DRAWN), (TOKENS, FEEDBACK, BLOCKS)])
def test_a_training_resumes_in_its_phase_to_the_same_bits(policies: Any, stop: int) -> None:
    expected = by_hand(policies, (4, 7))
    model, optimizer, rates = make()
    schedule = phases(*policies)
    phased = sbp.attach_phases(model, schedule, optimizer=optimizer, num_steps=STEPS)
    for index in range(stop):
        train(phased, model, optimizer, rates, index)
    weights, states = model.state_dict(), (optimizer.state_dict(), rates.state_dict(), phased.state_dict())
    again, optimizer, rates = make()
    again.load_state_dict(weights)
    phased = sbp.attach_phases(again, schedule, optimizer=optimizer, num_steps=STEPS)
    for part, state in zip((optimizer, rates, phased), states, strict=True):
        part.load_state_dict(state)
    for index in range(stop, STEPS):
        train(phased, again, optimizer, rates, index)
    assert_same(expected, again)
    with pytest.raises(UsageError, match="the loaded state is not a state of an engine"):
        phased.load_state_dict({})


def test_the_report_covers_all_phases() -> None:
    model, optimizer, rates = make()
    with sbp.attach_phases(model, phases(DENSE, ROWS, ends=[0.4]), optimizer=optimizer, num_steps=STEPS) as phased:
        first = phased.engine
        for index in range(STEPS):
            assert phased.engine.now().index == index
            assert (phased.engine is first) == (index < 4)
            train(phased, model, optimizer, rates, index)
        report = phased.report()
        shared = phased.engine.take_kept_share()
    assert report.num_backwards == STEPS
    assert {site.calls for site in report.sites} == {STEPS}
    assert report.kept_share == shared == pytest.approx((4 * 1.0 + 6 * 0.25) / 10)
    assert report.claimed_share == pytest.approx((4 * 1.0 + 6 * 0.25) / 10)
    assert report.whole is not None
    assert report.whole.num_passes == 4  # passes 1, 2, 4 and 8


def test_a_user_who_detaches_in_a_phase_has_the_model_back() -> None:
    model, optimizer, rates = make()
    phased = sbp.attach_phases(model, phases(DENSE, TURNS, ends=[0.2]), optimizer=optimizer, num_steps=STEPS)
    for index in range(3):
        train(phased, model, optimizer, rates, index)
    assert not all(p.requires_grad for p in model.parameters())
    phased.detach()
    phased.detach()
    assert all(p.requires_grad for p in model.parameters())
    other = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, 0).backward()
    other.step()  # hooks for all optimizers are gone, and would not heed another one


@pytest.mark.parametrize(
    ("schedule", "error", "text"),
    [
        ([{"policy": "dense"}], UsageError, "schedule: needs 2 phases or more, got 1"),
        ([{"policy": "dense"}] * 2, UsageError, r"schedule.0: until is missing: give the fraction of the training"),
        (phases(DENSE, ROWS, DENSE, ends=[0.5, 0.3]), UsageError, r"schedule.1: must be above 0.5, .*, got 0.3"),
        ([*phases(DENSE, ROWS, ends=[0.5])[:1] * 1, {"until": 0.9, "policy": ROWS}], UsageError, "leave its until out"),
        (phases(DENSE, ROWS, ends=[1.5]), UsageError, r"schedule.0.until: must be .* in \(0, 1\), got 1.5"),
        (phases(DENSE, ROWS, ends=[0.01]), UsageError, "0.01 leaves phase 0 without a step, because num_steps is 10"),
        ([{"until": 0.5, "polcy": DENSE}, {"policy": ROWS}], UsageError, "schedule.0: a phase is .*, got polcy"),
        ([{"until": 0.5}, {"policy": ROWS}], UsageError, "schedule.0: a phase is .*, policy is missing"),
        (["dense", "topk"], UsageError, "schedule.0: a phase is a mapping with policy and until, got 'dense'"),
        (phases(DENSE, [{"name": "topk", "keep": 2.0}]), PolicyError, "keep"),
        (phases(DENSE, [{"name": "frozen", "freeze": ["*nothing*"]}]), PolicyError, "matches no parameter"),
        (
            phases(DENSE, [{"name": "infobatch"}]),
            UnsupportedError,
            "InfoBatch chooses the examples of a whole epoch, but phases can end within one",
        ),
        (phases(DENSE, COMPARING), UsageError, "needs a reference model: pass attach"),
    ],
)
def test_what_cannot_be_a_schedule_is_refused_before_anything_starts(
    schedule: Any, error: type[SparseBPError], text: str
) -> None:
    model, optimizer, _ = make()
    with pytest.raises(error, match=text):
        sbp.attach_phases(model, schedule, optimizer=optimizer, num_steps=STEPS)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    with sbp.attach(model, "dense"):
        pass


def test_one_phase_may_read_a_reference_and_one_that_none_reads_is_refused() -> None:
    model, optimizer, rates = make()
    reference = make()[0]
    with pytest.raises(UsageError, match="no policy uses a reference: leave out"):
        sbp.attach_phases(
            model, phases(DENSE, ROWS, ends=[0.5]), optimizer=optimizer, num_steps=STEPS, reference=reference
        )
    schedule = phases(DENSE, COMPARING, ends=[0.5])
    with sbp.attach_phases(model, schedule, optimizer=optimizer, num_steps=STEPS, reference=reference) as phased:
        for index in range(STEPS):
            train(phased, model, optimizer, rates, index)
        assert phased.report().chosen is not None
