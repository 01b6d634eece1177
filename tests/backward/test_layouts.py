"""Each layout that is built in says what its layer computes, and selection of tokens follows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sparsebp_cli.backward.decoder.decoder import bind_arguments
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.decoder.layout import BranchLayout, find_child, find_layouts
from sparsebp_cli.policy.token import TokenMode

from .token.case import assert_near, make_batch, step
from .token.definition import step_by_definition
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
    "falcon": {},
    "granitemoeshared": {"shared_intermediate_size": 16},
    "gpt_neo": {"window_size": 4, "attention_types": [[["global", "local"], 1]]},
}
ROUNDING = 5e-5  # of a difference between the stream before and after a layer, in float32
IDS = make_batch("scattered").inputs["input_ids"]


def _models() -> dict[str, PreTrainedModel]:
    """Return one tiny model for each layout, by the class of its layer."""
    found: dict[str, PreTrainedModel] = {}
    for _, model in every_model():
        found.setdefault(_layer(model), model)
    for family, options in _MADE.items():
        model = _make(family, options)
        found[_layer(model)] = model
    return found


def _layer(model: nn.Module) -> str:
    return next((type(layer).__name__ for layer in LayerNumbers(model).layers), "")


def _record(model: PreTrainedModel, layout: tuple[BranchLayout, ...]) -> list[dict[str, Tensor]]:
    """Return, for each layer, what goes in and out of it and of the modules that the layout names."""
    records: list[dict[str, Tensor]] = []
    adds: dict[str, Any] = {branch.core: branch.adds for branch in layout}
    handles = []
    for layer in LayerNumbers(model).layers:
        record: dict[str, Tensor] = {}
        records.append(record)
        named = {
            name for b in layout for name in (b.core, b.norm_before(layer), b.after) if name and find_child(layer, name)
        }
        for name, module in [("", layer), *((name, layer.get_submodule(name)) for name in named)]:

            def note(part: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name, into: Any = record) -> None:
                into[f"{name} in"] = args[0] if args else kwargs["hidden_states"]
                into[f"{name} out"] = (out[0] if isinstance(out, tuple) else out).clone()  # a layer may write to it
                if adds.get(name):
                    into[f"{name} out"] -= bind_arguments(part, args, kwargs)[adds[name]]

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


def _present(model: PreTrainedModel, layout: tuple[BranchLayout, ...]) -> tuple[BranchLayout, ...]:
    """Return the branches that the layers of a model have, each with the one norm that it reads."""
    layer = LayerNumbers(model).layers[0]
    found = [branch for branch in layout if find_child(layer, branch.core) is not None]
    return tuple(replace(branch, before=branch.norm_before(layer)) for branch in found)


def _check(model: PreTrainedModel, layout: tuple[BranchLayout, ...]) -> None:
    layout = _present(model, layout)
    if len(layout) > 1:  # else its MLP is no module
        _check_stream(model, layout)
    # 15 positions of 4 heads: a forward that mistakes the queries of one head for fewer positions is found out.
    cases: tuple[Any, ...] = (("left", 16), ("right", 15))
    for padding, length in cases:
        batch = make_batch("scattered", padding, length=length)
        for mode in ("exact", "detach"):
            ours = step(model, batch, mode)
            assert_near(ours, step_by_definition(model, batch, mode))
            assert_near(ours, step(model, batch, mode, execution="reference"))


def _make(family: str, options: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(_SIZES | options)))
    model.train()
    return model


# Layouts of a kind of their own; the others differ from these, or from those of other tests, in names alone.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "an MLP that is no module, heads of a fixed number": (
        "opt",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "experts": ("mixtral", {"num_local_experts": 4}),
    "experts that return their scores, sinks": ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}),
    "experts and an MLP beside them": ("granitemoeshared", {"shared_intermediate_size": 16, "num_local_experts": 4}),
    "an output that is written to, layers of tuples": ("falcon", {}),
    "two norms of one layer": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "one branch after the other": ("falcon", {"parallel_attn": False, "multi_query": False}),
    "a bias of keys in the mask": ("falcon", {"alibi": True, "parallel_attn": False, "multi_query": False}),
    "a bias of keys by example, modules that add to the stream": ("bloom", {}),
    "a cache of latents, rotations in one tensor": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "windows in a buffer, an attention in another module": (
        "gpt_neo",
        {"window_size": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "one bias of keys for all examples, a mask of what is left out": ("mpt", {}),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.filterwarnings("ignore")
def test_each_kind_of_layout_is_right_for_tokens(kind: str) -> None:
    model = _make(*_KINDS[kind])
    _check(model, find_layouts()[_layer(model)])


@pytest.mark.parametrize("mode", ["exact", "detach"])
@pytest.mark.filterwarnings("ignore")
def test_eager_attention_in_code_of_its_own_gives_what_sdpa_is_defined_to_give(mode: TokenMode) -> None:
    model, batch = _make("falcon", {}), make_batch("scattered", "left")
    expected = step_by_definition(model, batch, mode)
    model.set_attn_implementation("eager")
    assert_near(step(model, batch, mode), expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # what transformers says while it makes them
def test_every_built_in_layout_is_right_for_tokens() -> None:
    layouts, models, wrong = find_layouts(), _models(), {}
    assert set(layouts) <= set(models)
    assert len(layouts) >= 65
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
