"""What is kept between forward and backward: never read, never visited, and what is read after all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparsebp_audit
from sparsebp_audit.report import AuditReport

N, D = 16, 32


def _run(model: nn.Module, loss_of: Callable[[Tensor], Tensor], steps: int = 3) -> AuditReport:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def train() -> None:
        for _ in range(steps):
            loss_of(torch.randn(N, D)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return sparsebp_audit.audit(train, threshold=0.0)


def test_a_branch_that_is_no_part_of_the_loss_is_found_with_what_it_keeps() -> None:
    model = nn.ModuleDict({"body": nn.Linear(D, D), "probe": nn.Linear(D, D)})
    seen = []

    def loss_of(x_ND: Tensor) -> Tensor:
        hidden_ND = model["body"](x_ND)
        seen.append(model["probe"](hidden_ND.tanh()).sigmoid().mean().item())
        loss: Tensor = hidden_ND.square().mean()
        return loss

    report = _run(model, loss_of)
    finding = report.finding("unvisited-saved")
    assert finding is not None
    assert finding.saved_bytes == 2 * 4 * N * D  # what tanh and sigmoid made, which their backward would read
    assert finding.flops == 0.0
    assert [other.kind for other in report.findings] == ["unvisited-saved"]
    assert "no gradient reached 2 parameters" in report.notes[0]


def test_what_a_function_saves_and_never_asks_for_is_found() -> None:
    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x_ND: Tensor) -> Tensor:
            ctx.save_for_backward(x_ND * 1.0)
            return x_ND * 2.0

        @staticmethod
        def backward(ctx: Any, grad_ND: Tensor) -> Tensor:
            return grad_ND * 2.0

    model = nn.Linear(D, D)
    report = _run(model, lambda x_ND: Forgetful.apply(model(x_ND)).square().mean())
    finding = report.finding("unread-saved")
    assert finding is not None
    assert finding.saved_bytes == 4 * N * D
    assert [other.kind for other in report.findings] == ["unread-saved"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_keep_nothing_for_nothing(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

    def loss_of(x_ND: Tensor) -> Tensor:
        hidden_ND = model[0](x_ND)
        hidden_ND = checkpoint(model[1:], hidden_ND, use_reentrant=reentrant)
        loss: Tensor = hidden_ND.square().mean()
        return loss

    report = _run(model, loss_of)
    assert report.findings == ()
    assert report.recomputed_flops == 2 * 2 * N * D * D or reentrant is False  # the last one's output is not needed


def test_a_graph_that_is_kept_for_later_is_no_waste() -> None:
    model = nn.Linear(D, D)
    kept: list[Tensor] = []

    def loss_of(x_ND: Tensor) -> Tensor:
        loss: Tensor = model(x_ND).square().mean()
        kept.append(model(x_ND).tanh().sum())
        return loss + sum(one for one in kept[-2:])

    assert _run(model, loss_of, steps=1).findings == ()


def test_ragged_layers_convolutions_and_embeddings_are_counted_and_clean() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(D, 8), "conv": nn.Conv1d(8, 4, 3), "head": nn.Linear(4, 3)})
    ids = torch.arange(D).expand(N, D)

    def loss_of(_: Tensor) -> Tensor:
        hidden = model["conv"](model["embed"](ids).transpose(1, 2)).relu().mean(-1)
        return nn.functional.cross_entropy(model["head"](hidden), torch.arange(N) % 3)

    report = _run(model, loss_of)
    conv = next(row for row in report.modules if row.module == "Conv1d")  # called by itself
    product = 2 * N * (D - 2) * 4 * 8 * 3
    assert (conv.forward_flops, conv.dgrad_flops, conv.wgrad_flops) == (product,) * 3
    assert report.findings == ()


@pytest.mark.compiles
@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_compiled_model_is_watched_uncompiled_and_a_note_says_so(way: str) -> None:
    class Model(nn.Sequential):
        def forward(self, x_ND: Tensor) -> Tensor:  # dynamo's memory is of code: this is nobody else's
            return self[2](self[1](self[0](x_ND)))

    model = Model(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    called: Any = torch.compile(model, backend="eager") if way == "wrapped" else model
    if way == "in place":
        model.compile(backend="eager")
    report = _run(model, lambda x_ND: called(x_ND).square().mean())
    assert report.findings == ()
    assert report.forward_flops == 2 * 2 * N * D * D
    assert {"0", "2"} <= {row.module for row in report.modules}
    assert any("the audit switched torch.compile off" in note for note in report.notes)
    torch._dynamo.utils.counters.clear()
    called(torch.randn(N, D))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0  # and compiles again afterwards


@pytest.mark.compiles
def test_a_compiled_function_is_watched_uncompiled_and_compiles_again_later() -> None:
    model = nn.Linear(D, D)

    @torch.compile(backend="eager")
    def loss_of(x_ND: Tensor) -> Tensor:
        return nn.functional.linear(x_ND, model.weight).square().mean()

    report = _run(model, loss_of)
    assert report.forward_flops == 2 * N * D * D
    assert any("the audit switched torch.compile off" in note for note in report.notes)
    torch._dynamo.utils.counters.clear()
    loss_of(torch.randn(N, D))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
