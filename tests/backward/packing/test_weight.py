"""Rows whose loss has the weight zero are left out, and the gradient is that of each example alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from tests.backward.conftest import tiny_model

from .case import IGNORED, error, make_batch
from .test_scoring import FAMILIES

WEIGHTS = torch.tensor([1.0, 0.0, -0.5, 0.0, 2.0, 0.0])
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 3e-2}


def grads(model: nn.Module) -> list[Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    return -nn.functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")


def own_loss(logits: Tensor, batch: dict[str, Tensor], weight_B: Tensor) -> Tensor:
    """As of a policy gradient: log-probabilities of labelled tokens, times the example's weight."""
    return -(log_probs(logits, batch["input_ids"]) * (batch["labels"][:, 1:] != IGNORED) * weight_B[:, None]).sum() / 64


def one_at_a_time(model: nn.Module, batch: dict[str, Tensor], weight_BT: Tensor, divisor: float) -> list[Tensor]:
    """The gradient of the weighted sum, each example by itself without padding and mask, those without weight too."""
    for number in range(len(batch["input_ids"])):
        real = batch["attention_mask"][number].bool()
        ids, labels, weight = (v[number][real][None] for v in (batch["input_ids"], batch["labels"], weight_BT))
        trained = labels[:, 1:] != IGNORED
        (-(log_probs(model(ids, use_cache=False).logits, ids) * trained * weight[:, 1:]).sum() / divisor).backward()
    return grads(model)


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def peft_model(model: Any) -> Any:
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize(
    ("family", "dtype", "column"),
    [
        *((family, torch.float32, "example_weight") for family in (*FAMILIES, "llama, lora", "llama, checkpointing")),
        ("llama", torch.float32, "loss_weight"),
        ("gemma2", torch.bfloat16, "example_weight"),
        ("llama, lora", torch.bfloat16, "loss_weight"),
    ],
)
def test_the_gradient_is_that_of_each_example_alone_over_two_micro_batches(
    family: str, dtype: torch.dtype, column: str
) -> None:
    name, _, wrap = family.partition(", ")
    model = {"lora": peft_model, "checkpointing": checkpointed}.get(wrap, lambda same: same)(
        tiny_model(name, **FAMILIES[name]).to(dtype)
    )
    model.to(dtype)
    batches = [make_batch("right", "completion", "groups"), make_batch("none", "last", "tree")]
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for batch in batches:
        weight_BT = WEIGHTS[:, None].expand_as(batch["labels"])
        wanted = [a + b for a, b in zip(wanted, one_at_a_time(model, batch, weight_BT, 64), strict=True)]
    with sbp.attach(model, "lossless") as engine:
        for batch in batches:
            weights = WEIGHTS if column == "example_weight" else WEIGHTS[:, None].expand_as(batch["labels"])
            engine.columns(labels=batch["labels"], **{column: weights})
            engine.backward(own_loss(model(**inputs(batch)).logits, batch, WEIGHTS))
    assert error(wanted, grads(model)) < LIMITS[dtype]
    assert "outputs of weight 0 skipped" in engine.notes["packing"]
    assert "gradient compared with the ordinary one" in engine.notes["packing"]


@pytest.mark.parametrize("items", [None, 37.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_without_weight_count_and_are_not_computed(family: str, items: float | None) -> None:
    model, batch = tiny_model(family, **FAMILIES[family]), make_batch("right", "dense", "none")
    batch["labels"][:, 0] = IGNORED
    weight_BT = torch.randn(batch["labels"].shape, generator=torch.Generator().manual_seed(1))
    weight_BT[2:] = 0.0
    weight_BT[:, 20:] = 0.0
    count = int((batch["labels"][:, 1:] != IGNORED).sum()) if items is None else items
    wanted = one_at_a_time(model, batch, weight_BT, count)
    plain, short = flops_of(model, batch, None), 0
    with sbp.attach(model, "lossless") as engine:
        engine.columns(loss_weight=weight_BT)
        for _ in range(2):
            given = batch | ({} if items is None else {"num_items_in_batch": torch.tensor(items)})
            with FlopCounterMode(display=False) as counter:
                engine.backward(model(**given).loss)
            assert error(wanted, grads(model)) < LIMITS[torch.float32]
            short = counter.get_total_flops()
    assert short < 0.3 * plain
    assert (
        f"{2 * int(((weight_BT == 0) & (batch['labels'] != IGNORED)).sum()):,} outputs of weight 0"
        in engine.notes["packing"]
    )


def flops_of(model: nn.Module, batch: dict[str, Tensor], weight_B: Tensor | None, engine: Any = None) -> int:
    with FlopCounterMode(display=False) as counter:
        if weight_B is None:
            model(**batch).loss.backward()
        else:
            loss = own_loss(model(**inputs(batch), use_cache=False).logits, batch, weight_B)
            loss.backward() if engine is None else engine.backward(loss)
    model.zero_grad()
    return int(counter.get_total_flops())


def test_dead_groups_cost_nothing() -> None:
    """Four groups of four answers, of which two groups have no advantage."""
    model, generator = tiny_model("llama", max_position_embeddings=128), torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 60, (4, 48), generator=generator).repeat_interleave(4, 0)
    ids = torch.cat((prompts, torch.randint(3, 60, (16, 32), generator=generator)), 1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    batch["labels"][:, :48] = IGNORED
    weights = torch.tensor([1.0, -1, 0.5, -0.5, *[0.0] * 4, -1, 1, 1, -1, *[0.0] * 4])
    plain = flops_of(model, batch, weights)
    with sbp.attach(model, [sbp.make_policy("lossless", verify="never")]) as engine:
        engine.columns(labels=batch["labels"])
        for _ in range(2):  # the first tries what the last layer can leave out
            prefixes = flops_of(model, batch, weights, engine)
        engine.columns(labels=batch["labels"], example_weight=weights)
        both = flops_of(model, batch, weights, engine)
    assert 0.4 < prefixes / plain < 0.6
    assert both / plain < 0.28


def test_a_loss_that_reads_examples_without_weight_is_refused() -> None:
    model, batch = tiny_model("llama"), make_batch("none", "dense", "none")
    with sbp.attach(model, "lossless") as engine:
        for column in ({"example_weight": WEIGHTS}, {"loss_weight": WEIGHTS[:, None].expand(6, 44)}):
            engine.columns(labels=batch["labels"], **column)
            with pytest.raises(UnsupportedError, match="that the policy skipped"):
                engine.backward(own_loss(model(**inputs(batch)).logits, batch, torch.ones(6)))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_logits_of_labels_without_weight_are_there_when_they_are_read() -> None:
    model, batch = tiny_model("llama"), make_batch("none", "dense", "none")
    plain = model(**batch).logits.detach()
    with sbp.attach(model, "lossless") as engine:
        engine.columns(loss_weight=WEIGHTS[:, None].expand(6, 44))
        for _ in range(2):
            torch.testing.assert_close(model(**batch).logits, plain)


def test_weights_of_examples_that_do_not_fit_are_refused() -> None:
    model, batch = tiny_model("llama"), make_batch("none", "dense", "none")
    with sbp.attach(model, "lossless") as engine:
        engine.columns(labels=batch["labels"], example_weight=WEIGHTS[:4])
        with pytest.raises(UsageError, match=r"one row for each of 6 examples, got shape \(4,\)"):
            model(**inputs(batch))
        engine.columns(example_weight=WEIGHTS)
        with pytest.raises(UsageError, match="example_weight needs your own loss"):
            model(**batch)
