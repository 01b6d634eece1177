"""What a report says of the whole backward, of what it does not cover, and of what tokens and examples leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_cli.errors import UsageError
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

from .conftest import FAMILIES, tiny_model, tokens
from .families import tiny_decoder

_SMALL = FAMILIES["llama"] | {"num_hidden_layers": 1}
_EXPERTS = _SMALL | {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS | {"head_dim": 8},
    "olmoe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "gpt_oss": _EXPERTS | {"head_dim": 8, "layer_types": ["full_attention"]},
    "deepseek_v3": _EXPERTS
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
}
ROWS = sbp.make_policy("topk", keep=0.25)


def _model(family: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).train()


def _dense_and_policy(model: nn.Module, policy: Any, **options: Any) -> tuple[int, int, sbp.Report]:
    """Return backward FLOPs as counted, dense and with a policy, and the report of the latter."""
    ids, counts = tokens(0), []
    for policies in ([sbp.make_policy("dense")], [policy]):
        with sbp.attach(model, policies, **options) as engine:
            loss = model(input_ids=ids, labels=ids).loss
            with count_flops() as flops:
                engine.backward(loss)
            counts.append(flops.total)
            report = engine.report()
        model.zero_grad(set_to_none=True)
    return counts[0], counts[1], report


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_in_the_whole_backward_and_named_as_not_covered(family: str) -> None:
    dense, executed, report = _dense_and_policy(_model(family, **EXPERTS[family]), ROWS)
    assert report.whole is not None
    assert report.dense_flops / report.whole.sites_share == pytest.approx(dense)
    assert report.claimed_share == 0.25
    assert report.whole_share == pytest.approx(executed / dense)
    experts = [name for name in report.not_covered if name.endswith((".gate_up_proj", ".down_proj"))]
    assert len(experts) == 2
    assert ".experts.gate_up_proj (" in str(report)
    assert sum(share for _, share in report.whole.elsewhere) == pytest.approx(1.0 - report.whole.sites_share)


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gpt2", "eager"), ("gemma2", "eager")])
def test_the_whole_backward_is_what_is_counted(family: str, attention: str) -> None:
    dense, executed, report = _dense_and_policy(_model(family, **FAMILIES[family], attn_implementation=attention), ROWS)
    assert report.whole is not None
    assert report.dense_flops / report.whole.sites_share == pytest.approx(dense)
    assert report.whole_share == pytest.approx(executed / dense, abs=0.01)  # counts of rows are rounded


def test_an_excluded_head_is_in_the_whole_backward_and_not_in_not_covered() -> None:
    _, _, report = _dense_and_policy(_model("qwen2", **FAMILIES["qwen2"]), ROWS, exclude=["lm_head"])
    assert report.whole is not None
    assert report.not_covered == ()
    assert dict(report.whole.elsewhere).keys() == {"lm_head.weight", ""}
    assert "lm_head (" in str(report)


def test_falcons_linears_are_sites_and_dense_is_plain_pytorch() -> None:
    options = FAMILIES["llama"] | {"new_decoder_architecture": False, "bias": True}
    model, ids = _model("falcon", **options), tokens(0)
    model(input_ids=ids, labels=ids).loss.backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    with sbp.attach(model, [sbp.make_policy("dense")]) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
        assert engine.report().not_covered == ()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))
    model.zero_grad(set_to_none=True)
    dense, executed, report = _dense_and_policy(model, ROWS)
    assert report.whole_share == pytest.approx(executed / dense)


def test_the_projection_of_an_attention_module_is_named_where_it_is_dense() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with sbp.attach(layer, [ROWS]) as engine:
        engine.backward(layer(torch.randn(2, 4, 8, requires_grad=True)).square().sum())
        report = engine.report()
    assert report.never_called == ("self_attn.out_proj",)
    assert set(report.not_covered) == {"self_attn.in_proj_weight", "self_attn.out_proj.weight"}
    assert "never called     self_attn.out_proj" in str(report)


def test_what_hides_its_products_leaves_the_whole_unknown_by_name() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    model.enable_input_require_grads()
    checkpoint_activations(model, use_reentrant=True)
    with sbp.attach(model, [ROWS]) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
        report = engine.report()
    assert report.whole_share is None
    assert "whole backward   not known: CheckpointFunction" in str(report)
    assert "sites' backward" in str(report)


def test_reading_the_graph_unpacks_nothing_and_ends_soon() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    checkpoint_activations(model)  # in which an unpacked tensor is one computed again
    with sbp.attach(model, [ROWS]) as engine:
        for _ in range(9):
            engine.backward(model(input_ids=ids, labels=ids).loss)
        whole = engine.report().whole
    assert whole is not None
    assert whole.num_passes == 4  # 1, 2, 4, 8


def test_a_probe_reads_no_graph() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    with sbp.attach(model, [ROWS]) as engine, engine.probing():
        engine.backward(model(input_ids=ids, labels=ids).loss)
        assert engine.report().whole is None


@pytest.mark.parametrize("mode", ["exact", "detach"])
@pytest.mark.parametrize("gradient", [None, "topk"])
def test_tokens_report_what_was_carried_and_not_all(mode: str, gradient: str | None) -> None:
    model, ids = tiny_model("llama"), tokens(0, length=32)
    policies = [sbp.make_policy("tokens", keep=0.1, score="random", mode=mode)]
    policies += [sbp.make_policy(gradient, keep=0.5)] if gradient else []
    with sbp.attach(model, policies, exclude=["lm_head"]) as engine:
        for _ in range(2):
            engine.backward(model(input_ids=ids, labels=ids).loss)
        report = engine.report()
    with sbp.attach(model, [sbp.make_policy("dense")], exclude=["lm_head"]) as engine:
        for _ in range(2):
            engine.backward(model(input_ids=ids, labels=ids).loss)
        dense = engine.report()
    assert report.dense_flops == dense.dense_flops
    assert [site.entries for site in report.sites] == [site.entries for site in dense.sites]
    assert report.claimed_flops == sum(site.arrived_flops for site in report.sites) * (0.5 if gradient else 1.0)
    if mode == "detach":
        assert report.chosen is not None
        assert report.kept_share < 1.5 * report.chosen.carried_share * (0.5 if gradient else 1.0)
    assert report.whole_share is not None
    assert report.whole_share < (1.0 if mode == "exact" else 0.5)
    assert "of 124 label positions trained" in str(report)
    assert "tensor(" not in str(report) + repr(report) + repr(report.chosen) + report.details()


def test_examples_report_what_was_carried_and_not_all() -> None:
    model, ids = tiny_model("llama"), tokens(0, batch=4)
    policy = sbp.make_policy("uniform", keep=0.25, start=0.0, end=1.0, interrupt=0)
    with sbp.attach(model, [policy], num_steps=1) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
        report = engine.report()
    assert report.kept_share == report.claimed_share == 0.25
    assert "1 of 4 examples" in str(report)


SHORT: dict[str, Any] = {
    "frozen": {"name": "frozen", "turn": "layers"},
    "dropbp": {"name": "dropbp", "keep": 0.5},
    "layerdrop": {"name": "layerdrop", "keep": 0.5},
    "uniform": {"name": "uniform", "keep": 0.5, "start": 0.0, "end": 1.0, "interrupt": 0},
    "tokens": {"name": "tokens", "keep": 0.25, "score": "random"},
    "tokens detach": {"name": "tokens", "keep": 0.25, "score": "random", "mode": "detach"},
    "lossless": {"name": "lossless", "verify": "never"},
    "rows and frozen": [{"name": "topk", "keep": 0.25, "along": "rows"}, {"name": "frozen", "turn": "layers"}],
}


@pytest.mark.parametrize("name", SHORT)
def test_work_left_out_beforehand_is_counted_against_the_dense_backward(name: str) -> None:
    model: Any = tiny_decoder("llama", vocab_size=64)
    ids = torch.randint(3, 64, (4, 32), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(32) < torch.tensor([[32], [20], [28], [32]])
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    batch["labels"] = ids.masked_fill(~mask | (torch.arange(32) < 10), -100)
    loss = model(**batch).loss
    with count_flops() as dense:
        loss.backward()
    model.zero_grad(set_to_none=True)
    state, ran, optimizer = torch.get_rng_state(), [], torch.optim.SGD(model.parameters(), 0.0)
    with sbp.attach(model, SHORT[name], optimizer=optimizer, num_steps=64) as engine:
        for _ in range(4):
            loss = model(**batch).loss
            with count_flops() as flops:
                engine.backward(loss)
            ran.append(flops.total / dense.total)
            optimizer.step()
            optimizer.zero_grad()
        report = engine.report()
    assert torch.equal(state, torch.get_rng_state()), "no numbers are drawn for it"
    assert report.whole_share == pytest.approx((ran[0] + ran[1] + ran[3]) / 3, rel=1e-6)  # passes 1, 2 and 4
    assert f"{report.whole_share:.1%} of the dense FLOPs remain" in str(report)
    if "frozen" in name:
        assert report.claimed_share is not None
        assert report.claimed_share < 0.9, "gradients that do not arrive count"


def test_a_pass_of_several_forwards_leaves_the_whole_unknown() -> None:
    model: Any = tiny_decoder("llama", vocab_size=64)
    ids = tokens(0).clamp(max=63)
    with sbp.attach(model, SHORT["tokens"]) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss + model(input_ids=ids, labels=ids).loss)
        report = engine.report()
    assert report.whole_share is None
    assert "could not be counted" in report.whole_unknown


def test_a_report_is_a_short_table_with_details_on_request() -> None:
    model, ids = tiny_model("llama", num_hidden_layers=4), tokens(0)
    with sbp.attach(model, [ROWS], exclude=["lm_head"]) as engine:
        assert str(engine.report()).startswith("0 backward passes, 28 sites")
        engine.backward(model(input_ids=ids, labels=ids).loss)
        report = engine.report()
    text = str(report)
    assert len(text.splitlines()) <= 12
    assert max(map(len, text.splitlines())) <= 120
    assert text.splitlines()[1].strip().startswith("whole backward")
    assert len(repr(report)) < 120
    assert all(site.name in report.details() for site in report.sites)


@pytest.mark.parametrize("when", ["before attach", "disabled", "another model"])
def test_a_loss_that_no_site_sees_is_refused(when: str) -> None:
    model, other, ids = tiny_model("llama"), tiny_model("llama"), tokens(0)
    early = model(input_ids=ids, labels=ids).loss
    with sbp.attach(model, [ROWS]) as engine, sbp.attach(other, [ROWS]):
        engine.backward(model(input_ids=ids, labels=ids).loss)
        model.zero_grad(set_to_none=True)
        with engine.disabled():
            dense = model(input_ids=ids, labels=ids).loss
        loss = {"before attach": early, "disabled": dense, "another model": other(input_ids=ids, labels=ids).loss}[when]
        with pytest.raises(UsageError, match="this loss does not depend on the attached layers"):
            engine.backward(loss)
        assert all(p.grad is None for p in model.parameters())
        assert engine.report().num_backwards == 1
        with engine.disabled():
            engine.backward(dense)


def test_tokens_refuse_a_loss_of_a_forward_under_disabled_after_good_ones() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    with sbp.attach(model, [sbp.make_policy("tokens", keep=0.5, score="random")]) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
        with engine.disabled():
            loss = model(input_ids=ids, labels=ids).loss
        with pytest.raises(UsageError, match="this loss does not depend on the attached layers"):
            engine.backward(loss)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_model_has_its_sites(use_reentrant: bool) -> None:
    model, ids = tiny_model("llama"), tokens(0)
    model.enable_input_require_grads()
    checkpoint_activations(model, use_reentrant=use_reentrant)
    with sbp.attach(model, [ROWS], exclude=["lm_head"]) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
        assert engine.report().never_called == ()
