"""What becomes of gradients: held by nobody, cleared too soon, of no effect; and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sparsebp_audit
from sparsebp_audit.report import AuditReport

N = 8


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 24), nn.Linear(24, 4))


def _loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(N, 16)).square().mean()
    return loss


def _run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> AuditReport:
    def train() -> None:
        for _ in range(steps):
            _loss(model).backward()
            optimizer.step()
            model.zero_grad()

    return sparsebp_audit.audit(train, threshold=0.0)


def test_what_no_optimizer_holds_is_found_with_all_that_leads_to_it_alone() -> None:
    model = _model()
    report = _run(model, torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()], lr=1e-3))
    finding = report.finding("unheld")
    assert finding is not None
    # wgrad of the lowest, and dgrad of the one above, which leads there alone
    assert finding.flops == 2 * N * (16 * 32 + 32 * 24)
    assert finding.saved_bytes == 4 * (16 * 32 + 32) + 4 * N * 16  # gradients, and the lowest one's input
    assert finding.detail == "2 parameters: 0.weight, 0.bias"
    assert [other.kind for other in report.findings] == ["unheld"]


def test_parameters_in_the_middle_that_nobody_holds_cost_their_own_products_alone() -> None:
    model = _model()
    finding = _run(model, torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=1e-3)).finding("unheld")
    assert finding is not None
    assert finding.flops == 2 * N * 32 * 24


def test_a_learning_rate_of_zero_is_found_with_the_optimizers_state() -> None:
    model = _model()
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": [*model[1].parameters(), *model[2].parameters()]},
    ]
    finding = _run(model, torch.optim.AdamW(groups, lr=1e-3)).finding("zero-rate")
    assert finding is not None
    assert finding.flops == 2 * N * (16 * 32 + 32 * 24)
    assert finding.saved_bytes == 3 * 4 * (16 * 32 + 32) + 2 * 4 + 4 * N * 16  # gradient, two moments, steps; the input


def test_a_rate_of_zero_in_the_first_step_of_a_warm_up_is_no_waste() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)

    def train() -> None:
        for _ in range(3):
            _loss(model).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    assert sparsebp_audit.audit(train, threshold=0.0).findings == ()


def test_gradients_that_are_cleared_before_a_step_are_found() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(2):
            for _ in range(2):  # meant to accumulate
                optimizer.zero_grad()
                _loss(model).backward()
            optimizer.step()

    report = sparsebp_audit.audit(train, threshold=0.0)
    finding = report.finding("discarded")
    assert finding is not None
    assert finding.flops == report.backward_flops / 2
    assert finding.detail.startswith("in 2 of 4 backward passes")


def test_parameters_that_are_updated_inside_the_backward_use_their_gradients() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-1e-3)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    report = _run(model, optimizer)
    assert report.findings == ()
    assert report.notes == ()


@pytest.mark.parametrize("clear", [lambda model, _: model.zero_grad(), lambda _, optimizer: optimizer.zero_grad(False)])
def test_accumulation_is_no_waste(clear: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(2):
            for _ in range(3):
                _loss(model).backward()
            optimizer.step()
            clear(model, optimizer)

    report = sparsebp_audit.audit(train, threshold=0.0)
    assert (report.steps, report.backwards, report.findings) == (2, 6, ())


def test_an_update_below_the_last_bit_is_found_and_not_called_exact() -> None:
    model = _model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 1e-12}, {"params": model[2].parameters()}], lr=0.1
    )
    model[1].requires_grad_(False)
    with torch.no_grad():
        model[0].bias.fill_(1.0)

    def train() -> None:
        for _ in range(3):
            model(torch.randn(N, 16, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = sparsebp_audit.audit(train, threshold=0.0)
    finding = report.finding("lost-update")
    assert finding is not None
    assert not finding.exact
    assert finding.flops == 2 * N * (16 * 32 + 32 * 24 + 24 * 4)  # and the gradients that lead there alone
    assert report.wasted_flops_share == 0.0


def test_gradients_that_are_always_zero_are_found_and_a_first_step_of_zeros_is_not() -> None:
    torch.manual_seed(0)
    dead, low, up = nn.Linear(16, 8), nn.Linear(16, 8, bias=False), nn.Linear(8, 8, bias=False)
    nn.init.zeros_(up.weight)  # as a low-rank adapter begins
    model = nn.ModuleList([dead, low, up])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(4):
            x = torch.randn(N, 16)
            (dead(x).relu() * 0.0 + up(low(x)) - x[:, :8]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = sparsebp_audit.audit(train, threshold=0.0)
    finding = report.finding("zero-gradient")
    assert finding is not None
    assert finding.detail == "2 parameters: weight, bias"
    assert [other.kind for other in report.findings] == ["zero-gradient"]


def test_a_loop_without_an_optimizer_is_not_judged_by_one() -> None:
    model = _model()

    def train() -> None:
        for _ in range(3):
            _loss(model).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(1e-3 * parameter.grad)
                    parameter.grad = None

    report = sparsebp_audit.audit(train, threshold=0.0)
    assert (report.steps, report.findings) == (3, ())


def test_gradients_that_autograd_grad_returns_are_used() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(3):
            penalty = torch.autograd.grad(_loss(model), list(model.parameters()))
            assert len(penalty) == 6
            model[:2].requires_grad_(False)
            _loss(model).backward()
            model.requires_grad_(True)
            optimizer.step()
            optimizer.zero_grad()

    assert sparsebp_audit.audit(train, threshold=0.0).findings == ()


def test_two_optimizers_of_two_models_count_as_one_step_each() -> None:
    first, second = _model(), _model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (first, second)]

    def train() -> None:
        for _ in range(3):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                _loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()

    report = sparsebp_audit.audit(train, threshold=0.0)
    assert (report.steps, report.backwards, report.findings) == (3, 6, ())
    assert {row.module for row in report.modules} >= {"0", "Sequential.0"}
