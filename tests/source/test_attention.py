"""Attentions that a machine may lack: refused by name, in one line, before anything is read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.errors import AbsentDataError, DataError, RecipeError, UnsupportedError
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.recipe.check import check_recipe
from sparsebp_cli.recipe.document import read_document
from sparsebp_cli.recipe.schema import ATTENTIONS
from sparsebp_cli.source import attention
from sparsebp_cli.source.attention import refuse_device, refuse_missing_package

HUB = "kernels-community/flash-attn"


def _recipe(model: str = "", training: str = "") -> Recipe:
    text = f"version: 1\nname: a\nmodel: {{name: m{model}}}\ndataset: {{name: d}}\ntraining: {{{training}}}\n"
    tree = read_document(text, "a.yaml")
    assert tree is not None
    return check_recipe(tree).recipe


@pytest.mark.parametrize("name", [*ATTENTIONS, HUB, f"{HUB}@v1:attend"])
def test_every_attention_that_is_listed_is_a_value_of_a_recipe(name: str) -> None:
    assert _recipe(f", attention: '{name}', dtype: bfloat16").model.attention == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [("flash_attn_2", "did you mean flash_attention_2?"), ("sdpaa", "did you mean sdpa?"), ("x/y", "")],
)
def test_an_unknown_attention_is_refused_with_those_that_are_known(name: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=r"model\.attention: got .* allowed: sdpa, eager, ") as caught:
        _recipe(f", attention: {name}")
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flash_attention_needs_sixteen_bits() -> None:
    with pytest.raises(RecipeError, match="flash_attention_2 computes in 16 bits"):
        _recipe(", attention: flash_attention_2")
    assert _recipe(", attention: flash_attention_2", "mixed_precision: bf16").training.mixed_precision == "bf16"


def test_a_missing_package_is_named_and_one_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda _: None)
    for name, package in (("flash_attention_2", "flash-attn"), (HUB, "kernels")):
        with pytest.raises(AbsentDataError, match=f"needs the package {package}, which is not installed here"):
            refuse_missing_package(name)
    refuse_missing_package("flex_attention")
    monkeypatch.setattr(attention, "find_spec", lambda _: SimpleNamespace())
    refuse_missing_package("flash_attention_2")


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", HUB])
def test_what_runs_on_cuda_alone_is_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(DataError, match=f"model.attention: {name} needs a CUDA device"):
        refuse_device(name, "cpu")
    refuse_device(name, "cuda")
    refuse_device("sdpa", "cpu")


def test_pytorch_has_no_backward_of_flex_attention_for_cpus() -> None:
    """The reason that is given; where it no longer holds, the refusal must go."""
    from torch.nn.attention.flex_attention import flex_attention

    query = torch.randn(1, 1, 16, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward"):
        flex_attention(query, query, query)


@pytest.mark.parametrize("policy", ["lossless", {"name": "tokens", "score": "random", "keep": 0.5}])
def test_policies_that_call_attention_for_some_rows_refuse_others_by_name(policy: object) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    model.config._attn_implementation = "flex_attention"  # as the model of a GPU has it
    with pytest.raises(UnsupportedError, match=r"attention .*sdpa.*, got 'flex_attention'"):
        sbp.attach(model, policy)  # type: ignore[arg-type]


def test_float16_is_refused_with_the_reason() -> None:
    with pytest.raises(RecipeError, match="recipes have no loss scaler, which float16 needs"):
        _recipe(training="mixed_precision: fp16")
