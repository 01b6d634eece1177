"""CompAct's optimizer: what it computes in the projection that a policy has drawn, and what it is refused with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import sparsebp_cli as sbp
from sparsebp_cli.errors import RecipeError, UnsupportedError
from sparsebp_cli.policy import Site, Step
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run import History
from sparsebp_shelf.optimizers.compact import CompActAdamW
from sparsebp_shelf.policies.compact import CompAct
from sparsebp_shelf.saver import SavedProjection
from tests.saver import saving_by_hand
from tests.worker.conftest import work

POLICY = CompAct(keep=0.5, interval=2)
X_ND = torch.randn(20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make(kind: Any = nn.Linear) -> nn.Sequential:
    torch.manual_seed(1)
    second = nn.Linear(8, 4) if kind is nn.Linear else Conv1D(4, 8)
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), second).double()


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    loss: Tensor = (model(X_ND + number) - 0.5).square().mean()
    return loss


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_a_step_of_descent_is_that_of_the_dense_gradient_of_the_projected_input(kind: Any) -> None:
    """W -= eta S P^T with S = dy^T x P is W -= eta dy^T (x P P^T): with a large eps AdamW is plain descent."""
    model, by_hand, eta, eps = make(kind), make(kind), 0.1, 1e14
    optimizer = CompActAdamW(model.parameters(), lr=eta * eps, betas=(0.0, 0.9), eps=eps, weight_decay=0.0)
    engine = sbp.attach(model, POLICY, optimizer=optimizer)
    for number in range(3):  # the third step is of another matrix
        engine.backward(loss_of(model, number))
        optimizer.step()
        optimizer.zero_grad()
        with saving_by_hand(by_hand, POLICY, Step(number)):
            loss_of(by_hand, number).backward()
        with torch.no_grad():
            for parameter in by_hand.parameters():
                assert parameter.grad is not None
                parameter.sub_(eta * parameter.grad)
                parameter.grad = None
        for mine, other in zip(model.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0.0, atol=1e-11)


def test_adam_runs_on_the_small_gradient_and_its_step_is_projected_back() -> None:
    layer, generator = nn.Linear(16, 6, bias=False).double(), torch.Generator().manual_seed(3)
    weight = layer.weight.detach().clone()
    small = nn.Parameter(torch.zeros(6, 8, dtype=torch.float64))
    adam = torch.optim.Adam([small], lr=1.0)
    optimizer = CompActAdamW(layer.parameters(), lr=0.01)
    engine, matrices = sbp.attach(layer, POLICY, optimizer=optimizer), []
    for number in range(4):
        grad_NO = torch.randn(20, 6, dtype=torch.float64, generator=generator)
        for part in (slice(0, 12), slice(12, 20)):  # two micro-batches share the matrix
            engine.backward((layer(X_ND[part] + number) * grad_NO[part]).sum())
        optimizer.step()
        optimizer.zero_grad()
        saved = POLICY.save(X_ND + number, Site("", 6, (20,)), Step(number))
        assert isinstance(saved, SavedProjection)
        matrices.append(saved.draw())
        before, small.grad = small.detach().clone(), grad_NO.t() @ ((X_ND + number) @ matrices[-1])
        adam.step()
        weight = weight * (1 - 0.01 * 1e-2) + 0.01 * (small.detach() - before) @ matrices[-1].t()
        torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-8, atol=1e-10)
    assert torch.equal(matrices[0], matrices[1])
    assert not torch.equal(matrices[1], matrices[2])
    kept = [value.shape for value in optimizer.state[layer.weight].values() if isinstance(value, Tensor)]
    assert kept == [(6, 8), (6, 8)]


def test_a_weight_that_is_no_linears_alone_has_whole_moments() -> None:
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False))
    model[2].weight = model[0].weight
    optimizer = CompActAdamW(model.parameters())
    engine = sbp.attach(model, POLICY, optimizer=optimizer)
    engine.backward(model(torch.arange(12)).square().mean())
    optimizer.step()
    shapes = {name: tuple(optimizer.state[p]["exp_avg"].shape) for name, p in model.named_parameters()}
    assert shapes == {"0.weight": (12, 8), "1.weight": (8, 4), "1.bias": (8,)}


def test_an_eager_update_and_a_resumed_one_give_the_same_weights() -> None:
    def train(model: nn.Module, optimizer: Any, numbers: range, state: Any = None, **options: Any) -> Any:
        with sbp.attach(model, POLICY, optimizer=optimizer, **options) as engine:
            if state is not None:
                engine.load_state_dict(state)
            for number in numbers:
                engine.backward(loss_of(model, number))
                optimizer.step()
                optimizer.zero_grad()
            return engine.state_dict()

    straight, eager, resumed = make(), make(), make()
    first, second = CompActAdamW(straight.parameters()), CompActAdamW(eager.parameters())
    state = train(straight, first, range(3))
    resumed.load_state_dict(straight.state_dict())
    third = CompActAdamW(resumed.parameters())
    third.load_state_dict(copy.deepcopy(first.state_dict()))
    train(straight, first, range(3, 5), state)
    train(resumed, third, range(3, 5), state)
    train(eager, second, range(5), update="eager")
    for expected, *others in zip(straight.parameters(), eager.parameters(), resumed.parameters(), strict=True):
        assert all(torch.equal(expected, other) for other in others)


def test_without_a_policy_that_keeps_its_matrix_it_is_refused() -> None:
    model = make()
    optimizer = CompActAdamW(model.parameters())
    loss_of(model).backward()
    with pytest.raises(
        UnsupportedError, match=r"compact needs the projection .* pass the optimizer to attach\(optimizer=...\)"
    ):
        optimizer.step()
    for policy in (CompAct(keep=0.5), CompAct(keep=1.0, interval=2)):
        with pytest.raises(UnsupportedError, match=r"CompActAdamW needs gradients .* set its option interval"):
            sbp.attach(model, policy, optimizer=optimizer)


def test_a_recipe_without_a_policy_that_keeps_its_matrix_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "version: 1\nname: refused\nmodel: {name: austen-llama}\ndataset: {name: austen}\n"
        "policy: [{name: compact}]\ntraining: {optim: compact}\n"
    )
    with pytest.raises(
        RecipeError, match=r"training.optim: compact keeps moments of projected gradients: .* option interval"
    ):
        load_recipe(file)


def test_a_run_has_moments_of_the_size_of_the_projection(tiny_recipe: Any, prepared: Any) -> None:
    sizes = {}
    for keep in (1.0, 0.25):
        optim = {"optim": "adamw"} if keep == 1.0 else {"optim": "compact"}
        policy = {"name": "compact", "keep": keep, "interval": 2}
        run = prepared(tiny_recipe(policy=[policy], training={"max_steps": 4, **optim}, measure={"probe_every": 2}))
        assert work(run) == 0, (run.path / "worker.log").read_text()
        history = History.load(run.path)
        assert len(history.series("train/loss")) == 4
        sizes[keep] = list(history.series("memory/optimizer_bytes").values())[-1]
    assert sizes[0.25] < 0.6 * sizes[1.0]  # embedding, norms and biases have whole moments
