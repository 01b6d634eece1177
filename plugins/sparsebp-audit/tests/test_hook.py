"""Hooks that go through every parameter at every call, and hooks that do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import sparsebp_audit
from sparsebp_audit.report import AuditReport


def _run(register: Callable[[nn.Module], None]) -> AuditReport:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return sparsebp_audit.audit(train, threshold=0.0)


def test_a_hook_that_looks_at_every_gradient_is_found_with_its_visits() -> None:
    def register(model: nn.Module) -> None:
        parameters = list(model.parameters())

        def scan(_: Tensor) -> None:
            assert any(parameter.grad is not None for parameter in reversed(parameters))
            assert [parameter.grad is None for parameter in parameters]

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(scan)

    finding = _run(register).finding("scanning-hooks")
    assert finding is not None
    assert finding.detail.endswith("scan: 12 hooks, 12 calls a step, each call visits 12 parameters")


def test_a_hook_that_goes_through_the_names_of_all_parameters_is_found() -> None:
    def register(model: nn.Module) -> None:
        def search(found: Tensor) -> None:
            assert next(name for name, parameter in model.named_parameters() if parameter is found)
            assert sum(parameter is found for _, parameter in model.named_parameters()) == 1

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(search)

    finding = _run(register).finding("scanning-hooks")
    assert finding is not None
    assert "12 calls a step, each call visits 12 parameters" in finding.detail


def test_a_hook_that_looks_at_its_own_parameter_is_no_waste() -> None:
    norms: list[float] = []

    def register(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda own: norms.append(float(own.grad.norm())))
        model.register_forward_hook(lambda module, args, output: None)

    assert _run(register).findings == ()
    assert len(norms) == 24


def test_hooks_are_themselves_again_afterwards_and_can_be_removed() -> None:
    kept: list[nn.Module] = []

    def hook(parameter: Tensor) -> None:
        pass

    def register(model: nn.Module) -> None:
        kept.append(model)
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(hook)

    _run(register)
    hooks = next(kept[0].parameters())._post_accumulate_grad_hooks
    assert list(hooks.values()) == [hook]
