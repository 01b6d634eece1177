"""One plan leaves out what `lossless` or `tokens` in mode exact would: never more work than the better of the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Policy

from .case import IGNORED, LIMIT, error, gradients, make_batch
from .test_packing import SMALL, llama, packing

GEMMA = "gemma2, windows"  # it has no sdpa
FAMILIES: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = {
    "qwen3, norms of heads": (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 8}),
    "olmo2, wide norms": (Olmo2Config, Olmo2ForCausalLM, {"num_key_value_heads": 2}),
    GEMMA: (Gemma2Config, Gemma2ForCausalLM, {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7}),
    "diffllama, attention called twice": (DiffLlamaConfig, DiffLlamaForCausalLM, {"num_key_value_heads": 2}),
    "phi3, one linear for all three": (Phi3Config, Phi3ForCausalLM, {"num_key_value_heads": 2}),
    "gpt2, output in the shape of the batch": (GPT2Config, GPT2LMHeadModel, {"attn_pdrop": 0.0, "embd_pdrop": 0.0}),
}


def lossless(verify: str = "never") -> Policy:
    return sbp.make_policy("lossless", verify=verify)


def exact(**options: Any) -> Policy:
    return sbp.make_policy("tokens", **({"score": "mask", "mode": "exact"} | options))


def make_chat(share: float | None = None) -> dict[str, Tensor]:
    """Return examples of several turns, every other one of which is trained; or a random share of the labels."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 60, (4, 48), generator=generator)
    length_B = torch.tensor([48, 40, 33, 20]) if share is None else torch.full((4,), 48)
    real = torch.arange(48) < length_B[:, None]
    trained = (torch.arange(48) // 8 % 2 == 1).expand(4, 48)
    if share is not None:
        trained = torch.rand(ids.shape, generator=generator) < share
    labels = ids.masked_fill(~(trained & real), IGNORED)
    return {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long(), "labels": labels}


BATCHES: Mapping[str, Callable[[], dict[str, Tensor]]] = {
    "a tenth, scattered": lambda: make_chat(0.1),
    "half, scattered": lambda: make_chat(0.5),
    "nine tenths, scattered": lambda: make_chat(0.9),
    "chat": make_chat,
    "padding": lambda: make_batch("right", "dense", "none"),
    "padding on the left": lambda: make_batch("left", "scattered", "none"),
    "groups": lambda: make_batch("none", "completion", "groups"),
}


def count(model: nn.Module, batch: dict[str, Any], *policies: Policy) -> tuple[int, Tensor, list[Tensor], str]:
    """Return the FLOPs of the second step, its loss and gradients, and what the report says of packing."""
    if not policies:
        with FlopCounterMode(display=False) as counter:
            plain = gradients(model, None, batch)
        return counter.get_total_flops(), *plain, ""
    with sbp.attach(model, list(policies)) as engine:
        gradients(model, engine, batch)
        with FlopCounterMode(display=False) as counter:
            found = gradients(model, engine, batch)
        return counter.get_total_flops(), *found, engine.notes.get("packing", "")


def train(model: nn.Module, batch: dict[str, Any], *policies: Policy) -> tuple[Tensor, list[Tensor], str]:
    """Return the loss and the gradients of one step, and what the report says of packing."""
    with sbp.attach(model, list(policies)) as engine:
        return *gradients(model, engine, batch), engine.notes.get("packing", "")


@pytest.mark.parametrize("name", BATCHES)
def test_no_kind_of_batch_costs_more_than_the_better_of_the_two(name: str) -> None:
    model, batch = llama(), BATCHES[name]()
    plain, loss, expected, _ = count(model, batch)
    by_tokens = count(model, batch, exact())[0]
    for policies in ((lossless(),), (exact(), lossless()), (lossless(), exact())):
        flops, own_loss, got, _ = count(model, batch, *policies)
        assert flops <= by_tokens <= plain
        assert error(expected, got) < LIMIT
        torch.testing.assert_close(own_loss, loss)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [(family, way) for family in FAMILIES for way in ("sdpa", "eager") if (family, way) != (GEMMA, "sdpa")],
)
def test_families_leave_out_scattered_rows_of_the_last_layer(family: str, implementation: str) -> None:
    config, kind, options = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {"resid_pdrop": 0.0, **SMALL, **options} if kind in (GPT2LMHeadModel, Phi3ForCausalLM) else SMALL | options
    model = kind(config(**sizes, attn_implementation=implementation)).train()
    for batch in (make_batch("left", "scattered", "tree"), make_chat(0.2)):
        by_tokens = count(model, batch, exact())[0]
        _, _, expected, _ = count(model, batch)
        flops, _, got, note = count(model, batch, lossless("first"))
        assert error(expected, got) < LIMIT
        assert flops <= by_tokens
        assert "of the last layer's" in note


