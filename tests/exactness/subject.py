"""The model of a case: architecture, adapter, precision and checkpointing."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.backward.isolation.enumeration import enlarge
from tests.backward.token.test_every_decoder import tiny
from tests.exactness.axis import CHANGED, Case

ROTARY = {"rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG = ROTARY | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 16.0, 32.0]}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "chunks": ("Llama4", {"attention_chunk_size": 6, "layer_types": None}),
    "windows": ("Mistral", {"sliding_window": 5}),
    "windows of gemma": ("Gemma3", {"sliding_window": 5}),
    "long rotary": ("Phi3", {"rope_parameters": LONG, "sliding_window": None}),
    "dynamic rotary": ("Llama", {"rope_parameters": ROTARY | {"rope_type": "dynamic", "factor": 2.0}}),
    "tied head": ("Llama", {"tie_word_embeddings": True}),
}


@lru_cache(maxsize=24)
def _architecture(name: str) -> Any:
    if name in CHANGED:
        family, change = CHANGES[name]
        kind = getattr(transformers, f"{family}ForCausalLM")
        text = getattr(transformers, f"{family}TextConfig", None)
        made = tiny(text or getattr(transformers, f"{family}Config"), kind, change)
    else:
        found = [
            (config, kind)
            for config, kinds in MODEL_FOR_CAUSAL_LM_MAPPING.items()
            for kind in (kinds if isinstance(kinds, list | tuple) else (kinds,))
            if kind.__name__ == name
        ]
        made = next((model for pair in found if (model := tiny(*pair)) is not None), None)
    if made is None:
        raise AssertionError(f"{name} is not made")
    enlarge(made)
    made.set_attn_implementation("sdpa")
    if hasattr(made, "set_default_language"):  # it has adapters of languages, and no batch says which
        made.set_default_language(made.config.languages[0])
    return made


def make_model(case: Case) -> Any:
    """Return a new model for a case, the same at each call."""
    model = deepcopy(_architecture(case["architecture"])).train()
    model = _adapt(model, case["adapter"])
    wrapper = case["wrapper"]
    if wrapper in ("checkpointing", "reentrant"):
        checkpoint_activations(model, use_reentrant=wrapper == "reentrant")
        if wrapper == "reentrant":
            model.enable_input_require_grads()
    dtypes = {"bfloat16": torch.bfloat16, "float64": torch.float64}
    return model.to(dtypes[wrapper]) if wrapper in dtypes else model


def _adapt(model: Any, name: str) -> Any:
    if name == "none":
        return model
    if name == "frozen":
        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        model.get_input_embeddings().requires_grad_(False)
        layers[0].requires_grad_(False)
        return model
    import peft

    if name == "nf4":
        model = _quantise(model)
    torch.manual_seed(1)
    if name == "prompt":
        return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).train()
    dropout = 0.3 if name == "lora with dropout" else 0.0
    options: dict[str, Any] = {"r": 4, "lora_dropout": dropout, "use_dora": name == "dora"}
    config = peft.LoraConfig(
        **options, target_modules="all-linear", init_lora_weights=name == "dora", task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(len(key)))
    return adapted.train()


def _quantise(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        return type(model).from_pretrained(folder, quantization_config=config, attn_implementation="sdpa").train()
