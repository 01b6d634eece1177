"""The audit changes nothing: not the training, not PyTorch, not the model."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import sparsebp_audit
from sparsebp_cli.errors import UsageError


def _train(model: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 4, (8,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 4))


def _patched() -> list[object]:
    optimizer = sys.modules["torch.optim.optimizer"]
    return [
        nn.Module.__call__,
        nn.Module.named_parameters,
        nn.Module.zero_grad,
        torch.optim.Optimizer.zero_grad,
        torch.autograd._engine_run_backward,
        torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
    ]


@pytest.mark.parametrize("steps", [None, 2])
def test_training_under_an_audit_gives_the_same_weights_and_everything_is_put_back(steps: int | None) -> None:
    before, model = _patched(), _model()
    plain = _train(_model(), 4)
    with sparsebp_audit.audit(model, steps=steps) as audit:
        watched = _train(model, 4)
    assert _patched() == before
    assert all(plain[name].equal(watched[name]) for name in plain)
    assert audit.report().steps == (steps or 4)


def test_an_audit_that_ends_by_an_error_puts_everything_back_and_still_reports() -> None:
    before, model = _patched(), _model()

    def fail(module: nn.Module, args: object) -> None:
        raise RuntimeError("in the forward")

    def train() -> None:
        with audit:
            _train(model, 2)
            model[3].register_forward_pre_hook(fail)
            _train(model, 1)

    audit = sparsebp_audit.audit(model)
    with pytest.raises(RuntimeError, match="in the forward"):
        train()
    assert _patched() == before
    assert audit.report().findings == ()


def test_modes_and_hooks_of_somebody_else_are_left_alone() -> None:
    def train() -> None:
        model = _model()
        with torch.autograd.graph.save_on_cpu(), torch.utils.flop_counter.FlopCounterMode(display=False) as flops:
            _train(model, 3)
        assert flops.get_total_flops() > 0

    before = _patched()
    assert sparsebp_audit.audit(train, steps=2).steps == 2
    assert _patched()[:5] == before[:5]


def test_bad_use_is_one_clear_line() -> None:
    for call, said in (
        (lambda: sparsebp_audit.audit(lambda: None), "no backward pass was seen"),
        (lambda: sparsebp_audit.audit(_model(), steps=0), "steps must be at least 1, got 0"),
        (lambda: sparsebp_audit.audit(threshold=1.0), "threshold must be in [0, 1), got 1.0"),
        (lambda: sparsebp_audit.audit(3), "takes a model or a function without arguments, got int"),  # type: ignore[call-overload]
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert said in str(caught.value)
    with sparsebp_audit.audit(_model()) as audit:
        with pytest.raises(UsageError, match="still running"):
            audit.report()
        with pytest.raises(UsageError, match="another audit is running"):
            sparsebp_audit.audit().start()
