"""Together with what people train with: adapters, autocast, checkpointing, dropout, gradient policies, accelerate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.policy.token import TokenMode
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.backward.conftest import tiny_model
from tests.backward.families import tiny_decoder

from .case import Batch, Marked, assert_near, make_batch, plain_step, random_ids, step
from .test_families import decoder

MODES: tuple[Any, ...] = ("exact", "detach")
AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_adapters_get_the_gradient_of_the_reference(family: str, mode: Any) -> None:
    targets = {"llama": ["q_proj", "v_proj", "down_proj"], "phi3": ["qkv_proj"], "gpt2": ["c_attn"]}[family]
    inner = decoder(family)
    model = get_peft_model(
        inner, LoraConfig(target_modules=targets, init_lora_weights=False, fan_in_fan_out=family == "gpt2")
    )
    for name in ("scattered", "prompts"):
        batch = make_batch(name, "right")
        ours = step(model, batch, mode)
        assert_near(ours, step(model, batch, mode, execution="reference"))
        assert ours.gradients
        assert all("lora" in name and gradient is not None for name, gradient in ours.gradients.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["scattered", "prompts"])
def test_under_autocast_every_weight_has_its_gradient(name: str, mode: Any) -> None:
    model, batch = decoder("llama"), make_batch(name)
    ours = step(model, batch, mode, around=AUTOCAST)
    theirs = step(model, batch, mode, around=AUTOCAST, execution="reference")
    assert_near(ours, theirs, 0.03)  # of bfloat16
    assert all(gradient is not None and gradient.any() for gradient in ours.gradients.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_checkpointed_layers_give_the_same_gradient(family: str, mode: Any, *, reentrant: bool) -> None:
    for name in ("scattered", "prompts", "half"):
        batch = make_batch(name, "right")
        stored = step(decoder(family), batch, mode)
        model = decoder(family)
        checkpoint_activations(model, use_reentrant=reentrant)
        if reentrant:
            model.enable_input_require_grads()
        assert_near(step(model, batch, mode), stored, 1e-6)
        assert all(
            module.gradient_checkpointing
            for module in model.modules()
            if hasattr(module, "_gradient_checkpointing_func")
        )


@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_layers_draw_their_dropout_again(mode: Any) -> None:
    outcomes = []
    for checkpointing in (False, True):
        model = tiny_decoder("gpt2", checkpointing=checkpointing)
        assert model.config.resid_pdrop > 0.0
        torch.manual_seed(4)
        outcomes.append(step(model, make_batch("scattered"), mode))
    assert_near(*outcomes, 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_tied_embeddings_get_both_parts_of_their_gradient(mode: Any) -> None:
    model, batch = tiny_model("qwen2"), make_batch("scattered")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert_near(step(model, batch, mode), step(model, batch, mode, execution="reference"))


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_policy_at_linears_is_asked_about_fewer_rows(mode: TokenMode) -> None:
    model, batch = decoder("llama"), make_batch("prompt")
    with sbp.attach(model, [Marked(mode=mode), sbp.make_policy("topk", keep=1.0, along="rows")]) as engine:
        engine.backward(model(**batch.arguments).loss)
        report = engine.report()
        gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for name, gradient in step(model, batch, mode).gradients.items():
        torch.testing.assert_close(gradients[name], gradient)
    rows = {site.name: site.rows for site in report.sites}
    carried = 3 * (15 if mode == "exact" else 6)
    assert rows["model.layers.0.mlp.down_proj"] == carried
    assert rows["model.layers.1.self_attn.k_proj"] == carried
    assert rows["model.layers.1.mlp.down_proj"] == rows["lm_head"] == 3 * 6
    assert not report.never_called
    with sbp.attach(model, [Marked(mode=mode), sbp.make_policy("topk", keep=0.3, along="rows")]) as engine:
        engine.backward(model(**batch.arguments).loss)
        report = engine.report()
    assert report.claimed_flops == pytest.approx(0.3 * report.arrived_flops)
    carried = sum(site.rows / (3 * 16) * site.entries for site in report.sites) / sum(s.entries for s in report.sites)
    assert report.kept_share == pytest.approx(0.3 * carried, abs=0.05)


@pytest.mark.parametrize("mode", MODES)
def test_accumulated_micro_batches_add_up(mode: Any) -> None:
    model = decoder("qwen3")
    batches = [make_batch("scattered"), make_batch("prompts", "left")]
    singles = [step(model, batch, mode).gradients for batch in batches]
    model.zero_grad(set_to_none=True)
    with sbp.attach(model, [Marked(mode=mode)], optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as engine:
        for number, batch in enumerate(batches):
            assert engine.now().micro_batch == number
            engine.backward(model(**batch.arguments).loss)
    for name, parameter in model.named_parameters():
        first, second = (gradients[name] for gradients in singles)
        assert first is not None
        assert second is not None
        torch.testing.assert_close(parameter.grad, first + second, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_embeddings_and_masks_of_the_users_own_are_taken(mode: Any) -> None:
    model, batch = decoder("llama"), make_batch("scattered")
    embeddings = model.get_input_embeddings()(batch.inputs["input_ids"]).detach()
    allowed = torch.ones(16, 16, dtype=torch.bool).tril() & ~torch.ones(16, 16, dtype=torch.bool).tril(-6)
    for mask in (allowed[None, None], torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]):
        inputs = {"inputs_embeds": embeddings, "labels": batch.inputs["labels"], "attention_mask": mask}
        own = Batch(inputs, batch.trained, batch.carries)
        assert_near(step(model, own, mode), step(model, own, mode, execution="reference"))
    assert_near(step(model, own, "exact"), plain_step(model, own))


@pytest.mark.parametrize("mode", MODES)
def test_an_example_selector_chooses_before_the_tokens(mode: Any) -> None:
    model, batch = decoder("llama"), make_batch("scattered")
    policies = [Marked(mode=mode), sbp.make_policy("uniform", keep=0.34, start=0.0, end=1.0)]
    with sbp.attach(model, policies, num_steps=1) as engine:
        engine.backward(model(**batch.arguments).loss)
        gradients = {name: p.grad for name, p in model.named_parameters()}
    found = []
    for example in range(3):
        one = Batch(
            {name: value[example : example + 1] for name, value in batch.inputs.items()},
            batch.trained[example : example + 1],
            batch.carries[example : example + 1],
        )
        expected = step(model, one, mode).gradients
        found.append(all(torch.allclose(gradients[n], g, rtol=1e-4, atol=1e-6) for n, g in expected.items()))  # type: ignore[arg-type]
    assert found.count(True) == 1


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_prepares_an_attached_model_and_gives_it_back(precision: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    model, batch = decoder("llama"), make_batch("prompt")
    before = step(model, batch, "detach", around=AUTOCAST if precision == "bf16" else torch.enable_grad)
    model.zero_grad(set_to_none=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    engine = sbp.attach(model, [Marked(mode="detach")])
    prepared = accelerator.prepare_model(model)
    engine.backward(prepared(**batch.arguments).loss, accelerator.backward)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before.gradients[name]), name  # type: ignore[arg-type]
    engine.detach()
    given_back: nn.Module = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert given_back is model
    ids: Tensor = random_ids()
    assert model(input_ids=ids, labels=ids).logits.shape == (3, 16, 64)
    assert model(ids).logits.shape == (3, 16, 64)
