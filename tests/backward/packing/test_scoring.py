"""Forwards without a gradient: what each example alone computes, for less; and all others as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sparsebp_cli as sbp
from sparsebp_cli.backward.kind.packing import forward as forward_module
from sparsebp_cli.backward.kind.packing.extension import PackingExtension
from sparsebp_cli.errors import UnsupportedError, UsageError
from tests.backward.conftest import filled_cache, tiny_model
from tests.memory.flat import gathered

from .case import IGNORED, LIMIT, error, gradients, make_batch, make_pair_batch
from .test_every_pair import bart, t5

WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": WITHOUT_DROPOUT, "qwen3": {}, "gemma2": {}}
ARRANGEMENTS = (("right", "completion", "groups"), ("left", "dense", "tree"))
NOTE, OF_REFERENCE = "packing without a gradient", "packing of the reference"


def counted(run: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a forward without a gradient returns, and its FLOPs."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = run()
    return output, counter.get_total_flops()


def without_labels(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"} | {"use_cache": False}


def is_read(batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:] != IGNORED


def alone(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The logits of each example, run by itself without padding and mask."""
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    with torch.no_grad():
        return [model(input_ids=ids[real][None], use_cache=False).logits[0] for ids, real in rows]


def loss_of(logits: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    labels = [row[real] for row, real in zip(batch["labels"], batch["attention_mask"].bool(), strict=True)]
    sums = [
        nn.functional.cross_entropy(one[:-1].float(), own[1:], ignore_index=IGNORED, reduction="sum")
        for one, own in zip(logits, labels, strict=True)
    ]
    return torch.stack(sums).sum() / sum(int((own[1:] != IGNORED).sum()) for own in labels)


@pytest.mark.parametrize(("family", "dtype"), [*((f, torch.float32) for f in FAMILIES), ("gemma2", torch.bfloat16)])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=" ".join)
def test_the_loss_is_that_of_each_example_alone(
    arrangement: tuple[str, str, str], family: str, dtype: torch.dtype
) -> None:
    model, batch = tiny_model(family, **FAMILIES[family]).to(dtype).eval(), make_batch(*arrangement)
    if arrangement[0] == "left":  # the first token of a text is no target
        batch["labels"][torch.arange(6), batch["attention_mask"].argmax(1)] = IGNORED
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)  # a table would count padding
    wanted = loss_of(alone(model, batch), batch)
    plain, dense = counted(lambda: model(**batch).loss)
    with sbp.attach(model, "lossless") as engine:
        outputs = [counted(lambda: model(**batch).loss) for _ in range(2)]
    limit = 1e-6 if dtype is torch.float32 else 1e-2
    for loss, _ in outputs:
        assert abs(float(loss / wanted) - 1) < limit
        assert abs(float(loss / plain) - 1) < limit
    assert outputs[1][1] < 0.8 * dense
    assert "outputs compared with the ordinary ones in 1 of these" in engine.notes[NOTE]
    assert "packing" in engine.notes


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=" ".join)
def test_logits_of_declared_labels_are_those_of_each_example_alone(arrangement: tuple[str, str, str]) -> None:
    model, batch = tiny_model("llama").eval(), make_batch(*arrangement)
    wanted, read, real = alone(model, batch), is_read(batch), batch["attention_mask"].bool()
    with sbp.attach(model, "lossless") as engine, engine.scoring(batch["labels"]):
        given = without_labels(batch)
        (logits, _), (again, flops) = (counted(lambda: model(**given).logits) for _ in range(2))
    assert torch.equal(logits, again)
    assert not logits[~read].any()
    for number in range(len(wanted)):
        rows = (read & real)[number][real[number]]
        torch.testing.assert_close(logits[number][read[number] & real[number]], wanted[number][rows])
    assert flops < 0.8 * counted(lambda: model(**given))[1]


@pytest.mark.parametrize("make", [bart, t5])
def test_an_encoder_and_a_decoder_score_as_before(make: Callable[[], Any]) -> None:
    model, batch = make().eval(), make_pair_batch("right", "completion", "groups")
    plain, dense = counted(lambda: model(**batch))
    with sbp.attach(model, "lossless") as engine:
        (first, _), (output, flops) = (counted(lambda: model(**batch)) for _ in range(2))
        assert abs(float(output.loss / plain.loss) - 1) < 1e-6
        assert torch.equal(first.loss, output.loss)
        torch.testing.assert_close(output.encoder_last_hidden_state, plain.encoder_last_hidden_state)
    assert flops < 0.8 * dense
    assert "outputs compared" in engine.notes[NOTE]


