"""What the micro-batches of one update share is computed once, and the gradient is that of one example at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import sparsebp_cli as sbp
from benchmarks.live_bytes import live_bytes
from sparsebp_cli.errors import UsageError

from .case import IGNORED, LIMIT, error

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "n_positions": 128}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
WINDOW = {"sliding_window": 9}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama, eager": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager")),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3 with experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **HEADS, **EXPERTS)),
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SMALL, **WINDOW)),
    "gemma2 with windows": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, **HEADS, **WINDOW)),
    "gemma3 with windows": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, **HEADS, **WINDOW)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **NO_DROPOUT)),
}


def build(family: str = "llama") -> Any:
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def make_rows(groups: int = 3, answers: int = 4, prompt: int = 24) -> list[Tensor]:
    """Return answers of unlike length to prompts, of which all begin alike."""
    generator = torch.Generator().manual_seed(2)
    draw = lambda size: torch.randint(3, 60, (size,), generator=generator)  # noqa: E731
    common, rows = draw(18), []
    for _ in range(groups):
        begin = torch.cat((common, draw(prompt)))
        rows += [torch.cat((begin, draw(5 + 3 * answer))) for answer in range(answers)]
    return rows


def label(row: Tensor, what: str) -> Tensor:
    """Return the labels of one example."""
    labels = row.clone()
    if what == "answers":
        labels[:40] = IGNORED
    if what == "scattered":
        labels[torch.arange(len(row)) % 3 != 0] = IGNORED
    return labels


def collate(rows: Sequence[Tensor], what: str, pad: str = "right") -> dict[str, Tensor]:
    """Return the arguments of a forward."""
    size = max(map(len, rows)) + 2

    def place(row: Tensor, value: int) -> Tensor:
        free = (0, size - len(row)) if pad == "right" else (size - len(row), 0)
        return nn.functional.pad(row, free, value=value)

    labels = torch.stack([place(label(row, what), IGNORED) for row in rows])
    if pad == "left":  # that of a first token would train padding
        first = labels.shape[1] - torch.tensor([len(row) for row in rows])
        labels[torch.arange(len(rows)), first] = IGNORED
    return {
        "input_ids": torch.stack([place(row, 0) for row in rows]),
        "attention_mask": torch.stack([place(torch.ones_like(row), 0) for row in rows]),
        "labels": labels,
    }


def split(rows: Sequence[Tensor], size: int, what: str, pad: str = "right") -> list[dict[str, Tensor]]:
    """Return micro-batches."""
    return [collate(rows[start : start + size], what, pad) for start in range(0, len(rows), size)]


def take_gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def alone(model: Any, rows: Sequence[Tensor], what: str) -> list[Tensor]:
    """Return the gradient of the update, one example at a time, by torch and transformers alone."""
    count = sum(int((label(row, what)[1:] != IGNORED).sum()) for row in rows)
    for row in rows:
        logits, labels = model(input_ids=row[None], use_cache=False).logits[0, :-1], label(row, what)[1:]
        (nn.functional.cross_entropy(logits, labels, reduction="sum") / count).backward()
    return take_gradients(model)


def train(model: Any, engine: sbp.Engine | None, batches: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """Return the gradient of an update, batch by batch."""
    items = torch.tensor(sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches))
    if engine is not None:
        engine.expect(batches)
    for batch in batches:
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward() if engine is None else engine.backward(loss)
    return take_gradients(model)


def attach(model: nn.Module, **options: Any) -> sbp.Engine:
    return sbp.attach(model, sbp.make_policy("lossless", **({"prefixes": "update", "verify": "never"} | options)))


def shuffled(rows: Sequence[Tensor]) -> list[Tensor]:
    return [rows[n] for n in torch.randperm(len(rows), generator=torch.Generator().manual_seed(5)).tolist()]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_has_the_gradient_of_one_example_at_a_time(family: str) -> None:
    model, rows = build(family), make_rows()
    for what in ("answers", "all", "scattered"):
        expected = alone(model, rows, what)
        with attach(model) as engine:
            for given in (rows, shuffled(rows)):
                assert error(expected, train(model, engine, split(given, 3, what))) < LIMIT, what
        assert "token positions in 2 of 2 updates" in engine.notes["packing of updates"]


def test_padding_on_the_left_and_single_examples_change_nothing() -> None:
    model, rows = build(), shuffled(make_rows())
    for size, pad in ((1, "right"), (2, "left"), (5, "left")):
        batches = split(rows, size, "answers", pad)
        expected = train(model, None, batches)
        with attach(model) as engine:
            assert error(expected, train(model, engine, batches)) < LIMIT, (size, pad)
            assert "sharing prefixes skipped" in engine.notes["packing of updates"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("way", ["checkpointing", "LoRA", "LoRA, checkpointing", "upper layers"])
def test_checkpointing_adapters_and_frozen_layers_change_nothing(way: str) -> None:
    from .test_cross import adapted, checkpointed

    model, rows = build(), make_rows()
    if "checkpointing" in way:
        model = checkpointed(model)
    if "LoRA" in way:
        model = adapted(model)
    if way == "upper layers":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.2" in name)
    expected = alone(model, rows, "answers")
    with attach(model, verify="always") as engine:
        assert error(expected, train(model, engine, split(rows, 4, "answers"))) < LIMIT
        assert error(expected, train(model, engine, split(shuffled(rows), 5, "answers"))) < LIMIT
    assert "compared with the ordinary one in 6 of these" in engine.notes["packing"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("verify", ["never", "always"])
@pytest.mark.parametrize("way", ["other adapter", "no adapter", "stronger adapter", "frozen layer"])
def test_a_micro_batch_with_other_adapters_shares_no_prefix(way: str, verify: str) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(build(), config).train()
    model.add_adapter("other", config)
    model.requires_grad_(True)
    batches = split(make_rows(), 4, "answers")

    def switch(*, on: bool) -> None:
        if way == "other adapter":
            model.set_adapter("other" if on else "default")
            model.requires_grad_(True)
        elif way == "no adapter":
            (model.base_model.disable_adapter_layers if on else model.base_model.enable_adapter_layers)()
            model.requires_grad_(True)
        elif way == "stronger adapter":
            for module in model.modules():
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    module.set_scale("default", 3.0 if on else 1.0)
        else:
            model.base_model.model.model.layers[1].requires_grad_(not on)

    def run(engine: Any) -> list[Tensor]:
        if engine is not None:
            engine.expect(batches)
        for number, batch in enumerate(batches):
            switch(on=number == 1)
            loss = model(**batch, num_items_in_batch=50).loss
            loss.backward() if engine is None else engine.backward(loss)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return grads

    expected = run(None)
    with attach(model, verify=verify) as engine:
        assert error(expected, run(engine)) < LIMIT
        assert "1 micro-batches ran without shared prefixes: " in engine.notes["packing of updates"]


def test_a_loss_of_ones_own_over_logits_has_the_same_gradient() -> None:
    model, rows = build(), make_rows()
    expected = alone(model, rows, "answers")
    batches = split(rows, 3, "answers")
    count = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
    for tells in (True, False):  # which positions are read
        with attach(model) as engine:
            engine.expect([b if tells else {n: v for n, v in b.items() if n != "labels"} for b in batches])
            for batch in batches:
                labels = batch["labels"][:, 1:]
                if tells:
                    engine.columns(labels=batch["labels"])
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
                chosen = labels != IGNORED
                loss = nn.functional.cross_entropy(logits[chosen], labels[chosen], reduction="sum") / count
                engine.backward(loss)
            assert error(expected, take_gradients(model)) < LIMIT


def test_weights_of_the_loss_are_those_of_each_token() -> None:
    model, rows = build(), make_rows()
    batches = split(rows, 3, "answers")
    items = torch.tensor(100)
    weights = [
        torch.where(torch.arange(b["labels"].shape[1]) % 4 == 0, 0.0, 2.0).expand_as(b["labels"]) for b in batches
    ]
    for batch, weight_BT in zip(batches, weights, strict=True):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
        ((losses * weight_BT[:, 1:]).sum() / items).backward()
    expected = take_gradients(model)
    with attach(model) as engine:
        engine.expect([b | {"loss_weight": w} for b, w in zip(batches, weights, strict=True)])
        for batch, weight_BT in zip(batches, weights, strict=True):
            engine.columns(loss_weight=weight_BT)
            engine.backward(model(**batch, num_items_in_batch=items).loss)
        assert error(expected, take_gradients(model)) < LIMIT
        assert "outputs of weight 0 skipped" in engine.notes["packing"]


def test_one_backward_for_all_losses_is_the_same() -> None:
    model, rows = build(), make_rows()
    expected, batches = alone(model, rows, "answers"), split(rows, 3, "answers")
    count = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
    with attach(model) as engine:
        engine.expect(batches)
        engine.backward(torch.stack([model(**b, num_items_in_batch=torch.tensor(count)).loss for b in batches]).sum())
        assert error(expected, take_gradients(model)) < LIMIT


def test_a_factor_of_the_loss_is_one_of_the_gradient() -> None:
    """As a scaler's: what is handed up has it already."""
    model, batches = build(), split(make_rows(), 3, "answers")
    with attach(model) as engine:
        once = train(model, engine, batches)
        engine.expect(batches)
        for batch in batches:
            loss = model(**batch, num_items_in_batch=torch.tensor(1)).loss
            engine.backward(loss, lambda loss: (loss * 1024).backward())
        count = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
        assert error([gradient * 1024 * count for gradient in once], take_gradients(model)) < LIMIT


