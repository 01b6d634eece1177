"""Quantised linears under adapters get the gradients of the model with weights that the libraries restore."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.backward import ModuleTrace, count_flops, saved_bytes
from sparsebp_cli.backward.linear.quantized import count_parameters
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.recipe.schema import ModelSection, QuantizationSection
from sparsebp_cli.worker.quantization import load_options, settle
from tests.worker.conftest import LLAMA

# Of peft 0.21, about transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.randint(3, 60, (4, 20), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 12:], MASK[3, 7:] = 0, 0
LABELS = IDS.masked_fill(MASK == 0, -100)
DOUBLE = "nf4, double"  # the scales are quantised, too: of files that were quantised so
KINDS = ("nf4", DOUBLE, "fp4", "int8")
# A policy, its options, and the options of the backward.
POLICIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nothing left out": ("topk", {"keep": 1.0, "along": "rows"}, {}),
    "rows": ("topk", {"keep": 0.5, "along": "rows"}, {}),
    "columns": ("topk", {"keep": 0.25, "along": "columns"}, {}),
    "elements": ("topk", {"keep": 0.02}, {}),
    "by the norms of weights": ("crs", {"keep": 0.5, "products": "dgrad"}, {}),
    "vcas": ("vcas", {}, {}),
    "lossless": ("lossless", {}, {}),
    "tokens": ("tokens", {"score": "loss", "keep": 0.5}, {}),
    "examples": ("uniform", {"keep": 0.5}, {}),
    "frozen": ("frozen", {"freeze": ["*layers.0.*"]}, {}),
    "dropbp": ("dropbp", {"keep": 0.5}, {}),
    "saved inputs": ("gact", {"bits": 8}, {}),
    "nodes": ("max-child", {}, {"sites": "nodes"}),
    "segments": ("topk", {"keep": 0.5, "along": "rows"}, {"segments": 2}),
    "reference": ("topk", {"keep": 0.5, "along": "rows"}, {"execution": "reference"}),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig

    place = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    options = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"attention_bias": True}
    config = AutoConfig.for_model("llama", **options, vocab_size=64, pad_token_id=0, use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    model.save_pretrained(place)
    return place


def load(folder: Path, kind: str, dtype: str = "float32") -> Any:
    quantization = QuantizationSection(type=kind.partition(",")[0])
    made = load_options(ModelSection(name=str(folder), dtype=dtype, lora={}, quantization=quantization), {})
    if kind == DOUBLE:
        made["quantization_config"].bnb_4bit_use_double_quant = True
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **made)
    settle(model)
    return model


def adapt(model: Any) -> Any:
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    return adapted.train()


def restored(model: Any) -> Any:
    """Return a copy of a quantised model with ordinary linears, whose weights the libraries restore."""
    plain = copy.deepcopy(model)
    if plain.config.quantization_config.quant_method == "bitsandbytes":
        return plain.dequantize()
    for module in plain.modules():
        if (
            isinstance(module, nn.Linear)
            and hasattr(module.weight, "dequantize")
            and type(module.weight) is not nn.Parameter
        ):
            module.weight = nn.Parameter(module.weight.dequantize())
    return plain


def gradients(model: Any, policy: str | None) -> dict[str, Tensor]:
    """Return the gradients of the adapters and of the embedding, by a policy; None: by autograd alone."""
    model.zero_grad()
    model.get_input_embeddings().weight.requires_grad_()
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
    if policy is None:
        model(**batch).loss.backward()
    else:
        name, options, choices = POLICIES[policy]
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
        choices = choices | {"optimizer": optimizer, "num_steps": 10}
        with sbp.attach(model, sbp.make_policy(name, **options), **choices) as engine:
            engine.backward(model(**batch).loss)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradients_are_those_of_the_restored_model(kind: str, policy: str, folder: Path) -> None:
    base = load(folder, kind)
    plain, model = adapt(restored(base)), adapt(base)
    expected, found = gradients(plain, policy), gradients(model, policy)
    assert found.keys() == expected.keys()
    assert any(value.any() for value in expected.values())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_selection_the_gradients_are_the_librarys_own(kind: str, dtype: str, folder: Path) -> None:
    model = adapt(load(folder, kind, dtype))
    expected, found = gradients(model, None), gradients(model, "nothing left out")
    exact = (
        {"rtol": 0.0, "atol": 0.0} if kind != "int8" else {"rtol": 0.02, "atol": 1e-3} if dtype == "bfloat16" else {}
    )
    torch.testing.assert_close(found, expected, **exact)


def measure(model: Any, policy: str | None) -> tuple[dict[str, int], dict[str, int], dict[str, int], float]:
    """Return FLOPs of forward and backward, and bytes saved, by module, and the FLOPs that the policy claims."""
    batch = {"input_ids": IDS, "labels": IDS}
    name, options, _ = POLICIES[policy or "nothing left out"]
    with sbp.attach(model, sbp.make_policy(name, **options)) as engine:
        with ModuleTrace(model) as trace, count_flops(trace) as flops:
            if policy is None:
                with engine.disabled(), saved_bytes(model.parameters(), trace) as saved:
                    loss = model(**batch).loss
                with engine.disabled():
                    loss.backward()
            else:
                with saved_bytes(model.parameters(), trace) as saved:
                    loss = model(**batch).loss
                engine.backward(loss)
        claimed = engine.report().claimed_flops if policy is not None else 0.0
    kept = {name: count for name, count in saved.by_module.items() if count}
    return dict(flops.forward), {n: c for n, c in flops.backward.items() if c}, kept, claimed


@pytest.mark.parametrize("policy", [None, "rows", "columns"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_work_and_memory_are_those_of_the_restored_model(kind: str, policy: str | None, folder: Path) -> None:
    base = load(folder, kind)
    plain, model = adapt(restored(base)), adapt(base)
    assert count_parameters(model) == sum(parameter.numel() for parameter in plain.parameters())
    expected, found = measure(plain, policy), measure(model, policy)
    assert found == expected
    assert found[0]["base_model.model.model.layers.0.mlp.down_proj.base_layer"] == 2 * IDS.numel() * 64 * 32


def test_a_forward_in_eval_mode_leaves_the_weights_as_training_needs_them(folder: Path) -> None:
    model = adapt(load(folder, "nf4"))
    before = gradients(model, "rows")
    with torch.no_grad():
        model.eval()(input_ids=IDS)
    after = gradients(model.train(), "rows")
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)


def test_what_needs_trained_or_whole_weights_is_refused_by_name(folder: Path) -> None:
    model = adapt(load(folder, "nf4"))
    for policy, choices, says in (
        (
            sbp.make_policy("subnet", keep=0.1, of="frozen"),
            {},
            r"Subnet with quantised linear layers \(at '.*q_proj.base_layer'\)",
        ),
    ):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
        with pytest.raises(UnsupportedError, match=says):
            sbp.attach(model, policy, optimizer=optimizer, **choices)


@pytest.mark.compiles
def test_compiling_a_quantised_model_is_refused_by_name(folder: Path) -> None:
    model = adapt(load(folder, "nf4"))
    with pytest.raises(UnsupportedError, match=r"quantised linear layers .* is not supported with torch\.compile"):
        sbp.attach(torch.compile(model), sbp.make_policy("topk", keep=0.5, along="rows"))