def test_a_reference_takes_the_layout_of_the_model_and_is_given_back() -> None:
    model, reference, batch = (
        tiny_model("llama"),
        tiny_model("llama").eval(),
        make_batch("right", "completion", "pairs"),
    )
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.1)
    wanted, before = loss_of(alone(reference, batch), batch), dict(vars(reference))
    with sbp.attach(model, "lossless", reference=reference) as engine:
        for _ in range(2):
            engine.backward(model(**batch).loss)
            found, flops = counted(lambda: reference(**batch).loss)
        assert abs(float(found / wanted) - 1) < 1e-6
        packing = engine.extensions[0]
        assert isinstance(packing, PackingExtension)
        assert packing.layouts.reused == 3
        reference.train()
        assert reference(**batch).loss.requires_grad  # as it was
        reference.eval()
        with engine.disabled():
            assert counted(lambda: reference(**batch))[1] > 1.3 * flops
    assert "in 2 of 2 batches" in engine.notes[OF_REFERENCE]
    assert vars(reference) == before


def test_a_reference_that_is_the_model_is_refused_and_one_that_mixes_is_plain() -> None:
    model = tiny_model("llama")
    with pytest.raises(UsageError, match="reference must not be the trained model"):
        sbp.attach(model, "lossless", reference=model)
    with sbp.attach(model, "lossless", reference=nn.Linear(2, 2)) as engine:
        assert engine.notes[OF_REFERENCE].startswith("the reference model runs without lossless: lossless needs")
    with pytest.raises(UsageError, match="no policy uses a reference"):
        sbp.attach(model, "dense", reference=tiny_model("llama"))


def test_what_does_not_say_what_it_reads_is_left_as_it_is() -> None:
    model, batch = tiny_model("llama").eval(), make_batch("left", "completion", "groups")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = filled_cache(model, ids[:, :4])

    def runs() -> list[Tensor]:
        with torch.no_grad():
            made = [
                model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, use_cache=u) for u in (0, 1)
            ]
            kept = model(ids, attention_mask=mask, labels=batch["labels"], use_cache=True)
            return [
                *made,
                model(ids, attention_mask=mask).logits,
                model(ids, attention_mask=mask)[0],
                kept.logits,
                kept.loss,
            ]

    plain = runs()
    with sbp.attach(model, "lossless") as engine:
        assert all(torch.equal(one, other) for one, other in zip(plain, runs(), strict=True))
        with torch.no_grad(), engine.scoring():
            assert model(ids[:, 4:], use_cache=True, **cache).logits.shape[1] == ids.shape[1] - 4
        assert NOTE not in engine.notes


@pytest.mark.parametrize(
    "read",
    [
        lambda output: output.logits,
        lambda output: output["logits"],
        lambda output: output[1],
        lambda output: output.to_tuple()[1],
        lambda output: torch.stack([value for name, value in output.items() if name == "logits"])[0],
        lambda output: dict(output)["logits"].clone(),
    ],
)
def test_logits_that_are_read_are_plain_and_so_are_later_forwards(read: Callable[[Any], Tensor]) -> None:
    model, batch = tiny_model("llama").eval(), make_batch("right", "completion", "none")
    with torch.no_grad():
        plain = model(**batch)
    with sbp.attach(model, [sbp.make_policy("lossless", verify="never")]) as engine, torch.no_grad():
        assert torch.equal(read(model(**batch)), plain.logits)
        assert "reads outputs besides the loss" in engine.notes[NOTE]
        assert torch.equal(model(**batch).loss, plain.loss)
        with engine.scoring():
            assert not torch.equal(model(**batch).logits, plain.logits)


def test_logits_read_after_an_update_are_refused() -> None:
    model, batch = tiny_model("llama").eval(), make_batch("right", "completion", "none")
    with sbp.attach(model, "lossless"), torch.no_grad():
        output = model(**batch)
        next(model.parameters()).mul_(0.5)
        with pytest.raises(UnsupportedError, match=r"read outputs before optimizer\.step"):
            _ = output.logits


@pytest.mark.parametrize("declared", [False, True])
def test_one_wrong_row_is_noticed(monkeypatch: pytest.MonkeyPatch, *, declared: bool) -> None:
    model, batch = tiny_model("llama").eval(), make_batch("right", "dense", "groups")
    right = forward_module.spread_logits

    def wrong(*args: Any) -> Tensor:
        logits = right(*args)
        logits[2, 7] = logits[2, 8]
        return logits

    monkeypatch.setattr(forward_module, "spread_logits", wrong)
    with torch.no_grad():
        plain = model(**batch)
        with sbp.attach(model, "lossless") as engine, engine.scoring(reads="labels" if declared else "loss"):
            assert torch.equal(model(**batch).loss, plain.loss)
            assert torch.equal(model(**batch).loss, plain.loss)  # batches of this kind are run plainly from here on
        assert "2 batches ran without lossless: under lossless, outputs differ" in engine.notes[NOTE]


