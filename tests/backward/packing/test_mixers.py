"""Packed rows of models whose layers mix neighbouring positions: short convolutions, linear attention, state spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import sparsebp_cli as sbp
from sparsebp_cli.backward.kind.packing.mixing import Span, plan_mixing
from sparsebp_cli.errors import UnsupportedError

from .case import ALL, IGNORED, SOME, error, errors, gradients, make_batch

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning")
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def make_lfm2(**options: Any) -> nn.Module:
    types = ["conv", "full_attention", "conv", "full_attention"]
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, **HEADS, layer_types=types, block_auto_adjust_ff_dim=False, **options))


def make_qwen() -> nn.Module:
    types = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    linear = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = {
        "shared_expert_intermediate_size": 16,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **HEADS, **linear, **experts, **sizes, layer_types=types))


def make_falcon() -> nn.Module:
    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
    return FalconH1ForCausalLM(FalconH1Config(**SIZES, **HEADS, **sizes))


def make_kimi() -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    linear = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 8, "linear_num_heads": 4}
    latent = dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
    return KimiLinearForCausalLM(KimiLinearConfig(**SIZES, **heads, **linear, **latent, **experts, q_lora_rank=None))


FAMILIES = {"lfm2": make_lfm2, "qwen3_next": make_qwen, "falcon_h1": make_falcon, "kimi_linear": make_kimi}


# Gated delta rules round to float32 in places: plain steps are this far from those in float64.
ROUNDED = {"qwen3_next": 3e-5, "kimi_linear": 3e-5}


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[family]().train()
    with torch.no_grad():  # the initial weights are so small that states hardly matter
        for name, parameter in model.named_parameters():
            if "conv" in name or "proj" in name:
                parameter.mul_(3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_the_plain_one_in_every_arrangement(family: str) -> None:
    wrong = errors(make(family), ALL if family == "lfm2" else SOME)
    assert {name: value for name, value in wrong.items() if value > ROUNDED.get(family, 0.0)} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_get_the_layout_again(family: str) -> None:
    model = make(family)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    wrong = errors(model, SOME[:6])
    assert {name: value for name, value in wrong.items() if value > ROUNDED.get(family, 0.0)} == {}


def test_states_matter_in_these_cases() -> None:
    """Without the state of the prefix the gradient would differ: the tests above can fail."""
    model, batch = make("lfm2"), make_batch("none", "completion", "groups")
    _, plain = gradients(model, None, batch)
    alone = {name: value[:, 20:] for name, value in batch.items()}  # the same rows without the shared prefix
    assert error(plain, gradients(model, None, alone)[1]) > 0.01


def test_a_shared_prefix_is_computed_once() -> None:
    model, batch = make("lfm2"), make_batch("none", "completion", "groups")
    plain = count_products(model, None, batch)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        gradients(model, engine, batch)  # the first step tries what the last layer can leave out
        packed = count_products(model, engine, batch)
    assert packed < 0.65 * plain  # 164 of 264 positions have rows of their own, and the head has fewer


def count_products(model: nn.Module, engine: Any, batch: dict[str, Tensor]) -> int:
    """Return the FLOPs of matrix products in one step. PyTorch's counter overcounts convolutions by channel."""
    with FlopCounterMode(display=False) as counter:
        gradients(model, engine, batch)
    return sum(number for product, number in counter.get_flop_counts()["Global"].items() if "mm" in str(product))


def test_continuations_of_one_token_and_of_several_levels_are_exact() -> None:
    ids = torch.randint(3, 60, (5, 40), generator=torch.Generator().manual_seed(1))
    ids[1:, :20] = ids[0, :20]
    ids[2:, :37] = ids[1, :37]
    ids[3:, :38] = ids[2, :38]  # one token that two continuations share
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    for family in FAMILIES:
        model = make(family)
        loss, plain = gradients(model, None, batch)
        logits = model(input_ids=ids).logits.detach()
        with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
            packed_loss, packed = gradients(model, engine, batch)
            with torch.no_grad(), engine.scoring(ids):
                scored = model(input_ids=ids).logits
        assert error(plain, packed) < ROUNDED.get(family, 2e-6), family
        assert torch.allclose(loss, packed_loss)
        assert torch.allclose(scored[:, 1:-1], logits[:, 1:-1], atol=1e-4), family


def test_a_kernel_that_is_wider_than_a_shared_prefix_is_exact() -> None:
    torch.manual_seed(0)
    model = make_lfm2(conv_L_cache=24).train()
    ids = torch.randint(3, 60, (6, 40), generator=torch.Generator().manual_seed(1))
    ids[1:3, :16], ids[4:, :18] = ids[0, :16], ids[3, :18]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    _, plain = gradients(model, None, batch)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        assert error(plain, gradients(model, engine, batch)[1]) < 2e-6


