"""Each layout that is built in says what its layer computes, and selection at branches and of tokens follows it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import sparsebp_cli as sbp
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.decoder.layout import BranchLayout, find_layouts

from .branch_case import assert_fast_is_reference
from .token.case import assert_near, make_batch, plain_step, step
from .token.test_every_decoder import every_model

# Those whose configurations want sizes of their own.
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MADE: dict[str, dict[str, Any]] = {
    "nemotron": {"head_dim": 8},
    "ministral": {"head_dim": 8, "sliding_window": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "qwen2": {},
    "phi": {},
}
ROUNDING = 1e-5  # of a difference between the stream before and after a layer, in float32
IDS = make_batch("scattered").inputs["input_ids"]


def _models() -> dict[str, PreTrainedModel]:
    """Return one tiny model for each layout, by the class of its layer."""
    found: dict[str, PreTrainedModel] = {}
    for _, model in every_model():
        found.setdefault(_layer(model), model)
    for family, options in _MADE.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(_SIZES | options))).train()
        found.setdefault(_layer(model), model)
    return found


def _layer(model: nn.Module) -> str:
    return next((type(layer).__name__ for layer in LayerNumbers(model).layers), "")


def _record(model: PreTrainedModel, layout: tuple[BranchLayout, ...]) -> list[dict[str, Tensor]]:
    """Return, for each layer, what goes in and out of it and of the modules that the layout names."""
    records: list[dict[str, Tensor]] = []
    handles = []
    for layer in LayerNumbers(model).layers:
        record: dict[str, Tensor] = {}
        records.append(record)
        named = {name for branch in layout for name in (branch.core, branch.before, branch.after) if name}
        for name, module in [("", layer), *((name, getattr(layer, name)) for name in named)]:

            def note(_: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name, into: Any = record) -> None:
                into[f"{name} in"] = args[0] if args else kwargs["hidden_states"]
                into[f"{name} out"] = out[0] if isinstance(out, tuple) else out

            handles.append(module.register_forward_hook(note, with_kwargs=True))
    with torch.no_grad():
        model(input_ids=IDS)
    for handle in handles:
        handle.remove()
    return records


def _check_stream(model: PreTrainedModel, layout: tuple[BranchLayout, ...]) -> None:
    """A layer adds what its branches give, in one scale, and a core reads what the norm before it gives."""
    for record in _record(model, layout):
        added = record[" out"] - record[" in"]
        branches = sum((record[f"{branch.after or branch.core} out"] for branch in layout), torch.zeros(()))
        scale = (added * branches).sum() / branches.square().sum()
        assert float((added - scale * branches).norm() / added.norm()) < ROUNDING
        for branch in layout:
            before = record[f"{branch.before} out"] if branch.before else None
            if before is not None:
                assert torch.equal(before, record[f"{branch.core} in"])
            if branch.after:
                assert torch.equal(record[f"{branch.core} out"], record[f"{branch.after} in"])


def _check(model: PreTrainedModel, layout: tuple[BranchLayout, ...]) -> None:
    _check_stream(model, layout)
    for padding in ("left", "right"):
        batch = make_batch("scattered", padding)
        assert_near(step(model, batch, "exact"), plain_step(model, batch))
        for mode in ("detach", "stop"):
            assert_near(step(model, batch, mode), step(model, batch, mode, execution="reference"))
    for within in ("batch", "example"):
        policy = sbp.make_policy("topk", keep=0.3, along="rows", within=within)
        assert_fast_is_reference(lambda: copy.deepcopy(model), policy, tolerance=5e-6)


@pytest.mark.filterwarnings("ignore")  # what transformers says while it makes them
def test_every_built_in_layout_is_right_at_branches_and_for_tokens() -> None:
    layouts, models, wrong = find_layouts(), _models(), {}
    assert set(layouts) <= set(models)
    assert len(layouts) >= 35
    for name, layout in layouts.items():
        try:
            _check(models[name], layout)
        except Exception as error:  # all of them are told together
            wrong[name] = f"{type(error).__name__}: {error}"
    assert wrong == {}


@pytest.mark.parametrize(
    ("layer", "layout"),
    [
        ("Gemma2DecoderLayer", "LlamaDecoderLayer"),
        ("LlamaDecoderLayer", "CohereDecoderLayer"),
        ("Glm4DecoderLayer", "GlmDecoderLayer"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_layout_of_another_layer_is_found_out(layer: str, layout: str) -> None:
    model = next(model for _, model in every_model() if _layer(model) == layer)
    with pytest.raises(AssertionError):
        _check_stream(model, find_layouts()[layout])
