"""The gradient of a weight is that of plain autograd with the restored input, and the rest of the backward is dense."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import ModuleTrace, saved_bytes
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Saved, Site, Step, choice
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from sparsebp_shelf.policies.saved_codes import SavedCodes
from sparsebp_shelf.saver import (
    InputSaver,
    SavedDirection,
    SavedProjection,
    SavedRows,
    SavedSketch,
)
from tests.promise import Nothing
from tests.saver import saving_by_hand

from .conftest import tiny_model, tokens

FORMS: tuple[type[Saved], ...] = (
    SavedRows,
    SavedSketch,
    SavedProjection,
    SavedDirection,
    SavedCodes,
)


class Save(Nothing, InputSaver):
    """Saves each input in one form, at random."""

    kind: str = "SavedRows"

    @property
    def form(self) -> type[Saved] | None:
        return next((form for form in FORMS if form.__name__ == self.kind), None)

    @property
    def budget(self) -> float:
        return 1.0 if self.form in (None, SavedCodes) else 0.25

    def save(self, x_ND: Tensor, site: Site, step: Step) -> Saved | None:
        generator = step.generator(site, x_ND.device)

        def draw(number: int) -> Tensor:
            return torch.randperm(number, generator=generator)[: choice.count_kept(0.25, number)].clone()

        num_rows, num_features = x_ND.shape
        saved: Saved | None = None
        match self.kind:
            case "SavedRows":
                index_K = draw(num_rows)
                index_K[-1] = index_K[0]  # a row that is drawn twice counts twice
                saved = SavedRows.of(x_ND, index_K, torch.rand(len(index_K), generator=generator))
            case "SavedSketch":
                saved = SavedSketch.of(x_ND, choice.count_kept(0.25, num_rows), generator, "rademacher")
            case "SavedProjection":
                saved = SavedProjection.of(x_ND, choice.count_kept(0.25, num_features), generator)
            case "SavedDirection":
                saved = SavedDirection.of(x_ND, SavedDirection.mean_direction(x_ND, 4))
            case "SavedCodes":
                saved = SavedCodes.of(x_ND, 4, 16, generator)
        return saved

    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        return 0


def attach(model: nn.Module, policy: InputSaver, **options: Any) -> Any:
    return sbp.attach(model, policy, **{"seed": 1} | options)


def forward(model: Any, number: int = 0) -> Tensor:
    ids = tokens(number)
    torch.manual_seed(5)  # of dropout
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run(model: nn.Module, policy: InputSaver, **options: Any) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    with attach(model, policy, **options) as engine:
        engine.backward(forward(model))
    return gradients(model)


def by_hand(model: nn.Module, policy: InputSaver) -> tuple[dict[str, Tensor], list[str]]:
    model = copy.deepcopy(model)
    with saving_by_hand(model, policy, Step(0, seed=1)) as asked:
        forward(model).backward()
    return gradients(model), asked


def is_weight_of_linear(name: str) -> bool:
    return name.endswith(".weight") and not any(part in name for part in ("norm", "embed", "ln_", "wte", "wpe"))


@pytest.mark.parametrize("execution", ["fast", "reference"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", [form.__name__ for form in FORMS])
def test_weights_have_the_gradient_of_the_restored_input_and_all_else_the_dense_one(kind, family, execution) -> None:
    model, policy = tiny_model(family).double(), Save(kind=kind)
    ours, (expected, _) = run(model, policy, execution=execution), by_hand(model, policy)
    forward(model).backward()
    dense = gradients(model)
    assert ours.keys() == expected.keys() == dense.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-13, msg=name)
        is_tied = family == "gpt2" and "wte" in name
        assert torch.equal(gradient, dense[name]) != (is_weight_of_linear(name) or is_tied), name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_saver_that_keeps_inputs_is_dense_to_the_last_bit(family) -> None:
    model = tiny_model(family)
    ours = run(model, Save(kind=""))
    forward(model).backward()
    assert all(torch.equal(ours[name], gradient) for name, gradient in gradients(model).items())


def test_linears_that_read_one_tensor_are_asked_once_and_store_once() -> None:
    asked: list[str] = []

    class Noting(Save):
        def save(self, x_ND: Tensor, site: Site, step: Step) -> Saved | None:
            asked.append(site.name)
            return super().save(x_ND, site, step)

    model = tiny_model("llama")
    engine = attach(model, Noting())
    with ModuleTrace(model) as trace, saved_bytes(model.parameters(), trace) as saved:
        loss = forward(model)
    each = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    assert asked == [*(f"model.layers.{layer}.{name}" for layer in range(2) for name in each), "lm_head"]
    num_kept, by_module = 8, saved.by_module  # rows of 32
    for name in asked:
        width = model.get_submodule(name).weight.shape[1]
        assert by_module[name] == num_kept * (width * 4 + 8), name
    assert not any(by_module[f"model.layers.0.{name}"] for name in ("self_attn.k_proj", "mlp.up_proj"))
    engine.backward(loss)
    share = sum(by_module[name] for name in asked) / sum(
        32 * 4 * model.get_submodule(name).weight.shape[1] for name in asked
    )
    assert f"the policy keeps {share:.1%} of the bytes of inputs" in engine.report().notes[-1]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["SavedRows", "SavedCodes"])
def test_a_layer_that_is_computed_again_is_decided_about_as_in_its_first_forward(kind, use_reentrant) -> None:
    model = tiny_model("llama")
    plain = run(model, Save(kind=kind))
    checkpoint_activations(model, use_reentrant=use_reentrant)
    model.enable_input_require_grads()
    assert all(torch.equal(gradient, plain[name]) for name, gradient in run(model, Save(kind=kind)).items())


def test_a_layer_that_runs_twice_draws_twice_with_and_without_checkpointing() -> None:
    calls: list[Step] = []

    class Noting(Save):
        def save(self, x_ND: Tensor, site: Site, step: Step) -> Saved | None:
            calls.append(step)
            return super().save(x_ND, site, step)

    found = []
    for again in (False, True):
        torch.manual_seed(0)
        layer, x, calls[:] = nn.Linear(8, 8), torch.randn(16, 8, requires_grad=True), []
        with attach(layer, Noting()) as engine:
            y = x
            for _ in range(3):
                y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False) if again else layer(y)
            engine.backward(y.sum())
        found.append(layer.weight.grad)
        assert [step.call for step in calls] == [0, 1, 2] + [2, 1, 0] * again
    assert torch.equal(*found)


def test_an_input_that_stays_is_decided_about_anew_at_each_step() -> None:
    layer, x = nn.Linear(8, 4), torch.randn(32, 8)
    engine = attach(layer, Save())
    found = []
    for _ in range(2):
        engine.backward(layer(x).sum())
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
        layer.zero_grad()
    assert not torch.equal(*found)


def test_an_input_changed_in_place_is_decided_about_again() -> None:
    one, two = nn.Linear(8, 4), nn.Linear(8, 4)
    model, x = nn.ModuleList([one, two]), torch.ones(4, 8)
    engine = attach(model, Save(kind="SavedCodes"))
    first = one(x)
    x *= 2.0
    engine.backward((first + two(x)).sum())
    assert one.weight.grad is not None
    assert two.weight.grad is not None
    assert torch.equal(2.0 * one.weight.grad, two.weight.grad)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_with_adapters_frozen_weights_are_not_asked_and_adapters_are() -> None:
    torch.manual_seed(0)
    model: Any = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules="all-linear")).double()
    policy = Save(kind="SavedCodes")
    expected, asked = by_hand(model, policy)
    first = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "lm_head")
    assert asked
    assert all(any(part in name for part in first) for name in asked if "lora_A" in name)  # not of keys, values, up
    assert all("lora_" in name for name in asked)
    ours = run(model, policy)
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-13, msg=name)


def test_where_and_layers_name_the_linears_that_save_less() -> None:
    model = tiny_model("llama")
    forward(model).backward()
    dense = gradients(model)
    model.zero_grad()
    ours = run(model, Save(where=["*.mlp.*"], layers=[-1]))
    assert {name for name in ours if not torch.equal(ours[name], dense[name])} == {
        f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    }
    with pytest.raises(UsageError, match=r"where: '\*.mpl.\*' matches no site"):
        attach(model, Save(where=["*.mpl.*"]))
    with pytest.raises(UnsupportedError, match="layers: the model has no layer 2; allowed: -2 to 1"):
        attach(model, Save(layers=[2]))


def test_evaluation_and_a_disabled_engine_are_dense_and_a_plain_backward_is_refused() -> None:
    model = tiny_model("llama")
    engine = attach(model, Save())
    with engine.disabled():
        forward(model).backward()
    disabled = gradients(model)
    model.zero_grad()
    with pytest.raises(UsageError, match=r"call engine.backward\(loss\)"):
        forward(model).backward()
    engine.detach()
    model.zero_grad()
    forward(model).backward()
    assert all(torch.equal(disabled[name], gradient) for name, gradient in gradients(model).items())


def test_what_is_not_declared_is_refused_by_name() -> None:
    class Lies(Save):
        @property
        def form(self) -> type[Saved] | None:
            return SavedSketch

    layer = nn.Linear(8, 4)
    attach(layer, Lies())
    with pytest.raises(PolicyError, match=r"Lies\.save at '' must return SavedSketch or None, got SavedRows"):
        layer(torch.randn(32, 8))


def test_a_loss_without_the_model_is_refused() -> None:
    engine = attach(nn.Linear(8, 4), Save())
    with pytest.raises(UsageError, match="Save was not called"):
        engine.backward(torch.ones((), requires_grad=True) * 2)