def test_dropout_of_adapters_inside_such_a_layer_is_refused_at_once() -> None:
    model = get_peft_model(make("lfm2"), LoraConfig(r=2, lora_dropout=0.1, target_modules=["in_proj", "q_proj"]))
    with pytest.raises(UnsupportedError, match=r"dropout inside a layer that mixes .* lora_dropout"):
        sbp.attach(model, "lossless")
    plain = get_peft_model(make("lfm2"), LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"]))
    sbp.attach(plain, "lossless").detach()


def test_a_recurrence_without_an_initial_state_is_refused_at_once() -> None:
    model = JambaForCausalLM(JambaConfig(**SIZES, **HEADS, num_experts=1))
    with pytest.raises(UnsupportedError, match="interface, which JambaForCausalLM does not use"):
        sbp.attach(model, "lossless")


def test_each_batch_can_be_compared_with_the_plain_step() -> None:
    model = make("qwen3_next")
    with sbp.attach(model, sbp.make_policy("lossless", verify="always")) as engine:
        for which in SOME[:4]:
            gradients(model, engine, make_batch(*which))
        assert "compared with the ordinary one in 4 of these" in engine.notes["packing"]


def test_a_script_that_reads_logits_gets_the_plain_ones() -> None:
    model, batch = make("lfm2"), make_batch("right", "completion", "tree")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    plain = model(**inputs).logits
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")):
        packed = model(**inputs).logits
    real = batch["attention_mask"].bool()
    assert torch.allclose(packed[real], plain[real], atol=1e-5)


def test_several_texts_in_a_row_run_plainly_with_the_reason() -> None:
    model = make("lfm2")
    ids = torch.randint(3, 60, (1, 40))
    position = torch.arange(20).repeat(2)[None]
    batch = {"input_ids": ids, "position_ids": position, "labels": ids.clone(), "use_cache": False}
    loss, plain = gradients(model, None, batch)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        own_loss, own = gradients(model, engine, batch)
        assert "mix neighbouring positions" in engine.notes["packing"]
    assert error(plain, own) == 0.0
    assert torch.equal(loss, own_loss)


def test_a_masked_gap_in_a_text_runs_plainly_with_the_reason() -> None:
    model, batch = make("lfm2"), make_batch("right", "completion", "none")
    batch["attention_mask"][:, 5] = 0
    _, plain = gradients(model, None, batch)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        _, own = gradients(model, engine, batch)
        assert "mix neighbouring positions" in engine.notes["packing"]
    assert error(plain, own) == 0.0


def test_prefixes_over_an_update_are_shared_in_each_micro_batch_alone() -> None:
    model, batch = make("lfm2"), make_batch("right", "completion", "groups")
    halves = [{name: value[part] for name, value in batch.items()} for part in (slice(3), slice(3, 6))]
    plain = sum_gradients(model, None, halves)
    policy = sbp.make_policy("lossless", prefixes="update", verify="never")
    with sbp.attach(model, policy) as engine:
        engine.expect(halves)
        own = sum_gradients(model, engine, halves)
        assert "layers that mix neighbouring positions" in engine.notes["packing of updates"]
    assert error(plain, own) < 1e-6


def sum_gradients(model: nn.Module, engine: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    found = [gradients(model, engine, batch)[1] for batch in batches]
    return [sum(parts, torch.zeros(())) for parts in zip(*found, strict=True)]


def test_a_layer_that_drops_the_layout_is_an_error() -> None:
    model = make("lfm2")
    mixer = model.model.layers[0].conv  # type: ignore[union-attr]
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")):
        own = mixer.forward
        mixer.forward = lambda hidden_states, **_: own(hidden_states)
        with pytest.raises(UnsupportedError, match="gets only some positions"):
            model(**make_batch("right", "completion", "none"))
        mixer.forward = own


def test_runs_keep_the_exact_length_of_segments_that_others_continue() -> None:
    sizes, parents = (20, 17, 9, 8, 3, 20), (None, 0, 1, 1, 0, None)  # single rows: the test above
    starts = np.cumsum((0, *sizes))
    spans = [
        Span(np.arange(start, start + size), parent, attends=True)
        for start, size, parent in zip(starts[:-1], sizes, parents, strict=True)
    ]
    plan = plan_mixing(spans, torch.device("cpu"))
    seen = {}
    for number, run in enumerate(plan.runs):
        for index, row_L in enumerate(run.row_SL.tolist()):
            span = next(n for n, one in enumerate(spans) if one.row_L[0] == row_L[0])
            seen[span] = (number, index)
            if run.is_read:
                assert row_L == spans[span].row_L.tolist()
            parent = parents[span]
            assert run.before == () if parent is None else run.before[index] == seen[parent]
    assert sorted(seen) == list(range(6))
    flat = torch.cat([run.row_SL.flatten() for run in plan.runs])
    assert torch.equal(flat[plan.place_N], torch.arange(sum(sizes)))


def test_labels_of_first_tokens_beside_left_padding_are_exact() -> None:
    model, batch = make("lfm2"), make_batch("left", "dense", "none")
    assert (batch["labels"][:, 1:] != IGNORED).any()
    _, plain = gradients(model, None, batch)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        _, own = gradients(model, engine, batch)
    assert error(plain, own) < 1e-6


def test_a_mask_of_other_values_than_0_and_1_runs_plainly_with_the_reason() -> None:
    """These layers multiply their input by the mask, so a 2 in it is not a 1."""
    torch.manual_seed(0)
    model, batch = make_lfm2().train(), make_batch("right", "completion", "groups")
    odd = batch | {"attention_mask": 2 * batch["attention_mask"]}
    _, expected = gradients(model, None, odd)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        _, got = gradients(model, engine, odd)
        note = engine.notes["packing"]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert "multiplies by the attention mask, which has values other than 0 and 1" in note