def test_another_batch_in_between_is_trained_as_ever() -> None:
    model, rows = build(), make_rows()
    batches, other = split(rows, 3, "answers"), split(make_rows(1, 4, 30), 4, "all")[0]
    expected = train(model, None, batches)
    model(**other).loss.backward()
    expected = [a + b for a, b in zip(expected, take_gradients(model), strict=True)]
    with attach(model) as engine:
        items = torch.tensor(sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches))
        engine.expect(batches)
        for number, batch in enumerate(batches):
            engine.backward(model(**batch, num_items_in_batch=items).loss)
            if number == 1:
                engine.backward(model(**other).loss)
        assert error(expected, take_gradients(model)) < LIMIT


def test_an_optimizer_may_not_step_before_the_last_micro_batch() -> None:
    model, batches = build(), split(make_rows(), 3, "answers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with attach(model) as engine:
        engine.expect(batches)
        engine.backward(model(**batches[0]).loss)
        with pytest.raises(UsageError, match=r"3 of the 4 micro-batches passed to engine\.expect"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        model.zero_grad()
        train(model, engine, batches)
        optimizer.step()


def test_a_micro_batch_of_which_others_have_all_rows_runs_with_rows_of_its_own() -> None:
    model, rows = build(), make_rows()
    rows = [torch.cat((row, torch.arange(3, 23))) for row in rows]  # answers that are long enough to be held
    batches = [*split(rows, 4, "answers")] * 2 + split([rows[0][:-4], rows[5]], 2, "answers")
    expected = train(model, None, batches)
    with attach(model, verify="always") as engine:
        assert error(expected, train(model, engine, batches)) < LIMIT
        assert "in 1 of 1 updates" in engine.notes["packing of updates"]
        assert "compared with the ordinary one in 7 of these" in engine.notes["packing"]


@pytest.mark.parametrize("which", [0, 1, 3])
def test_a_forward_that_reads_more_than_was_said_computes_its_own(which: int) -> None:
    model, rows = build(), make_rows()
    said, given = split(rows, 3, "answers"), split(rows, 3, "answers")
    given[which] = split(rows, 3, "all")[which]
    expected = train(model, None, given)
    items = torch.tensor(sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in given))
    with attach(model) as engine:
        engine.expect(said)
        for batch in given:
            engine.backward(model(**batch, num_items_in_batch=items).loss)
        assert error(expected, take_gradients(model)) < LIMIT
        assert "1 micro-batches ran without shared prefixes: they needed" in engine.notes["packing of updates"]


def test_micro_batches_without_a_common_prefix_run_as_without_a_plan() -> None:
    model = build()
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 60, (20 + n,), generator=generator) for n in range(6)]
    batches = split(rows, 2, "all")
    with attach(model, prefixes="share") as engine:
        expected = train(model, engine, batches)
        assert "packing of updates" not in engine.notes
    with attach(model) as engine:
        assert not engine.expect(batches)
        found = train(model, engine, batches)
        assert "have no prefix in common" in engine.notes["packing of updates"]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_under_reentrant_checkpointing_each_batch_shares_alone() -> None:
    model, rows = build(), make_rows()
    expected, batches = alone(model, rows, "answers"), split(rows, 3, "answers")
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with attach(model) as engine:
        assert not engine.expect(batches)
        assert error(expected, train(model, engine, batches)) < LIMIT
        assert "not supported with reentrant checkpointing" in engine.notes["packing of updates"]