def test_outputs_that_are_wrong_in_all_rows_alike_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model("llama").eval(), make_batch("right", "dense", "groups")
    right = forward_module.spread_logits
    monkeypatch.setattr(forward_module, "spread_logits", lambda *args: right(*args) * 1.5)
    with torch.no_grad():
        plain = model(**batch)
        with sbp.attach(model, "lossless") as engine, engine.scoring(reads="labels"):
            assert torch.equal(model(**batch).logits, plain.logits)
        assert "under lossless, outputs differ" in engine.notes[NOTE]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_a_model_without_its_adapters_is_compared_anew() -> None:
    import peft

    adapters = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj"])
    model, batch = peft.get_peft_model(tiny_model("llama"), adapters), make_batch("right", "completion", "groups")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        own = model(**batch).loss
        with model.disable_adapter():
            base = model(**batch).loss
    assert abs(float(own / base) - 1) > 1e-4
    with sbp.attach(model, "lossless") as engine, torch.no_grad():
        for _ in range(2):
            assert abs(float(model(**batch).loss / own) - 1) < 1e-6
            with model.disable_adapter():
                assert abs(float(model(**batch).loss / base) - 1) < 1e-6
        assert "in 2 of these batches" in engine.notes[NOTE]


def test_the_output_does_not_depend_on_a_comparison() -> None:
    model, batch = tiny_model("llama").eval(), make_batch("right", "completion", "tree")
    found = []
    for verify in ("never", "always"):
        with sbp.attach(model, [sbp.make_policy("lossless", verify=verify)]), torch.no_grad():
            found.append(model(**batch).loss)
    assert torch.equal(*found)


def test_nothing_is_gathered_over_forwards_of_changing_shapes() -> None:
    model, reference, seen = tiny_model("llama"), tiny_model("llama").eval(), []
    with sbp.attach(model, "lossless", reference=reference) as engine:
        for step in range(60):
            ids = torch.randint(3, 60, (3, 8 + step % 5), generator=torch.Generator().manual_seed(step))
            labels = ids.masked_fill(torch.arange(ids.shape[1]) < 3, IGNORED)
            with torch.no_grad():
                model(ids, labels=labels)
                reference(ids, labels=labels)
                with engine.scoring(labels):
                    model(ids)
            engine.columns(labels=labels, example_weight=torch.tensor([1.0, 0.0, 1.0]))
            engine.backward(model(ids).logits[:, 2:-1].logsumexp(-1).mean(1) @ torch.tensor([1.0, 0.0, 1.0]))
            model.zero_grad()
            if step in (29, 59):
                del ids, labels
                seen.append(gathered())
    assert seen[0] == seen[1]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_scores_under_checkpointing_are_those_of_the_forward_with_a_gradient() -> None:
    model = tiny_model("llama").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 30, (2, 24), generator=generator)
    positions = torch.stack([torch.randperm(60, generator=generator)[:24].sort().values for _ in range(2)])
    labels = ids.masked_fill(torch.arange(24) >= 20, IGNORED)
    exact = model(input_ids=ids, position_ids=positions).logits.detach()
    with torch.no_grad(), sbp.attach(model, "lossless") as engine, engine.scoring(labels):
        found = model(input_ids=ids, position_ids=positions).logits
    torch.testing.assert_close(found[:, :19], exact[:, :19])  # masks of the plain forward differ without a gradient
    assert "the ordinary step is wrong" in engine.notes[NOTE]


def test_torch_func_over_a_packed_model_is_refused_by_name() -> None:
    model = tiny_model("llama").train()
    ids = torch.randint(3, 30, (2, 12), generator=torch.Generator().manual_seed(0))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(model, weights, kwargs={"input_ids": ids, "labels": ids}).loss
        return found

    with sbp.attach(model, "lossless") as engine:
        with pytest.raises(UnsupportedError, match=r"torch.func .* on a model with lossless is not supported"):
            torch.func.grad(loss)(weights)
        with engine.disabled():
            assert torch.func.grad(loss)(weights).keys() == weights.keys()


@pytest.mark.parametrize("has_gradient", [False, True])
def test_norms_and_angles_in_float32_are_rounding_in_a_model_of_float64(*, has_gradient: bool) -> None:
    model, batch = tiny_model("llama").double().train(), make_batch("right", "completion", "groups")
    with (
        sbp.attach(model, sbp.make_policy("lossless", verify="always")) as engine,
        torch.set_grad_enabled(has_gradient),
    ):
        for _ in range(3):
            model(**batch)
    note = engine.notes["packing" if has_gradient else NOTE]
    assert "in 3 of 3 batches" in note
    assert "plainly" not in note


@pytest.mark.parametrize("labels", ["completion", "scattered"])
def test_a_batch_is_trained_after_an_evaluation_in_inference_mode(labels: str) -> None:
    model, batch = tiny_model("llama"), make_batch("right", labels, "tree")
    expected = gradients(model, None, batch)[1]
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        with torch.inference_mode():
            model(**batch)
        assert error(expected, gradients(model, engine, batch)[1]) < LIMIT
