"""A policy that keeps everything is PyTorch's own backward, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import sparsebp_cli as sbp
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

from .conftest import FAMILIES, tiny_model, tokens

pytestmark = pytest.mark.promise("R18")

KEEP_ALL = [
    ("dense", {}),
    ("topk", {"keep": 1.0, "along": "rows"}),
    ("random", {"keep": 1.0, "along": "columns", "weighted": True}),
]


def _train(
    model: nn.Module,
    policy: tuple[str, dict[str, Any]] | None,
    *,
    num_steps: int = 12,
    autocast: bool = False,
) -> tuple[list[Tensor], list[float]]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    engine = policy and sbp.attach(model, [sbp.make_policy(policy[0], **policy[1])], optimizer=optimizer)
    torch.manual_seed(7)  # of dropout
    losses = []
    for step in range(num_steps):
        for micro_batch in range(2):
            ids = tokens(2 * step + micro_batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss / 2
            engine.backward(loss) if engine else loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if engine:
        report = engine.report()
        assert report.kept_share == 1.0
        assert report.num_backwards == 2 * num_steps
        # The first layer's frozen linears have no gradient to compute.
        assert all(".0." in name and name.endswith("base_layer") for name in report.never_called)
        engine.detach()
    return [p.detach().clone() for p in model.parameters()], losses


def _assert_same(make: Callable[[], nn.Module], policy: tuple[str, dict[str, Any]], **options: Any) -> None:
    plain, plain_losses = _train(make(), None, **options)
    ours, our_losses = _train(make(), policy, **options)
    assert our_losses == plain_losses
    assert len(set(plain_losses)) > 1
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("policy", KEEP_ALL, ids=lambda policy: policy[0])
@pytest.mark.parametrize("family", FAMILIES)
def test_twelve_steps_with_accumulation_and_clipping_are_plain_pytorch(family: str, policy: Any) -> None:
    _assert_same(lambda: tiny_model(family), policy)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_autocast_bfloat16_is_plain_pytorch(family: str) -> None:
    _assert_same(lambda: tiny_model(family), KEEP_ALL[1], num_steps=3, autocast=True)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bfloat16_weights_are_plain_pytorch(family: str) -> None:
    _assert_same(lambda: tiny_model(family).to(torch.bfloat16), KEEP_ALL[1], num_steps=3)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_activation_checkpointing_is_plain_pytorch(family: str, use_reentrant: bool) -> None:
    def make() -> nn.Module:
        model = tiny_model(family)
        checkpoint_activations(model, use_reentrant=use_reentrant)
        model.enable_input_require_grads()
        return model

    _assert_same(make, KEEP_ALL[1], num_steps=3)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora_with_frozen_base_is_plain_pytorch(family: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = tiny_model(family)
        kinds = (nn.Linear, Conv1D)
        targets = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, kinds)}
        adapted = get_peft_model(
            model, LoraConfig(r=4, target_modules=sorted(targets - {"lm_head"}), fan_in_fan_out=family == "gpt2")
        )
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return adapted

    _assert_same(make, KEEP_ALL[1], num_steps=3)


def _layouts(width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "one row": randn(width),
        "rows": randn(7, width),
        "transposed": randn(width, 9).t(),
        "batch": randn(3, 5, width),
        "batch transposed": randn(5, 3, width).transpose(0, 1),
        "batch of transposed": randn(width, 15).t().unflatten(0, (3, 5)),
        "features transposed": randn(3, width, 5).transpose(1, 2),
        "part of features": randn(3, 5, 2 * width)[..., :width],
        "expanded": randn(1, 5, width).expand(3, 5, width),
        "two batch dimensions": randn(2, 3, 5, width),
        "two batch dimensions transposed": randn(2, 5, 3, width).transpose(1, 2),
        "no rows": randn(3, 0, width),
    }


def _output_gradient(kind: str, output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "expanded":
        return torch.ones((), dtype=output.dtype).expand(output.shape)
    shape = output.shape if kind == "contiguous" else output.shape[::-1]
    gradient = torch.randn(shape, generator=generator).to(output.dtype)
    return gradient if kind == "contiguous" else gradient.permute(*reversed(range(gradient.dim())))


def _gradients(module: nn.Module, x: Tensor, run: Callable[[Tensor, Tensor], None], kind: str) -> list[Tensor | None]:
    module.zero_grad()
    output = module(x)
    run(output, _output_gradient(kind, output))
    return [output.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("layout", _layouts(4))
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "expanded"])
def test_every_input_layout_is_plain_pytorch(layout: str, kind: str) -> None:
    """Widths that hit different BLAS kernels, with and without bias, each subset of frozen tensors."""
    for width, dtype, bias in itertools.product((5, 64), (torch.float32, torch.float64, torch.bfloat16), (True, False)):
        x = _layouts(width)[layout].to(dtype)
        module = nn.Linear(width, 48, bias=bias, dtype=dtype)
        for x_grad, weight_grad in ((True, True), (True, False), (False, True)):
            module.weight.requires_grad_(weight_grad)
            inputs = [x.detach().requires_grad_(x_grad) for _ in range(2)]
            plain = _gradients(module, inputs[0], lambda output, grad: output.backward(grad), kind)
            with sbp.attach(module, [sbp.make_policy("dense")]) as engine:
                ours = _gradients(module, inputs[1], lambda o, g: engine.backward(o, lambda o: o.backward(g)), kind)
            for a, b in zip(plain, ours, strict=True):
                assert (a is None) == (b is None)
                assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "expanded"])
@pytest.mark.parametrize(
    "layout", ["rows", "transposed", "batch", "batch of transposed", "part of features", "two batch dimensions"]
)
def test_conv1d_is_plain_pytorch(layout: str, kind: str) -> None:
    module, x = Conv1D(24, 16), _layouts(16)[layout]
    inputs = [x.detach().requires_grad_() for _ in range(2)]
    plain = _gradients(module, inputs[0], lambda output, grad: output.backward(grad), kind)
    with sbp.attach(module, [sbp.make_policy("dense")]) as engine:
        ours = _gradients(module, inputs[1], lambda o, g: engine.backward(o, lambda o: o.backward(g)), kind)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_output_can_be_changed_in_place_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        output = model(x)
        output += 1.0
        return output.square().mean()

    loss().backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    with sbp.attach(model, []) as engine:
        engine.backward(loss())
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


def test_nothing_is_recorded_without_gradients() -> None:
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    with sbp.attach(model, []):
        with torch.no_grad():
            assert model(x).grad_fn is None
        with torch.inference_mode():
            assert model(x).is_inference()
        assert type(model(x).grad_fn).__name__ == "SelectedLinearBackward"
        model.requires_grad_(False)
        assert model(x).grad_fn is None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_second_derivative_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(2, 4)
    with sbp.attach(model, []) as engine:
        engine.backward(model(x).sum(), lambda loss: loss.backward(create_graph=True))
        with pytest.raises(RuntimeError, match="once_differentiable"):
            model[0].weight.grad.sum().backward()
        model.zero_grad(set_to_none=True)  # the graph holds on to the gradients, and they to the graph
