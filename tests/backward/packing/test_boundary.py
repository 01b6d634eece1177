"""A loss that reads what was not computed is refused before the update, whatever its form; nothing of a batch stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    BertConfig,
    BertModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

import sparsebp_cli as sbp
from sparsebp_cli.backward.kind.packing.verify import AGAIN
from sparsebp_cli.errors import UnsupportedError
from tests.backward.isolation.enumeration import enlarge
from tests.backward.token.test_every_decoder import tiny

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def make(kind: Any = LlamaForCausalLM, config: Any = LlamaConfig, **options: Any) -> Any:
    """Return a small model of large weights, whose attention matters."""
    torch.manual_seed(0)
    model = kind(config(**SIZES | options)).train()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def make_batch(seed: int = 1, lengths: tuple[int, ...] = (24, 19, 15, 21), side: str = "right") -> dict[str, Tensor]:
    """Return ids, mask and labels of a padded batch with masked prompts."""
    size = max(24, *lengths)
    ids = torch.randint(1, 64, (len(lengths), size), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, slice(length) if side == "right" else slice(size - length, None)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : size - min(lengths) + 3 if side == "left" else 5] = -100
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def gradient(model: nn.Module) -> Tensor:
    parts = [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()]
    model.zero_grad()
    return torch.cat(parts)


Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def without(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def distil(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**without(batch)).logits
    teacher = torch.linspace(-1, 1, 64).expand_as(logits).softmax(-1)
    return functional.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean")


def distil_real(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**without(batch)).logits
    teacher = torch.linspace(-1, 1, 64).expand_as(logits).softmax(-1)
    each = functional.kl_div(logits.log_softmax(-1), teacher, reduction="none").sum(-1)
    return (each * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


def regularised(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**without(batch)).logits
    return cross_entropy(logits, batch["labels"]) + 0.01 * logits.logsumexp(-1).square().mean()


def pool(model: Any, batch: dict[str, Tensor]) -> Tensor:
    hidden: Tensor = model(**without(batch)).last_hidden_state
    return hidden.mean(1).square().sum()


def pool_real(model: Any, batch: dict[str, Tensor]) -> Tensor:
    hidden, mask = model(**without(batch)).last_hidden_state, batch["attention_mask"][..., None]
    return ((hidden * mask).sum(1) / mask.sum(1)).square().sum()


@pytest.mark.parametrize(
    ("kind", "config", "loss"),
    [
        (LlamaForCausalLM, LlamaConfig, distil),
        (LlamaForCausalLM, LlamaConfig, regularised),
        (LlamaModel, LlamaConfig, pool),
        (BertModel, BertConfig, pool),
    ],
)
@pytest.mark.parametrize("verify", ["first", "never"])
def test_a_loss_that_reads_padding_is_refused_before_the_update(
    kind: Any, config: Any, loss: Loss, verify: str
) -> None:
    model = make(kind, config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    before = [parameter.clone() for parameter in model.parameters()]
    with sbp.attach(model, sbp.make_policy("lossless", verify=verify)) as engine:
        found = loss(model, make_batch())
        with pytest.raises(UnsupportedError, match="positions that the policy skipped"):
            engine.backward(found)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "config", "loss"),
    [
        (LlamaForCausalLM, LlamaConfig, distil_real),
        (LlamaModel, LlamaConfig, pool_real),
        (BertModel, BertConfig, pool_real),
    ],
)
def test_the_same_loss_over_what_is_there_has_the_gradient_of_the_plain_step(
    kind: Any, config: Any, loss: Loss
) -> None:
    model, batch = make(kind, config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), make_batch()
    loss(model, batch).backward()
    expected = gradient(model)
    with sbp.attach(model, "lossless") as engine:
        engine.backward(loss(model, batch))
        assert "packing" in engine.notes
        assert "1 of 1 batches" in engine.notes["packing"]
    assert (gradient(model) - expected).norm() <= 1e-5 * expected.norm()


def test_labels_that_are_not_those_of_the_loss_are_refused() -> None:
    model, batch = make(), make_batch()
    with sbp.attach(model, "lossless") as engine:
        engine.columns(labels=batch["labels"])
        logits = model(**without(batch)).logits
        other = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with pytest.raises(UnsupportedError, match="or pass no labels to the forward"):
            engine.backward(cross_entropy(logits, other))


def test_a_hook_inside_of_the_packed_layers_is_named_and_the_step_is_plain() -> None:
    model, batch = make(), make_batch()
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    def run() -> Tensor:
        seen.clear()
        loss: Tensor = model(**batch).loss + seen[0].square().mean()
        return loss

    handle = model.model.layers[0].register_forward_hook(keep)
    run().backward()
    expected = gradient(model)
    with sbp.attach(model, "lossless") as engine:
        engine.backward(run())
        assert torch.allclose(gradient(model), expected)
        assert "a hook of the script (" in engine.notes["packing"]
        assert "at 'model.layers.0') would not get the whole batch: lossless is off" in engine.notes["packing"]
    handle.remove()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("verify", ["never", "first"])
def test_an_adapter_that_begins_at_a_token_of_each_example_runs_plainly(verify: str) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    config = LoraConfig(r=2, alora_invocation_tokens=[7], init_lora_weights=False, **options)
    model, batch = get_peft_model(make(), config), make_batch(lengths=(20,))
    batch["input_ids"][0, 9] = 7
    padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    batch = {name: functional.pad(value, (0, 4), value=padding[name]) for name, value in batch.items()}
    model(**batch).loss.backward()
    expected = gradient(model)
    with sbp.attach(model, sbp.make_policy("lossless", verify=verify)) as engine:
        engine.backward(model(**batch).loss)
        assert torch.allclose(gradient(model), expected)
        assert "a hook of peft (" in engine.notes["packing"]


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_inside_of_packed_layers_gets_the_plain_steps_gradients(register: str) -> None:
    model, batch = make(), make_batch()

    def bound(_module: nn.Module, *gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else one / one.norm() for one in gradients[0])

    getattr(model.model.layers[0].mlp, register)(bound)
    model(**batch).loss.backward()
    expected = gradient(model)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        engine.backward(model(**batch).loss)
        assert torch.allclose(gradient(model), expected)
        assert "at 'model.layers.0.mlp') would not get the whole batch: lossless is off" in engine.notes["packing"]


def test_unread_logits_say_how_to_read_them() -> None:
    model = make()
    with sbp.attach(model, "lossless"), pytest.raises(AttributeError, match="read output"):
        dict(model(**make_batch()).items())["logits"].shape  # noqa: B018 - what a script would do


def test_a_forward_that_was_never_packed_says_so() -> None:
    model, batch = make(), make_batch()
    with sbp.attach(model, "lossless") as engine:
        for _ in range(2):
            hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            engine.backward(model.lm_head(hidden.last_hidden_state).square().mean())
        assert "no training batch went through LlamaForCausalLM" in "".join(engine.report().notes)
        engine.backward(model(**batch).loss)
        assert "in 1 of 1 batches" in engine.notes["packing"]


def test_a_model_in_eval_mode_says_to_call_train() -> None:
    model, batch = make().eval(), make_batch()
    with sbp.attach(model, "lossless") as engine:
        engine.backward(model(**batch).loss)
        assert "call model.train()" in engine.notes["packing"]
        model.train()
        engine.backward(model(**batch).loss)
        assert "in 1 of 1 batches" in engine.notes["packing"]


def test_facts_of_a_later_batch_are_not_those_of_the_first() -> None:
    """Each second batch was silently wrong while the first had been compared."""
    right = make_batch(lengths=(24, 20, 16, 22))
    gap = make_batch(2, (24, 20, 16, 22))
    gap["attention_mask"][1, 8:12] = 0
    numbers = (gap["attention_mask"].cumsum(1) - 1).clamp_min(0)
    jumps = torch.arange(24).expand(4, 24) + 8 * (torch.arange(24) > 10)
    hole = make_batch(3, (24, 20, 16, 22))
    hole["attention_mask"][:, 9:11] = 0
    hole["labels"][:, 11] = hole["input_ids"][:, 11]
    long = make_batch(4, (100, 90, 80, 70))
    wide = {name: functional.pad(value, (0, 60), value=-100 if name == "labels" else 0) for name, value in long.items()}
    window: dict[str, Any] = {"kind": MistralForCausalLM, "config": MistralConfig, "sliding_window": 6}
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_type": "longrope", "rope_theta": 10000.0}
    phi: dict[str, Any] = {
        "kind": Phi3ForCausalLM,
        "config": Phi3Config,
        "original_max_position_embeddings": 128,
        "rope_scaling": factors | {"original_max_position_embeddings": 128},
    }
    for model, first, second in (
        (make(**window), right, gap | {"position_ids": numbers}),
        (make(**window), right, right | {"position_ids": jumps}),
        (make(), right, hole),
        (make(**phi), long, wide),
    ):
        model(**second).loss.backward()
        expected = gradient(model)
        with sbp.attach(model, "lossless") as engine:
            for batch in (first, second):
                model.zero_grad()
                engine.backward(model(**batch).loss)
            assert (gradient(model) - expected).norm() <= 1e-4 * expected.norm(), type(model).__name__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_row_among_many_is_noticed_in_every_dtype(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm over everything hides it: a wrong mask is one row of many."""
    from sparsebp_cli.backward.kind.packing import layout

    model = make().to(dtype)
    batch = make_batch(lengths=(24,) * 15 + (20,))
    with sbp.attach(model, "lossless") as engine:
        engine.backward(model(**batch).loss)
        assert "ran without lossless" not in engine.notes["packing"]
    arrange = layout.arrange_segments

    def wrong(*args: Any, **kwargs: Any) -> Any:
        made = arrange(*args, **kwargs)
        made.position_N[-5] += 3  # of one row
        return made

    monkeypatch.setattr(layout, "arrange_segments", wrong)
    with sbp.attach(model, "lossless") as engine:
        engine.backward(model(**batch).loss)
        assert "; 1 batches ran without lossless: " in engine.notes["packing"]