def test_the_report_says_why_announced_micro_batches_share_nothing() -> None:
    model, batch = build(), collate(make_rows(), "answers", "left")
    first = batch["attention_mask"].argmax(1)
    batch["labels"].scatter_(1, first[:, None], 7)  # padding predicts it
    with attach(model, prefixes="update") as engine:
        assert not engine.expect([batch, batch])
        train(model, engine, [batch, batch])
        assert "a label at the first position of a text padded on the left" in engine.notes["packing of updates"]


def test_the_report_says_so_where_nobody_names_the_micro_batches() -> None:
    model, batches = build(), split(make_rows(), 3, "answers")
    with attach(model) as engine:
        engine.backward(model(**batches[0]).loss)
        assert "pass the micro-batches of an update to engine.expect" in engine.notes["packing of updates"]


def test_a_wrong_row_that_is_shared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison looks at rows of the update, too."""
    from sparsebp_cli.backward.kind.packing import update

    model, batches = build(), split(make_rows(), 3, "answers")
    expected = train(model, None, batches)
    run = update.UpdatePlan._run

    def wrong(self: Any, *args: Any) -> Any:
        kept = run(self, *args)
        return update.KeptRows({m: (k * 1.1, v) for m, (k, v) in kept.keys.items()}, kept.hidden)

    monkeypatch.setattr(update.UpdatePlan, "_run", wrong)
    with attach(model, verify="first") as engine:
        found = train(model, engine, batches)
    assert "lossless is off from here on" in engine.notes["packing"]
    assert error(expected, found) < LIMIT


def flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def test_each_shared_row_is_computed_once() -> None:
    """One batch of all rows shares all that there is to share: no more is computed in micro-batches."""
    model, rows = build("llama, eager"), make_rows(4, 8, 64)
    whole, batches = split(rows, 32, "answers"), split(rows, 4, "answers")
    plain = flops(lambda: train(model, None, batches))
    with attach(model, prefixes="share") as engine:
        train(model, engine, batches)
        by_batch = flops(lambda: train(model, engine, batches))
        train(model, engine, whole)
        at_once = flops(lambda: train(model, engine, whole))
    with attach(model) as engine:
        train(model, engine, batches)
        by_update = flops(lambda: train(model, engine, batches))
    assert by_update < 0.8 * by_batch < 0.8 * plain
    assert by_update == pytest.approx(at_once, rel=0.05)


def test_what_is_held_is_one_path_however_many_prompts_there_are() -> None:
    model = build()

    def most(groups: int, *, way: str, size: int = 4) -> int:
        rows = make_rows(groups, 8, 64)
        with attach(model, prefixes=way) as engine:
            batches = split(rows, size, "answers")
            train(model, engine, batches)
            with live_bytes(model.parameters()) as live:
                train(model, engine, batches)
        return live.peak

    few, many = most(2, way="update"), most(8, way="update")
    assert many < 1.1 * few  # of 4 times as many prompts; a storage whose address is used again may count twice
    assert many < 0.4 * most(8, way="share", size=64)


def test_the_plan_says_how_many_rows_are_held_at_a_time() -> None:
    model, rows = build(), make_rows(4, 8, 64)
    with attach(model) as engine:
        train(model, engine, split(rows, 4, "answers"))
    # Of 4 prompts of 64 behind 18 common tokens, each in two micro-batches; the first 18 in eight.
    saved, held = 4 * 64 + 7 * 18, 18 + 64
    assert engine.notes["packing of updates"] == (
        f"sharing prefixes skipped {saved} token positions in 1 of 1 updates; at most {held} positions in memory"
    )


def test_what_is_held_has_the_same_bits_in_the_first_update_as_later() -> None:
    """A resumed run begins at any update."""
    model, rows = build(), make_rows()
    batches = split(rows, 3, "answers")
    with attach(model) as engine:
        first, second = (train(model, engine, batches) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_cleared_between_micro_batches_are_cleared_at_shared_prefixes(to_none: bool) -> None:
    model, batches = build(), split(make_rows(), 3, "answers")
    plain = copy.deepcopy(model)
    with attach(model) as engine:
        engine.expect(batches)
        for number, batch in enumerate(batches):
            engine.backward(model(**batch).loss)
            plain(**batch).loss.backward()
            if number == 1:
                model.zero_grad(set_to_none=to_none)
                plain.zero_grad()
        assert error(take_gradients(plain), take_gradients(model)) < LIMIT


def train_by(model: Any, engine: sbp.Engine, batches: Sequence[dict[str, Tensor]], *backward: Any) -> None:
    for batch in batches:
        engine.backward(model(**batch).loss, *backward)


@pytest.mark.parametrize("way", ["store", "inputs", "grad"])
def test_a_backward_that_leaves_out_shared_prefixes_is_refused(way: str) -> None:
    model, batches, store = build(), split(make_rows(), 3, "answers"), sbp.GradStore()
    trained = list(model.parameters())
    ways: dict[str, Any] = {
        "store": store.backward,
        "inputs": lambda loss: loss.backward(inputs=trained),
        "grad": lambda loss: torch.autograd.grad(loss, trained, allow_unused=True),
    }
    with attach(model) as engine:
        engine.expect(batches)
        with pytest.raises(UsageError, match="this one left out the shared prefixes"):
            train_by(model, engine, batches, ways[way])


def test_a_parameter_that_is_frozen_between_micro_batches_is_refused() -> None:
    model, batches = build(), split(make_rows(), 3, "answers")
    with attach(model) as engine:
        engine.expect(batches)
        engine.backward(model(**batches[0]).loss)
        model.model.layers[0].requires_grad_(False)
        with pytest.raises(UsageError, match="a parameter was frozen between the micro-batches"):
            train_by(model, engine, batches[1:])


def test_an_interrupted_update_does_not_stop_other_optimizers() -> None:
    model, batches = build(), split(make_rows(), 3, "answers")
    own, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, nn.Linear(2, 2)))
    with attach(model) as engine:
        engine.expect(batches)
        engine.backward(model(**batches[0]).loss)
        other.step()
        with pytest.raises(UsageError, match=r"micro-batches passed to engine\.expect"):
            own.step()
        engine.expect(batches)
        engine.backward(model(**batches[0]).loss)
    own.step()  # the engine is detached


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_comparison_runs_no_hook_of_a_parameter(verify: str) -> None:
    model, batch, calls = build(), split(make_rows(), 12, "answers")[0], []
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda _: calls.append(1))
    with attach(model, prefixes="share", verify=verify) as engine:
        for number in range(3):
            engine.backward(model(**batch).loss)
            assert len(calls) == number + 1
