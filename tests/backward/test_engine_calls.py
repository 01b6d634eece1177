"""What the engine costs the host for each linear: calls of its own Python functions, which a small model waits for."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import sparsebp_cli as sbp

LINEARS = 20


@pytest.mark.parametrize(("policies", "most"), [([], 24), ([sbp.make_policy("topk", keep=0.5)], 41)])
def test_a_linear_costs_few_calls_of_the_package(policies: list[Any], most: int) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LINEARS)))
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(2, 3, 8)
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "sparsebp_cli" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1

    with sbp.attach(model, policies, optimizer=optimizer) as engine:
        for number in range(5):  # the graph of the fifth is not read for the report
            sys.setprofile(see if number == 4 else None)
            try:
                engine.backward(model(x).sum())
            finally:
                sys.setprofile(None)
    of_linears = {name: count for name, count in calls.items() if count >= LINEARS - 1}
    assert sum(of_linears.values()) / LINEARS <= most, of_linears