def test_what_requires_a_gradient_is_compared_inputs_included() -> None:
    model, batch = make(), make_batch()
    model.requires_grad_(False)
    table = nn.Embedding(64, 32)

    def run() -> Tensor:
        loss: Tensor = model(
            inputs_embeds=table(batch["input_ids"]), attention_mask=batch["attention_mask"], labels=batch["labels"]
        ).loss
        return loss

    run().backward()
    expected = gradient(table)
    with sbp.attach(model, "lossless") as engine:
        engine.backward(run())
        assert "in 1 of these batches" in engine.notes["packing"]
    assert (gradient(table) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize(
    ("kind", "config"),
    [(GptOssForCausalLM, GptOssConfig), (OPTForCausalLM, OPTConfig), (AfmoeForCausalLM, AfmoeConfig)],
)
def test_where_the_plain_step_mixes_examples_the_packed_one_is_used_and_named(
    kind: Any, config: Any, start: int
) -> None:
    """The masks of these do not know that position numbers restart: transformers builds them without."""
    model, size = cast("Any", tiny(config, kind)), 20
    enlarge(model)
    ids = torch.randint(1, 64, (1, 36), generator=torch.Generator().manual_seed(5))
    positions = start + torch.cat([torch.arange(size), torch.arange(36 - size)])[None]
    labels = ids.clone()
    labels[:, size] = -100
    for part in (slice(size), slice(size, None)):
        logits = model(input_ids=ids[:, part], position_ids=positions[:, part], use_cache=False).logits
        (functional.cross_entropy(logits[0, :-1], ids[0, part][1:], reduction="sum") / 34).backward()
    expected = gradient(model)
    with sbp.attach(model, "lossless") as engine:
        engine.backward(model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss)
        assert "the ordinary step is wrong: its outputs differ" in engine.notes["packing"]
    assert (gradient(model) - expected).norm() <= 1e-5 * expected.norm()


def test_a_comparison_costs_a_plain_and_a_packed_step() -> None:
    """Counted by PyTorch, which sees both passes; one of 200 known batches is compared."""

    model, batch = make(), make_batch()

    def count(run: Callable[[], object]) -> int:
        run()  # at the first batch it is tried whether the last layer may run fewer rows
        with FlopCounterMode(display=False) as counter:
            run()
        return int(counter.get_total_flops())

    def count_lossless(verify: str) -> int:
        with sbp.attach(model, sbp.make_policy("lossless", verify=verify)) as engine:
            return count(lambda: engine.backward(model(**batch).loss))

    def step() -> None:
        model(**batch).loss.backward()

    plain = count(step)
    packed, compared = count_lossless("never"), count_lossless("always")
    assert packed < plain
    assert compared == plain + 2 * packed
    assert AGAIN * (plain + packed) < 0.01 * plain
    drawn = sum(random.Random(number).random() < AGAIN for number in range(1, 1000))
    assert drawn == 5  # and the first: what the guide says of 1,000 steps
