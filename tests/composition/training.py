"""One way of training a tiny llama, from the table: its gradients, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import sparsebp_cli as sbp
from sparsebp_cli.backward import Engine
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

from .matrix import Entry

VOCABULARY = 32
RESTORED = "QLoRA, restored"  # the reference of QLoRA
Gradients = list[dict[str, Tensor | None]]


def build(composition: str) -> nn.Module:
    """Return the model, the same for every call; in double precision, so that no choice hangs on rounding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=composition == "tied weights",
        pad_token_id=0,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    if composition.startswith("QLoRA"):
        quantize(model, restored=composition == RESTORED)
    if composition in ("LoRA", "QLoRA", RESTORED):
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    if composition.endswith("checkpointing"):
        checkpoint_activations(model, use_reentrant=composition.startswith("reentrant"))
        model.enable_input_require_grads()
    if composition not in ("autocast", "QLoRA", RESTORED):  # which leave double precision alone, or know none
        model.to(torch.float64)
    return model.train()


def quantize(model: Any, *, restored: bool) -> None:
    """Replace the linears of a model but its head by bitsandbytes' in 4 bits, or their weights by those that these
    multiply with."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            packed = Linear4bit(module.in_features, module.out_features, bias=False, compute_dtype=torch.float32)
            weight = Params4bit(module.weight.data.clone(), quant_type="nf4", module=packed)
            packed.weight = weight.to("cpu")  # which quantises
            if restored:
                module.weight.data = dequantize_4bit(packed.weight.data, packed.weight.quant_state)
                module.weight.is_restored = True
            else:
                model.set_submodule(name, packed)


def compile_parts(model: Any, *, fullgraph: bool = False) -> None:
    """Compile attention and MLP of the last layer, with all of autograd's part but without a compiler of C++."""
    layer = model.model.layers[-1]
    layer.self_attn.compile(backend="aot_eager", fullgraph=fullgraph)
    layer.mlp.compile(backend="aot_eager", fullgraph=fullgraph)


def attach(model: nn.Module, entry: Entry | None, site: str, optimizer: Any, **options: Any) -> Engine:
    """Return the engine; entry: None for dense."""
    policies = [] if entry is None else [sbp.make_policy(entry.policy, **entry.options_at(site))]
    policies = options.pop("instead", policies)
    return sbp.attach(model, policies, sites=site, optimizer=optimizer, seed=3, **options)


def batch(number: int, rank: int = 0) -> Tensor:
    """Return tokens, others for every number and rank."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(1, VOCABULARY, (2, 6), generator=generator)


def train(
    composition: str, entry: Entry | None, site: str, *, compiled: str = "never", plain: bool = False, **options: Any
) -> Gradients:
    """Train for two steps and return the gradients of each.

    Args:
        composition: One of :data:`COMPOSITIONS`.
        entry: Policy with its options; None: dense.
        site: One of :data:`SITES`.
        compiled: ``before`` attaching, ``after`` it, or ``never``.
        plain: Whether PyTorch's own backward runs, without an engine.
        **options: Options of ``attach``; ``instead``: policies instead of the entry's.
    """
    model = build(composition)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    if compiled == "before":
        compile_parts(model, fullgraph=site == "linears")
    engine = None if plain else attach(model, entry, site, optimizer, **options)
    if compiled == "after":
        compile_parts(model, fullgraph=site == "linears")
    gradients: Gradients = []
    torch.manual_seed(4)  # of dropout
    for number in range(1 if composition == "autocast" else 2):  # whose rounding would move the second
        for _ in _micro_batches(model, engine, composition, number):
            pass
        if composition == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        if composition == "resume" and number == 0 and engine is not None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "engine": engine.state_dict()}
            engine.detach()
            model = build(composition)
            model.load_state_dict(state["model"])
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            optimizer.load_state_dict(state["optimizer"])
            engine = attach(model, entry, site, optimizer, **options)
            engine.load_state_dict(state["engine"])
    if engine:
        engine.detach()
    return gradients


def _micro_batches(model: nn.Module, engine: Engine | None, composition: str, number: int) -> Iterator[None]:
    count = 2 if composition == "accumulation" else 1
    for micro_batch in range(count):
        ids = batch(2 * number + micro_batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=composition == "autocast"):
            loss = model(input_ids=ids, labels=ids).loss / count
        loss.backward() if engine is None else engine.backward(loss)
        yield


def largest_difference(ours: Gradients, theirs: Gradients) -> float:
    """Return the largest difference of a parameter's gradient, by its largest entry; infinite where one is missing."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        size = max(float(grad.abs().max()) for grad in other.values() if grad is not None)
        assert size > 0.0
        for name, expected in other.items():
            grad = mine[name]
            if grad is None or expected is None:
                worst = worst if grad is expected else float("inf")
                continue
            scale = expected.abs().max().clamp(min=1e-3 * size)  # what is zero but for rounding
            worst = max(worst, float((grad - expected).abs().max() / scale))
    return worst
