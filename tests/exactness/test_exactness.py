"""The generator of comparisons draws every value, knows what is wrong, and makes it small.

``make chaos`` runs it for an hour (benchmarks/exactness.py); here is a short draw.
"""

from __future__ import annotations

import ast
import os
import time
from collections import Counter

import pytest
import torch

from sparsebp_cli.backward.kind.packing import layout
from tests.exactness.axis import AXES, Draw, is_possible, pairs_of
from tests.exactness.batch import DRAWN, make_batches
from tests.exactness.judge import OVER, Subject, judge
from tests.exactness.loss import LOSSES
from tests.exactness.shrink import shrink, write_script
from tests.exactness.step import Step

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers, peft and trl say of tiny models
PLAIN = {axis: values[0] for axis, values in AXES.items()}
MINUTES = float(os.environ.get("SPARSEBP_EXACTNESS_MINUTES", "1"))
EVERYWHERE = tuple(loss for loss in AXES["loss"] if loss.endswith("everywhere"))
# Ordinary trainings through every entry path: each is packed, and right.
ORDINARY: dict[str, dict[str, str]] = {
    "a loop": {"padding": "right", "labels": "completion"},
    "a loop, on the left": {"padding": "left", "positions": "counted", "prefixes": "shared"},
    "a whole update": {"accumulation": "update", "prefixes": "nested", "adapter": "lora"},
    "weights": {"loss": "token weights", "padding": "right", "policy": "always"},
    "two ranks": {"wrapper": "two ranks", "padding": "right"},
    "Trainer": {"entry": "PolicyTrainer", "padding": "left"},
    "callback": {"entry": "callback", "beside": "tokens"},
    "SFT": {"entry": "SFT"},
    "DPO": {"entry": "DPO"},
    "GRPO": {"entry": "GRPO"},
    "recipe": {"entry": "recipe"},
}


@pytest.mark.always("a loop", "a loop, on the left", "a whole update", "Trainer", "recipe")
@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_training_is_packed_and_right(name: str) -> None:
    outcomes = judge(Subject(PLAIN | ORDINARY[name], 3))
    assert [one.verdict for one in outcomes] == ["right"] * len(outcomes), outcomes


@pytest.mark.parametrize("loss", EVERYWHERE)
def test_a_loss_that_reads_what_was_not_computed_is_refused_or_right(loss: str) -> None:
    for changes in ({"padding": "right"}, {"labels": "completion"}):
        outcomes = judge(Subject(PLAIN | changes | {"loss": loss}, 5))
        made = [one for one in outcomes if one.text != OVER]
        assert made
        assert {one.verdict for one in made} <= {"right", "plain", "refused"}


@pytest.mark.slow
def test_a_short_draw_finds_nothing_wrong() -> None:
    draw, end = Draw(0, {"entry": ("attach",), "wrapper": ("none", "checkpointing", "scaler")}), 60 * MINUTES
    count, start, wrong = Counter[str](), time.monotonic(), []
    for number in range(10_000):
        if time.monotonic() - start > end and number > 10:
            break
        case = draw.next()
        outcomes = judge(Subject(case, number))
        count.update(one.verdict for one in outcomes)
        wrong += [(case, one.text) for one in outcomes if one.verdict == "wrong"]
    assert wrong == []
    assert count["right"] > 0


def test_the_draw_meets_every_value_and_prefers_pairs_that_met_least() -> None:
    draw = Draw(1)
    cases = [draw.next() for _ in range(1500)]
    assert all(is_possible(case) for case in cases)
    for axis, values in AXES.items():
        assert {case[axis] for case in cases} == set(values), axis
    chosen = ("adapter", "wrapper", "policy", "accumulation", "loss")
    met = {pair for case in cases for pair in pairs_of(case) if pair[0] in chosen and pair[2] in chosen}
    assert len(met) > 700
    assert set(AXES["loss"]) == LOSSES.keys()


def test_a_batch_has_what_was_drawn() -> None:
    case = PLAIN | {"padding": "left", "positions": "jumping", "labels": "others", "prefixes": "copies", "size": "long"}
    for batch in make_batches(case, 5, 3):
        assert not bool(batch["attention_mask"][:, 0].all())
        assert bool((batch["position_ids"].diff() > 0).all())
        real = batch["attention_mask"].bool()
        assert not torch.equal(batch["labels"][real], batch["input_ids"][real])
        assert bool((batch["labels"][~real] == -100).all())
    first, *_, last = make_batches(case | {"order": "plain first"}, 5, 3)
    assert "position_ids" not in first
    assert "position_ids" in last
    assert set(DRAWN) < set(AXES)


@pytest.mark.slow
def test_a_rank_that_refuses_is_a_refusal_of_both() -> None:
    drawn = {"wrapper": "two ranks", "policy": "never", "loss": "logits", "labels": "completion", "padding": "left"}
    kind = {"architecture": "XLMRobertaForCausalLM", "prefixes": "nested", "order": "plain first"}
    assert {outcome.verdict for outcome in judge(Subject(PLAIN | drawn | kind, 201))} == {"refused"}


def test_a_step_at_the_kink_of_relu_is_rounding_and_a_wrong_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [33, 48, 50, 39, 34, 11, 16, 52, 39, 26, 8, 28, 16, 39, 5, 41, 29, 42, 52, 45, 32, 51, 47, 14, 5]
    position = [*range(7), *range(6), *range(12)]
    batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids]), "position_ids": torch.tensor([position])}
    case = PLAIN | {"architecture": "OPTForCausalLM", "policy": "never"}
    assert [one.verdict for one in judge(Subject(case, 0, [[batch | {"use_cache": False}]]))] == ["right"]
    monkeypatch.setattr(layout, "arrange_segments", _arrange_wrong)
    assert [one.verdict for one in judge(Subject(case, 0, [[batch | {"use_cache": False}]]))] == ["wrong"]


def test_an_error_in_one_row_is_an_error() -> None:
    grad = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    other = grad.clone()
    other[7] *= 1.01
    assert Step(1.0, (grad,)).error(Step(1.0, (other,))) > 5e-3
    assert Step(1.0, (grad,)).error(Step(1.0, (grad * (1 + 1e-6),))) < 1e-5
    assert Step(1.0, (grad,)).error(Step(1.1, (grad,))) > 5e-2


_ARRANGED = layout.arrange_segments


def _arrange_wrong(*args: object, **kwargs: object) -> object:
    found = _ARRANGED(*args, **kwargs)  # type: ignore[arg-type]
    found.position_N[-1] += 3
    return found


@pytest.mark.slow
def test_a_wrong_position_is_found_made_small_and_written_as_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "arrange_segments", _arrange_wrong)
    drawn = {"policy": "never", "padding": "right", "labels": "others", "adapter": "frozen", "positions": "shifted"}
    subject = Subject(PLAIN | drawn, 2)
    smallest, text = [found for found in shrink(subject) if found][-1]
    assert "error" in text
    assert smallest.case["adapter"] == "none"
    sizes = [[batch["input_ids"].numel() for update in one.updates for batch in update] for one in (subject, smallest)]
    assert sum(sizes[1]) < sum(sizes[0]) / 3
    script = write_script(smallest, text)
    ast.parse(script)
    assert "tensor([[" in script
