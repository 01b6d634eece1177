"""Loops of many kinds: trained to the same weights as without an audit, and not accused of what they do not waste."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import sparsebp_audit
from sparsebp_audit.report import AuditReport

N = 8
Loop = Callable[[nn.Module], None]
PRODUCTS = 2 * N * (4 * 8 + 8 * 2)  # of a forward


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(N, 4)).square().mean()
    return loss


def _audit(loop: Loop, make: Callable[[], nn.Module] = _model) -> AuditReport:
    """The report of a loop that came to the same weights as alone."""

    def train() -> nn.Module:
        torch.manual_seed(0)
        model = make()
        loop(model)
        return model

    alone, watched = train(), list[nn.Module]()
    report = sparsebp_audit.audit(lambda: watched.append(train()), threshold=0.0)
    assert all(a.equal(b) for a, b in zip(alone.parameters(), watched[0].parameters(), strict=True))
    return report


def _lbfgs(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        return loss.item()

    for _ in range(3):
        optimizer.step(closure)


def _closure_cleared_after_the_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        loss = _loss(model)
        loss.backward()
        return loss.item()

    for _ in range(3):
        optimizer.step(closure=closure)
        optimizer.zero_grad()


def _closure_with_the_last_of_two_batches(model: nn.Module) -> None:  # as Lightning accumulates
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        loss = _loss(model)
        loss.backward()
        return loss.item()

    for _ in range(3):
        optimizer.zero_grad()
        closure()
        optimizer.step(closure)


def _sharpness_aware(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        _loss(model).backward()
        with torch.no_grad():
            moved = [0.01 * parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            torch._foreach_add_(list(model.parameters()), moved)
        optimizer.zero_grad()
        _loss(model).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moved)
        optimizer.step()
        optimizer.zero_grad()


def _one_gradient_a_task(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        output, found = model(torch.randn(N, 4)), []
        for task in range(2):
            optimizer.zero_grad()
            output[:, task].square().mean().backward(retain_graph=True)
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, first, second in zip(model.parameters(), *found, strict=True):
            parameter.grad = first + second
        optimizer.step()


@pytest.mark.parametrize(
    ("loop", "backwards"),
    [
        (_lbfgs, 9),
        (_closure_cleared_after_the_step, 3),
        (_closure_with_the_last_of_two_batches, 6),
        (_sharpness_aware, 6),
        (_one_gradient_a_task, 6),
    ],
)
def test_a_gradient_that_somebody_looked_at_before_it_was_cleared_was_used(loop: Loop, backwards: int) -> None:
    report = _audit(loop)
    assert (report.steps, report.backwards, report.findings, report.notes) == (3, backwards, (), ())
    forwards = 3 if loop is _one_gradient_a_task else backwards
    assert report.forward_flops == forwards / 3 * PRODUCTS  # those inside an optimizer's step as well


def test_gradients_of_a_discriminator_in_its_generators_step_are_still_found() -> None:
    judge, made = nn.Linear(4, 1), nn.Linear(2, 4)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (judge, made)]

    def train() -> None:
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
                judge(made(torch.randn(N, 2))).square().mean().backward()
                optimizer.step()
                nn.utils.clip_grad_norm_(made.parameters(), 1.0)  # looks at the other's gradients alone

    finding = sparsebp_audit.audit(train, threshold=0.0).finding("discarded")
    assert finding is not None
    assert finding.modules == ("Linear",)
    assert finding.flops == pytest.approx(2 * N * 4 * 2 / 3)  # nobody knows yet what becomes of the last ones


def test_the_first_call_of_a_model_may_be_inside_a_transform() -> None:
    def loop(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            slope_ND = grad(lambda x_ND: model(x_ND).square().sum())(torch.randn(N, 4))
            model(slope_ND).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = _audit(loop)
    assert report.findings == ()
    assert {"0", "2"} <= {row.module for row in report.modules}


def test_transforms_of_functions_are_trained_as_without_an_audit() -> None:
    def loop(model: nn.Module) -> None:
        def loss(values: dict[str, Tensor], x_ND: Tensor) -> Tensor:
            result: Tensor = functional_call(model, values, (x_ND,)).square().mean()
            return result

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            values = {name: parameter.detach() for name, parameter in model.named_parameters()}
            for given in (grad(loss), vmap(grad(loss), in_dims=(None, 0))):
                found = given(values, torch.randn(N, 4))
                for name, parameter in model.named_parameters():
                    parameter.grad = found[name].reshape(-1, *parameter.shape).mean(0)
                optimizer.step()
            optimizer.zero_grad()
            assert grad(lambda x_ND: model(x_ND).sum())(torch.randn(N, 4)).shape == (N, 4)
            _loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = _audit(loop)
    assert (report.findings, report.backwards) == ((), 12)
    assert report.saved_bytes > 0  # watched again after the transforms
    assert {"0", "2"} <= {row.module for row in report.modules}


def test_sparse_gradients_are_counted_by_their_entries() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 4, padding_idx=0, sparse=True), nn.Linear(4, 2)

        def forward(self, ids_BT: Tensor) -> Tensor:
            result: Tensor = self.head(self.embed(ids_BT).mean(1))
            return result

    def loop(model: nn.Module) -> None:
        assert isinstance(model, Model)
        optimizers = [torch.optim.SparseAdam(model.embed.parameters()), torch.optim.Adam(model.head.parameters())]
        for _ in range(3):
            model(torch.randint(1, 64, (N, 5))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    report = _audit(loop, Model)
    assert report.findings == ()
    assert report.gradient_bytes == 4 * (5 * N * 4 + 4 * 2 + 2)


def test_layers_that_learn_their_width_from_the_first_batch_have_their_names() -> None:
    def loop(model: nn.Module) -> None:
        optimizer = None
        for _ in range(3):
            loss = _loss(model)
            optimizer = optimizer or torch.optim.SGD(list(model.parameters())[2:], lr=0.1)
            loss.backward()
            optimizer.step()
            model.zero_grad()

    report = _audit(loop, lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(2)))
    (finding,) = report.findings
    assert (finding.kind, finding.detail) == ("unheld", "2 parameters: 0.weight, 0.bias")


@pytest.mark.parametrize("has_labels", [False, True])
def test_a_masked_loss_is_found_however_it_masks(
    has_labels: bool,
) -> None:
    length, kept = 12, 3
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_kept_T = torch.arange(length) < kept

    def train() -> None:
        for _ in range(2):
            ids_BT = torch.randint(0, 50, (N, length))
            logits_NV = model(ids_BT).flatten(0, 1)
            if has_labels:
                labels_N = ids_BT.where(is_kept_T, -100).flatten()
                nn.functional.cross_entropy(logits_NV, labels_N).backward()
            else:
                losses_N = nn.functional.cross_entropy(logits_NV, ids_BT.flatten(), reduction="none")
                (losses_N * is_kept_T.repeat(N)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = sparsebp_audit.audit(train, threshold=0.0)
    lost = N * (length - kept)
    logits, body = report.finding("ignored-logits"), report.finding("zero-rows")
    assert logits is not None
    assert body is not None
    assert (logits.flops, body.flops) == (3 * 2 * lost * 4 * 50, 2 * 2 * lost * 4 * 4)
    assert ("a masked loss" in logits.detail) is not has_labels
    assert report.notes == ()


def test_half_weights_whose_gradients_update_full_ones_are_needed() -> None:
    model = _model().bfloat16()
    full = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(full, lr=1e-9)

    def train() -> None:
        for _ in range(3):
            model(torch.randn(N, 4, dtype=torch.bfloat16)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for own, half in zip(full, model.parameters(), strict=True):
                assert half.grad is not None
                own.grad, half.grad = half.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), full)

    assert "unheld" not in {finding.kind for finding in sparsebp_audit.audit(train, threshold=0.0).findings}


def test_what_no_optimizer_holds_is_found_although_clipping_measures_it() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def train() -> None:
        for _ in range(3):
            _loss(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()

    finding = sparsebp_audit.audit(train, threshold=0.0).finding("unheld")
    assert finding is not None
    assert finding.detail == "2 parameters: 0.weight, 0.bias"


def test_a_training_in_a_thread_of_its_own_is_not_called_clean_without_a_word() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            _loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    def run() -> None:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    assert any("another thread" in note for note in sparsebp_audit.audit(run).notes)
