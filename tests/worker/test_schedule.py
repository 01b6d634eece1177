"""Schedules of the learning rate are transformers' own, to the last bit."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import TrainingSection
from sparsebp_cli.worker.schedule import build_schedule

NAMES = get_args(TrainingSection.model_fields["lr_scheduler_type"].annotation)


def rates(make: Any, steps: int) -> list[float]:
    """Return the learning rate of each step, and of two after the last."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=3e-3)
    schedule, found = make(optimizer), []
    for _ in range(steps + 2):
        found += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7, 29])
@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_gives_the_rates_of_transformers(name: Any, warmup: int) -> None:
    section = TrainingSection(lr_scheduler_type=name, max_steps=29, warmup_steps=warmup, learning_rate=3e-3)
    if name == "polynomial" and warmup == 29:  # theirs divides by zero in the step after the last
        return
    theirs = rates(lambda optimizer: get_scheduler(name, optimizer, warmup, 29), 29)
    assert rates(lambda optimizer: build_schedule(section, optimizer), 29) == theirs
    assert len(set(theirs)) > 1 or name.startswith("constant")


def test_a_schedule_goes_on_from_its_state() -> None:
    section = TrainingSection(lr_scheduler_type="cosine", max_steps=9, warmup_steps=2)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=section.learning_rate)
    theirs = get_scheduler("cosine", optimizer, 2, 9)  # of a checkpoint that an earlier version wrote
    for _ in range(4):
        optimizer.step()
        theirs.step()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=section.learning_rate)
    ours = build_schedule(section, other)
    ours.load_state_dict(theirs.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for one, schedule in ((optimizer, theirs), (other, ours)):
        one.step()
        schedule.step()
    assert ours.get_last_lr() == theirs.get_last_lr() == [other.param_groups[0]["lr"]]


def test_a_polynomial_schedule_that_would_rise_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1e-8)
    with pytest.raises(DataError, match="learning_rate: 1e-08 is not above 1e-07, at which"):
        build_schedule(TrainingSection(lr_scheduler_type="polynomial", learning_rate=1e-8), optimizer)