def test_scattered_labels_train_as_each_example_alone_does() -> None:
    model, batch = llama(), make_batch("right", "scattered", "groups")
    total = int((batch["labels"][:, 1:] != IGNORED).sum())
    alone: list[Tensor] = [torch.zeros_like(p) for p in model.parameters()]
    for example in range(len(batch["labels"])):
        length = int(batch["attention_mask"][example].sum())
        own = {name: value[example : example + 1, :length] for name, value in batch.items()}
        _, grads = gradients(model, None, own | {"num_items_in_batch": torch.tensor(total)})
        alone = [a + b for a, b in zip(alone, grads, strict=True)]
    _, _, got, note = count(model, batch, exact(), lossless("always"))
    assert error(alone, got) < LIMIT
    assert "gradient compared with the ordinary one in 2 of these" in note


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("form", ["adapters", "checkpointing", "both"])
def test_adapters_and_checkpointing_leave_out_the_same_rows(form: str) -> None:
    import peft

    model, batch = llama(), make_chat(0.2)
    if form != "checkpointing":
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=names))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    if form != "adapters":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    _, loss, expected, _ = count(model, batch)
    by_tokens = count(model, batch, exact())[0]
    for policies in ((lossless("first"),), (exact(), lossless("first"))):
        flops, own_loss, got, note = count(model, batch, *policies)
        assert error(expected, got) < LIMIT
        assert "of the last layer's" in note
        assert flops <= by_tokens
        torch.testing.assert_close(own_loss, loss)


CHOICES: Sequence[dict[str, Any]] = (
    {"score": "random", "keep": 0.3},
    {"score": "loss", "keep": 0.3, "within": "example"},
    {"score": "entropy", "keep": 0.4},
    {"score": "gradient_norm", "keep": 0.3},
)


@pytest.mark.parametrize("options", CHOICES, ids=lambda options: options["score"])
@pytest.mark.parametrize("items", [None, 77])
def test_chosen_tokens_are_trained_as_by_tokens_alone(options: dict[str, Any], items: int | None) -> None:
    model, batch = llama(), make_batch("left", "scattered", "pairs")
    given = batch if items is None else batch | {"num_items_in_batch": torch.tensor(items)}
    loss, expected, _ = train(model, given, exact(**options))
    own_loss, got, note = train(model, given, exact(**options), lossless("always"))
    assert error(expected, got) < LIMIT
    torch.testing.assert_close(own_loss, loss)
    assert "gradient compared with the ordinary one in 1 of these" in note


def test_a_loss_of_ones_own_reads_the_chosen_rows() -> None:
    model, batch = llama(), make_batch("right", "scattered", "groups")
    labels = batch.pop("labels")
    trained = labels[:, 1:] != IGNORED

    def run(*policies: Policy) -> tuple[Tensor, list[Tensor]]:
        with sbp.attach(model, list(policies)) as engine:
            engine.columns(labels=labels)
            logits = model(**batch).logits
            loss = nn.functional.cross_entropy(logits[:, :-1][trained], labels[:, 1:][trained])
            engine.backward(loss)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return logits.detach(), grads

    logits, expected = run(exact(score="random", keep=0.3))
    own_logits, got = run(exact(score="random", keep=0.3), lossless())
    assert error(expected, got) < LIMIT
    torch.testing.assert_close(own_logits, logits)
    assert (own_logits[:, :-1][trained] == 0).all(-1).any()  # what was not chosen


def test_a_batch_of_which_nothing_is_chosen_trains_nothing() -> None:
    model, batch = llama(), make_batch("right", "scattered", "none")
    column = torch.zeros_like(batch["labels"])
    with sbp.attach(model, [exact(mask_column="chosen"), lossless()]) as engine:
        loss = model(**batch, chosen=column).loss
        engine.backward(loss)
    assert float(loss.detach()) == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_evaluations_are_packed_and_detaching_restores_the_model() -> None:
    model, batch = llama(), make_batch("right", "completion", "groups")
    plain = model(**batch).loss.detach()
    with sbp.attach(model, [exact(score="random", keep=0.3), lossless()]) as engine:
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).loss, plain)
        assert "skipped" in engine.notes["packing without a gradient"]
        gradients(model, engine, batch)
        assert "skipped" in packing(engine)
        with engine.disabled():
            assert torch.equal(model(**batch).loss.detach(), plain)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(**batch).loss.detach(), plain)


def test_mode_detach_beside_lossless_is_refused_with_a_way_out() -> None:
    both = "SelectedTokens and Lossless in one forward need mode: exact: set this mode, or give only one of them"
    with pytest.raises(UnsupportedError) as raised:
        sbp.attach(llama(), [exact(mode="detach"), lossless()])
    assert str(raised.value) == both


def test_a_last_layer_that_is_not_known_computes_its_products_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsebp_cli.backward.kind.packing import last_layer

    model, batch = llama(), make_chat(0.2)
    _, _, expected, _ = count(model, batch)
    known, _, _, _ = count(model, batch, lossless())
    monkeypatch.setattr(last_layer, "find_layouts", lambda _: {})
    unknown, _, got, note = count(model, batch, lossless())
    assert error(expected, got) < LIMIT
    assert "of the last layer's" in note
    assert known < unknown
