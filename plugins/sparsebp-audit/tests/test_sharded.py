"""Parameters that FSDP2 shards are those of the model, whatever stands for them in a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import sparsebp_audit

N, D = 8, 16
RANKS = 2


@pytest.fixture
def group() -> Iterator[None]:
    """Two processes, of which this is the first and the other does not exist: what they would exchange is left out."""
    distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_sharded_model_is_counted_by_modules_and_wastes_what_nobody_holds(accumulates: bool) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model[2], mesh=mesh)  # gathered again for the backward
    fully_shard(model, mesh=mesh)  # not freed in between
    assert isinstance(model, FSDPModule)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)

    def train() -> None:
        for _ in range(3):
            for is_last in (False, True) if accumulates else (True,):
                model.set_requires_gradient_sync(is_last)
                model(torch.randn(N, D)).square().mean().backward()
            optimizer.step()
            model.zero_grad()

    report = sparsebp_audit.audit(train, threshold=0.0)
    times = 2 if accumulates else 1
    work = {row.module: (row.forward_flops, row.dgrad_flops, row.wgrad_flops) for row in report.modules}
    each = 2 * N * D * D * times
    assert work["2"] == (each, each, each)
    assert work["0"] == (each, 0.0, each)
    assert "discarded" not in {finding.kind for finding in report.findings}
    finding = report.finding("unheld")
    assert finding is not None
    assert finding.detail == "2 parameters: 4.weight, 4.bias"
    assert finding.flops == 2 * N * D * 2 * times
    assert report.parameter_bytes == 4 * (2 * (D * D + D) + 2 * D + 2) / RANKS
