"""LoRA-FA: the projected gradient of second factors, and what it is refused with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import RecipeError, UnsupportedError
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.recipe.schema import TrainingSection
from sparsebp_cli.run import History
from sparsebp_cli.worker.optimizer import build_optimizer
from sparsebp_shelf.optimizers.lora_fa import LoRAFA, project
from tests.worker.conftest import LLAMA, work

X_ND = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FIRST = ["*lora_A*"]


def adapted(**options: Any) -> Any:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    found: Any = get_peft_model(plain, LoraConfig(r=2, lora_alpha=6, target_modules=["0", "2"], **options)).double()
    return found


def freeze(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    loss: Tensor = (model(X_ND + number) - 0.5).square().mean()
    return loss


def test_the_gradient_is_multiplied_by_the_inverse_of_the_gram_matrix() -> None:
    first_RD = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]], dtype=torch.float64)  # its Gram matrix: 1 and 4
    found = project(torch.tensor([[4.0, 8.0], [2.0, -4.0]], dtype=torch.float64), first_RD, 2.0)
    expected = torch.tensor([[1.0, 0.5], [0.5, -0.25]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=2e-8, atol=0.0)  # but for the ridge


def test_a_step_of_descent_moves_the_weight_along_its_projected_gradient() -> None:
    """dW = -eta G A^T (A A^T)^-1 A, to 1e-12: with a large eps AdamW is plain descent."""
    model, eta, eps = freeze(adapted()), 0.1, 1e14
    layer: Any = model.get_submodule("base_model.model.0")
    with torch.no_grad():
        layer.lora_A.default.weight.mul_(1e3)  # beside which the ridge is nothing
    optimizer = LoRAFA(model, lr=eta * eps, betas=(0.0, 0.9), eps=eps, weight_decay=0.0)
    whole: Any = copy.deepcopy(model.get_submodule("base_model.model.0.base_layer"))
    grad_NO = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole.weight.requires_grad_()
    (whole(X_ND) * grad_NO).sum().backward()
    (layer(X_ND) * grad_NO).sum().backward()
    before = layer.get_delta_weight("default")
    optimizer.step()
    first_RD = layer.lora_A.default.weight
    projector_DD = first_RD.t() @ torch.linalg.inv(first_RD @ first_RD.t()) @ first_RD
    moved = layer.get_delta_weight("default") - before
    torch.testing.assert_close(moved, -eta * whole.weight.grad @ projector_DD, rtol=0.0, atol=1e-12)


def test_it_is_adamw_on_projected_gradients_and_on_plain_ones_elsewhere() -> None:
    ours, theirs = (freeze(adapted(bias="all")) for _ in range(2))
    optimizer = LoRAFA(ours, lr=0.01)
    reference = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=0.01)
    for number in range(4):
        loss_of(ours, number).backward()
        loss_of(theirs, number).backward()
        for layer in ("0", "2"):
            adapter: Any = theirs.get_submodule(f"base_model.model.{layer}")
            second, first_RD = adapter.lora_B.default.weight, adapter.lora_A.default.weight
            gram = first_RD @ first_RD.t() + 1e-8 * torch.eye(2, dtype=torch.float64)
            second.grad = second.grad @ torch.linalg.inv(gram) / 3.0**2
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    moved = 0
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12, msg=name)
        moved += mine.requires_grad
    assert moved == 4  # two second factors and two biases


def test_an_eager_update_a_copy_and_a_resumed_one_give_the_same_weights() -> None:
    def train(model: nn.Module, optimizer: LoRAFA, numbers: range, update: Any = "deferred") -> dict[str, Tensor]:
        with sbp.attach(model, {"name": "frozen", "freeze": FIRST}, optimizer=optimizer, update=update) as engine:
            for number in numbers:
                engine.backward(loss_of(model, number))
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return all(torch.equal(value, other[name]) for name, value in one.items())

    model, eager = adapted(), adapted()
    optimizer = LoRAFA(model)
    half = copy.deepcopy(train(model, optimizer, range(3)))
    copied, its = copy.deepcopy((model, optimizer))
    resumed = adapted()
    resumed.load_state_dict(half)
    again = LoRAFA(resumed)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = train(model, optimizer, range(3, 6))
    assert not same(half, expected)
    assert same(train(copied, its, range(3, 6)), expected)
    assert same(train(resumed, again, range(3, 6)), expected)
    assert same(train(eager, LoRAFA(eager), range(6), "eager"), expected)


def test_no_adapters_other_adapters_and_trained_first_factors_are_refused() -> None:
    section = TrainingSection(optim="lora-fa")
    with pytest.raises(UnsupportedError, match="lora-fa trains LoRA adapters, but the model has none"):
        build_optimizer(section, nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match=r"lora-fa does not support DoRA \(at 'base_model.model.0'\)"):
        build_optimizer(section, adapted(use_dora=True))
    embedded: Any = get_peft_model(nn.Sequential(nn.Embedding(5, 4)), LoraConfig(r=2, target_modules=["0"]))
    with pytest.raises(
        UnsupportedError, match=r"only adapters of linear layers, but 'base_model.model.0' is an adapter of another"
    ):
        build_optimizer(section, embedded)
    model = adapted()
    optimizer = build_optimizer(section, model)
    loss_of(model).backward()
    with pytest.raises(UnsupportedError, match=r"at least one is trained: freeze all parameters that match \*lora_A\*"):
        optimizer.step()


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            "policy: [{name: frozen, freeze: ['*lora_A*']}]",
            "lora-fa trains .* low-rank adapters: it needs model.lora",
        ),
        ("model: {name: austen-llama, lora: {r: 2}}", "lora-fa needs the initial first factor .* of each adapter"),
    ],
)
def test_a_recipe_without_adapters_or_with_trained_first_factors_is_refused(tmp_path, sections, text) -> None:
    file = tmp_path / "recipe.yaml"
    model = "" if "model" in sections else "model: {name: austen-llama}\n"
    file.write_text(
        f"version: 1\nname: refused\ndataset: {{name: austen}}\ntraining: {{optim: lora-fa}}\n{model}{sections}\n"
    )
    with pytest.raises(RecipeError, match=f"training.optim: {text}"):
        load_recipe(file)


def test_a_run_trains_the_second_factors_alone_and_keeps_moments_of_them_alone(tiny_recipe, prepared) -> None:
    recipe = tiny_recipe(
        model={"config": LLAMA, "lora": {"r": 2}},
        policy=[{"name": "frozen", "freeze": FIRST}],
        training={"optim": "lora-fa", "max_steps": 4},
        measure={"probe_every": 2},
    )
    run = prepared(recipe)
    assert work(run) == 0, (run.path / "worker.log").read_text()
    history = History.load(run.path)
    assert len(history.series("train/loss")) == 4
    kept = list(history.series("memory/optimizer_bytes").values())[-1]
    whole = history.facts["num_trainable_parameters"]
    assert 0 < kept < 2 * 4 * whole  # of the second factors alone
