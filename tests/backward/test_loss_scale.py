"""Under a loss scaler, what policies keep and observe is that of the training without one, whatever the scale does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward.core.loss_scale import ScaleFinder, remove_scale
from sparsebp_cli.errors import SparseBPError, UnsupportedError
from sparsebp_cli.policy import FoundPolicy, Measure, ReadTokens, ScoredTokenSelector, Stateful, make_policy
from sparsebp_cli.policy.discovery import make_policies
from tests.backward.families import tiny_decoder
from tests.backward.test_policy_state import Momentum
from tests.guess import guess_required, guess_values
from tests.plugin import find_ours

NUM_STEPS = 6
# Batches whose loss is infinite, none before trial passes: a scaler drops their steps, and the oracle lacks them.
OVERFLOWS = (1, 2, 5)


NAMED: dict[str, Any] = {
    "vcas": {"name": "vcas", "every": 2},
    "dropbp": {"name": "dropbp", "keep": 0.5, "sensitivity_at": 0.0},
    "gact": {"name": "gact", "adapt_interval": 4, "group": 8},
    "subnet": {"name": "subnet", "keep": 0.25},
    "grades": {"name": "grades", "threshold": 0.9, "relative": True, "grace": 0.4},
    "importance": {"name": "importance", "keep": 0.5, "threshold": 0.0},  # whose norms are of a gradient at the logits
}


def _find_observing(name: str, found: FoundPolicy) -> dict[str, Any] | None:
    """Return a policy, with the first option that makes it keep a state from gradients; None if there is none."""
    if found.policy_class is None or not issubclass(found.policy_class, Stateful):
        return None
    schemas, required = found.policy_class.model_json_schema().get("properties", {}), guess_required(found.policy_class)
    single = [{option: value} for option, schema in schemas.items() for value in guess_values(option, schema)]
    for more in ({}, *single):
        with suppress(SparseBPError):
            policy = make_policy(name, **required | more)
            if isinstance(policy, Stateful) and any(observed.is_gradient for observed in policy.observes):
                return {"name": name, **required, **more}
    return None


FOUND = {name: _find_observing(name, found) for name, found in find_ours().items() if name not in NAMED}
POLICIES: dict[str, Any] = {"momentum": Momentum(), **NAMED, **{name: one for name, one in FOUND.items() if one}}


def _batch(number: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


def _train(policy: Any, *, scaled: bool, inside: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Train, and return model and state. ``inside`` scales in the function that runs the pass."""
    model = tiny_decoder("llama", vocab_size=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
    engine, seen = sbp.attach(model, policy, optimizer=optimizer, num_steps=NUM_STEPS), set[float]()
    for number in range(NUM_STEPS + len(OVERFLOWS)):
        if number in OVERFLOWS and not scaled:
            continue
        losses = [partial(_loss, model, number), partial(_loss, model, 100 + number)]
        scales: Callable[[Tensor], Tensor] = scaler.scale if not inside else lambda loss: loss
        differentiate = (lambda loss, **given: scaler.scale(loss).backward(**given)) if inside else None
        if engine.trials_are_due():
            forward, other = (partial(_scaled, scales, loss) for loss in losses)
            engine.run_trials(forward, differentiate, others=[other])
        loss = losses[0]()
        engine.backward(scales(loss * float("inf") if number in OVERFLOWS else loss), differentiate)
        scaler.step(optimizer)
        scaler.update()
        seen.add(scaler.get_scale())
        optimizer.zero_grad()
        engine.state_dict()  # as a checkpoint after each step
    assert seen == ({256.0, 512.0, 1024.0} if scaled else {1.0}), "it has risen and fallen"
    state = engine.state_dict()
    engine.detach()
    return model, state


def _scaled(scales: Callable[[Tensor], Tensor], forward: Callable[[], Tensor]) -> Tensor:
    return scales(forward())


def _loss(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model(**_batch(number)).loss
    return loss


def _tensors(state: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(state, dict):
        return {key: value for part, inner in state.items() for key, value in _tensors(inner, f"{name}/{part}").items()}
    return {name: state if isinstance(state, Tensor) else torch.tensor(float(state))}


CASES = [(name, False) for name in POLICIES] + [("momentum", True), ("dropbp", True)]


@pytest.mark.parametrize(("name", "inside"), CASES)
def test_a_scale_that_moves_and_overflows_changes_no_state(name: str, inside: bool) -> None:
    plain, expected = _train(POLICIES[name], scaled=False)
    model, state = _train(POLICIES[name], scaled=True, inside=inside)
    for (parameter, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7, msg=lambda m, p=parameter: f"{p}: {m}")
    mine, theirs = _tensors(state), _tensors(expected)
    assert mine.keys() == theirs.keys()
    assert all(tensor.isfinite().all() for tensor in mine.values())
    for key, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-4, atol=1e-7, msg=lambda m, k=key: f"{k}: {m}")


def test_every_policy_that_is_tried_under_a_scaler_observes_a_gradient() -> None:
    made = {name: make_policies(policy)[0] for name, policy in POLICIES.items() if isinstance(policy, dict)}
    observes = {name: policy.observes for name, policy in made.items() if isinstance(policy, Stateful)}
    seen = {name for name, found in observes.items() if any(observed.is_gradient for observed in found)}
    assert seen | {"importance", "momentum"} == POLICIES.keys()


def test_what_is_kept_has_no_scale_and_nothing_that_is_not_finite() -> None:
    kept = remove_scale(torch.tensor([1.5, float("nan"), float("-inf")], dtype=torch.float16), torch.tensor(2.0**20))
    assert kept.dtype == torch.float32  # float16 has no 1.4e-6
    assert torch.equal(kept, torch.tensor([1.5 * 2.0**-20, 0.0, 0.0]))


def test_a_scale_that_the_script_multiplies_by_itself_is_given() -> None:
    gradients = []
    for scales in ((1.0, 1.0, 1.0), (1024.0, 512.0, 2048.0)):
        model = tiny_decoder("llama", vocab_size=64)
        engine = sbp.attach(model, POLICIES["momentum"])
        for number, scale in enumerate(scales):
            model.zero_grad()
            engine.backward(_loss(model, number) * scale, loss_scale=scale)
        gradients.append(torch.cat([p.grad.flatten() / scales[-1] for p in model.parameters() if p.grad is not None]))
        engine.detach()
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("number", [1024, 1024.0])
def test_a_loss_that_seems_to_be_scaled_by_hand_is_noted(number: float) -> None:
    def notes(factor: float, policy: Any = POLICIES["momentum"], **given: float) -> dict[str, str]:
        model = tiny_decoder("llama", vocab_size=64)
        with sbp.attach(model, policy) as engine:
            engine.backward(_loss(model, 0) * factor, **given)
            return engine.notes

    assert "call engine.backward(loss * 1024, loss_scale=1024)" in notes(number)["loss scale"]
    assert "loss scale" not in notes(number, loss_scale=number)
    assert "loss scale" not in notes(number, {"name": "topk", "keep": 0.5})  # it keeps nothing
    for weight in (0.25, 3.0, 8.0, 100.0):
        assert "loss scale" not in notes(weight)


def test_only_a_scaler_is_taken_for_one() -> None:
    finder, weight = ScaleFinder(), torch.ones(3, requires_grad=True)
    scaler, own, loss = torch.amp.GradScaler("cpu", init_scale=8.0), torch.tensor(8.0), weight.sum()
    assert all(finder.find(other) is None for other in (loss, loss * 8.0, loss * own, own * loss * torch.tensor(0.5)))
    for scaled in (scaler.scale(loss), scaler.scale(loss) / 4, scaler.scale(loss * own), scaler.scale(loss) + loss):
        found = finder.find(scaled)
        assert found is not None
        assert float(found) == 8.0
    for _ in range(100):
        assert finder.find(loss * torch.tensor(0.5)) is None
    later = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert [finder.find(later.scale(loss)) for _ in range(2)][1] == 4.0


@pytest.mark.parametrize("form", ["before", "inside", "given"])
def test_an_eager_update_of_a_scaled_loss_is_refused_before_it_changes_a_weight(form: str) -> None:
    model = tiny_decoder("llama", vocab_size=64)
    before = [parameter.clone() for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    engine = sbp.attach(model, [], optimizer=torch.optim.SGD(model.parameters(), 0.1), update="eager")
    backward: dict[str, Callable[[Tensor], None]] = {
        "before": lambda loss: engine.backward(scaler.scale(loss)),
        "inside": lambda loss: engine.backward(loss, lambda root, **given: scaler.scale(root).backward(**given)),
        "given": lambda loss: engine.backward(loss * 8.0, loss_scale=8.0),
    }
    with pytest.raises(UnsupportedError, match="update='eager' with a GradScaler is not supported"):
        backward[form](_loss(model, 0))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))


def _train_half(policy: Any, *, overflow: int | None = None) -> tuple[nn.Module, list[float]]:
    """Train in float16 by autocast under a scaler, two micro-batches of padded rows a step, with clipping."""
    model = tiny_decoder("llama", vocab_size=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    engine = sbp.attach(model, policy, optimizer=optimizer) if policy is not None else None
    norms = []
    for number in range(4):
        for part in range(2):
            batch = _batch(10 * number + part)
            mask = torch.ones_like(batch["input_ids"])
            mask[: 2 + part, 5:] = 0
            with torch.autocast("cpu", torch.float16):
                given = batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
                loss = model(**given).loss / 2
            scaled = scaler.scale(loss * (float("inf") if number == overflow else 1.0))
            engine.backward(scaled, is_last=part == 1) if engine is not None else scaled.backward()
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if engine is not None:
        engine.detach()
    return model, norms


@pytest.mark.parametrize("overflow", [None, 1])
def test_lossless_in_float16_with_accumulation_updates_as_dense_does(
    overflow: int | None,
) -> None:
    """The oracle is PyTorch's own loop. A gradient that kept the scale would be 1,024 times as long."""
    plain, norms = _train_half(None, overflow=overflow)
    model, mine = _train_half("lossless", overflow=overflow)
    start = tiny_decoder("llama", vocab_size=64)
    for (name, one), two, first in zip(model.named_parameters(), plain.parameters(), start.parameters(), strict=True):
        moved = float((two - first).detach().abs().max())
        assert moved > 0.0, name
        torch.testing.assert_close(one, two, rtol=0, atol=max(0.02 * moved, 1e-6), msg=lambda m, p=name: f"{p}: {m}")
    finite = [number for number in range(4) if number != overflow]
    assert [mine[n] for n in finite] == pytest.approx([norms[n] for n in finite], rel=0.01)


class Counting(Stateful, ScoredTokenSelector):
    """Counts the targets of all forwards of a step."""

    unbiased = property(lambda _: False)
    needs = property(lambda _: frozenset({"loss"}))
    observes = property(lambda _: frozenset({ReadTokens}))

    def init(self, places: Any, /) -> dict[str, Any]:
        return {"found": torch.zeros(9), "steps": 0}

    def measure(self, seen: Any, step: Any) -> dict[str, Measure]:
        return {"targets": Measure(seen.tokens.target_BT.sum().float(), fold="sum")}

    def observe(self, state: Any, observation: Any, step: Any) -> dict[str, Any]:
        found = state["found"].clone()
        found[state["steps"]] = sum(observation["targets"].values())
        return {"found": found, "steps": state["steps"] + 1}

    def score_tokens(self, tokens: Any, step: Any) -> Tensor:
        scores: Tensor = tokens.scores["loss"]
        return scores


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dropped", [0, 1])
def test_a_dropped_step_leaves_nothing_of_its_forwards(fused: bool, dropped: int) -> None:
    model = tiny_decoder("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with sbp.attach(model, [Counting(keep=0.5)], optimizer=optimizer) as engine:
        for number in range(4):
            for _ in range(2):
                loss = model(**_batch(0)).loss * (float("inf") if number == dropped else 1.0)
                engine.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        state = engine.state_dict()
    assert state["index"] == 3
    values = {name.rpartition("/")[2]: value for name, value in state["policy_state"].items()}
    assert values["steps"] == 3
    assert values["found"][:3].unique().numel() == 1
    assert values["found"][0] > 0
