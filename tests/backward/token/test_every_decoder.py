"""Every causal language model of the installed transformers that can be made tiny is right or refused, never wrong."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError
from tests import architectures

from .case import Marked, assert_near, make_batch, plain_step, step

MOST = 3_000_000  # parameters
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "d_ff", "dff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "vocab_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "sliding_window"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads", "eos_token_id"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "bos_token_id"), 1),
    "rotary_dim": 4,
    "attention_hidden_size": 32,
    "pad_token_id": 0,
}
RATES = ("attention_dropout", "attn_dropout", "dropout", "activation_dropout", "hidden_dropout", "layerdrop")
RATES += ("residual_dropout",)


def known_types(config: Any, kind: Any) -> list[str]:
    """Return the types of layers that a model's code knows, as its published configurations have them: the defaults of
    its class, made tiny, may have one alone.
    """
    modules = (sys.modules[config.__module__], sys.modules[kind.__module__])
    texts = {
        node.value
        for module in modules
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return sorted(texts & set(ALLOWED_ATTN_LAYER_TYPES), reverse=True)


def make(config: Any, kind: Any, sizes: dict[str, Any]) -> PreTrainedModel | None:
    """Return a model of these sizes; None where they do not make a tiny one."""
    try:
        made = config(**sizes)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in kind(made).parameters())
        if size > MOST:
            return None
        torch.manual_seed(0)
        model: PreTrainedModel = kind(made)
    except Exception:  # whatever a configuration thinks of sizes that were not made for it
        return None
    return model


def tiny(config: Any, kind: Any, change: Mapping[str, Any] | None = None) -> PreTrainedModel | None:
    """Return a tiny model without dropout, with some options changed; None where these sizes do not make one."""
    try:
        defaults = config()
        known = {name: value for name, value in TINY.items() if getattr(defaults, name, None) is not None}
        if "kv_lora_rank" in known:  # latent attention has keys and values of every head; deepseek_v2 names no experts
            known |= {"num_key_value_heads": known["num_attention_heads"], "num_experts_per_tok": 2}
        known |= change or {}
        made = config(**known)
        types = known_types(config, kind) if getattr(made, "layer_types", None) else []
        if not getattr(made, "use_sliding_window", True) or getattr(made, "sliding_window", None) is None:
            types = [each for each in types if each != "sliding_attention"]  # published without
        model = None
        if set(types) - set(made.layer_types if types else ()):
            model = make(config, kind, known | {"layer_types": types, "num_hidden_layers": len(types)})
        model = model or make(config, kind, known)
    except Exception:  # whatever a configuration thinks of having no arguments
        return None
    if model is None:
        return None
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def every_model(mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING, every: int = 1) -> Iterator[tuple[str, PreTrainedModel]]:
    for config, kinds in sorted(mapping.items(), key=lambda pair: str(pair[0].__name__))[::every]:
        for kind in kinds if isinstance(kinds, list | tuple) else (kinds,):
            model = tiny(config, kind)
            if model is not None:
                yield f"{config.__name__} {kind.__name__}", model


@pytest.mark.filterwarnings("ignore")  # what transformers says while it makes them
@pytest.mark.always("4")
@pytest.mark.parametrize("every", [4, 1])
def test_every_decoder_is_right_or_refused_by_name_before_anything_is_computed(
    every: int, request: pytest.FixtureRequest
) -> None:
    batch = make_batch("scattered", "right")
    found: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for name, model in every_model(every=every):
        try:
            with sbp.attach(model, [Marked()]):
                pass
        except UnsupportedError as error:
            found[type(model).__name__] = str(error)
            if "\n" in str(error) or not any(type(m).__name__ in str(error) for m in model.modules()):
                wrong[name] = str(error)
        else:
            found[type(model).__name__] = ""
            try:
                assert_near(step(model, batch, "exact"), plain_step(model, batch))
                assert_near(step(model, batch, "detach"), step(model, batch, "detach", execution="reference"))
            except Exception as error:  # all of them are told together
                wrong[name] = f"{type(error).__name__}: {error}"
        assert not any("forward" in vars(module) for module in model.modules()), name
    assert wrong == {}
    assert list(found.values()).count("") >= 30 // every  # tests/backward/test_layouts.py has all that are built in
    architectures.hold(request.config, "tokens", found, is_whole=every == 1)
