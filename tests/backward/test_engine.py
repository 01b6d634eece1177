"""Attaching, stepping, probing, reporting and detaching."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Rows, Selection, Site, Step, choice
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.selector import Promises

from .conftest import tiny_model, tokens

ROWS = sbp.make_policy("random", keep=0.25, along="rows")
SEEN: list[tuple[str, Step]] = []


class Watcher(Promises):
    """Notes when and where it is asked; keeps the first row."""

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        SEEN.append((site.name, step))
        assert site.batch_shape == (5,)
        assert site.num_features == grad_NO.shape[1]
        return Rows(torch.zeros(1, dtype=torch.int64))


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _loss(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 20).view(5, 4)).square().mean()


@pytest.fixture(autouse=True)
def _forget() -> None:
    SEEN.clear()


def test_an_engine_counts_the_random_generators_that_policies_ask_for() -> None:
    for policy, draws in ((ROWS, True), (sbp.make_policy("topk", keep=0.5), False)):
        model = _network()
        engine = sbp.attach(model, policy)
        with engine.probing():
            engine.backward(_loss(model))
        assert (engine.num_draws > 0) is draws


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return super().forward(input) * 2


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"sites": "edges"}, UsageError, "sites: got 'edges', allowed: 'linears'"),
        ({"update": "eager"}, UsageError, "update='eager' needs the argument optimizer="),
        ({"segments": 4}, UsageError, r"segments must be a number from 1 to 3 \(the number of layers\) or a .* got 4"),
        ({"execution": "quick"}, UsageError, "execution: got 'quick', allowed: 'fast', 'reference'"),
        ({"policies": [ROWS, sbp.make_policy("dense")]}, UnsupportedError, "Random and Dense make the same decision"),
        ({"policies": ["topk"]}, PolicyError, "policy 'topk': keep: missing"),
        ({"exclude": ["3"]}, UsageError, "exclude: '3' matches no linear"),
        ({"exclude": ["lm_haed"], "model": "llama"}, UsageError, r"'lm_haed' matches no .*did you mean lm_head\?"),
        ({"model": nn.Tanh()}, UsageError, "Tanh has no linear layer that a policy can use"),
        (
            {"model": nn.Sequential(OwnLinear(2, 2))},
            UsageError,
            "no linear layer that a policy can use; not covered: 0",
        ),
        ({"optimizer": "adamw"}, UnsupportedError, "optimizer must be a torch.optim.Optimizer, got str"),
    ],
)
def test_what_is_not_built_is_refused_by_name_and_leaves_the_model(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    model = options.pop("model", _network())
    model = tiny_model(model) if isinstance(model, str) else model
    with pytest.raises(error, match=text):
        sbp.attach(model, options.pop("policies", [ROWS]), **options)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_an_attached_or_hooked_model_is_refused_by_name() -> None:
    model = _network()
    with sbp.attach(model, [ROWS]), pytest.raises(UnsupportedError, match=r"already attached \(at '0'\)"):
        sbp.attach(model, [ROWS])
    model[2].forward = model[2].forward
    with pytest.raises(UnsupportedError, match="the forward of '2' was replaced"):
        sbp.attach(model, [ROWS])
    sbp.attach(model, [ROWS], exclude=["2"]).detach()
    assert "forward" in model[2].__dict__


def test_detaching_gives_the_model_back(tmp_path: Path) -> None:
    model = tiny_model("llama")
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys, ids = list(model.state_dict()), tokens(0)
    plain = model(input_ids=ids).logits
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = sbp.attach(model, [ROWS], optimizer=optimizer)
    assert list(model.state_dict()) == keys
    assert torch.equal(model(input_ids=ids).logits, plain)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    engine.detach()
    engine.detach()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == attributes
    assert not optimizer._optimizer_step_post_hooks
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    with pytest.raises(UsageError, match="detached"):
        engine.backward(_loss(_network()))


@pytest.mark.parametrize("action", [copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_an_attached_model_cannot_be_copied_without_a_word(action: Callable[[nn.Module], object]) -> None:
    model = _network()
    with (
        sbp.attach(model, [ROWS]),
        pytest.raises(UnsupportedError, match=r"cannot be copied or pickled: call engine.detach\(\) first"),
    ):
        action(model)


def test_exclude_and_not_covered_are_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), OwnLinear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    unused = nn.ModuleDict({"net": model, "spare": nn.Linear(2, 2)})
    with sbp.attach(unused, [ROWS], exclude=["net.[2]"]) as engine:
        engine.backward(_loss(model))
        report = engine.report()
    assert [site.name for site in report.sites] == ["net.0", "net.3", "spare"]
    assert (report.not_covered, report.excluded, report.never_called) == (("net.1",), ("net.2",), ("spare",))
    first, last, spare = report.sites
    assert (first.calls, first.rows, first.kept_share) == (1, 5, 0.2)
    assert first.dense_flops == 2 * 5 * 4 * 4  # the data needs no gradient
    assert (last.dense_flops, last.claimed_flops) == (4 * 5 * 4 * 2, 0.25 * 4 * 5 * 4 * 2)
    assert (spare.calls, spare.kept_share) == (0, None)
    assert report.kept_share == 0.2


def test_a_plain_backward_is_refused_and_disabled_is_plain_pytorch() -> None:
    model = _network()
    _loss(model).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with sbp.attach(model, [ROWS]) as engine:
        with pytest.raises(UsageError, match=r"call engine\.backward\(loss\) instead"):
            _loss(model).backward()
        model.zero_grad()
        with engine.disabled():
            loss = _loss(model)
            assert type(loss.grad_fn.next_functions[0][0].next_functions[0][0]).__name__ == "AddmmBackward0"
            loss.backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
        assert engine.report().num_backwards == 0
        assert engine.take_kept_share() is None
        engine.backward(_loss(model))
        assert engine.report().num_backwards == 1
        with pytest.raises(UsageError, match=r"inside another engine\.backward"):
            engine.backward(_loss(model), engine.backward)
        engine.backward(_loss(model))


def test_a_step_is_an_optimizer_step_and_micro_batches_count_within_it() -> None:
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = sbp.attach(model, [Watcher()], optimizer=optimizer, seed=9)
    for _ in range(2):
        for _ in range(2):
            engine.backward(_loss(model))
        optimizer.step()
    assert [(name, Step(i, m, 0, 9)) for i in range(2) for m in range(2) for name in ("2", "0")] == SEEN
    assert engine.state_dict() == {"index": 2, "micro_batch": 0}
    engine.detach()
    optimizer.step()
    assert engine.state_dict() == {"index": 2, "micro_batch": 0}


def test_without_an_optimizer_every_backward_is_a_step() -> None:
    model = _network()
    with sbp.attach(model, [Watcher()]) as engine:
        for _ in range(2):
            engine.backward(_loss(model))
    assert [step for _, step in SEEN] == [Step(0), Step(0), Step(1), Step(1)]


def test_a_shared_layer_is_asked_once_a_call() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    with sbp.attach(model, [Watcher()]) as engine:
        engine.backward(_loss(model))
        engine.backward(_loss(model))
    assert [("0", Step(i, 0, call)) for i in range(2) for call in range(2)] == SEEN


def test_accelerate_carries_the_backward_and_its_optimizer_counts_the_steps() -> None:
    model = _network()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with sbp.attach(model, [Watcher()], optimizer=optimizer) as engine:
        for _ in range(4):
            with accelerator.accumulate(model):
                engine.backward(_loss(model), accelerator.backward)
                optimizer.step()
                optimizer.zero_grad()
    assert [(step.index, step.micro_batch) for name, step in SEEN if name == "0"] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_probe_leaves_no_trace() -> None:
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = sbp.attach(model, [Watcher()], optimizer=optimizer)
    engine.backward(_loss(model))
    before = engine.state_dict(), engine.report(), engine.claim()
    with engine.probing(draw=3):
        for _ in range(2):
            engine.backward(_loss(model))
        assert engine.report().num_backwards == 2
        assert engine.claim().dense_flops == before[2].dense_flops
    assert (engine.state_dict(), engine.report(), engine.claim()) == before
    assert {step.draw for _, step in SEEN[2:]} == {3}
    assert engine.take_kept_share() == 0.2
    assert engine.take_kept_share() is None


def test_a_failed_backward_does_not_count_as_one() -> None:
    model = _network()
    with sbp.attach(model, [Watcher()]) as engine:

        def fail(loss: Tensor) -> None:
            raise FloatingPointError("from outside")

        with pytest.raises(FloatingPointError):
            engine.backward(_loss(model), fail)
        assert engine.state_dict() == {"index": 0, "micro_batch": 0}
        engine.backward(_loss(model))
        assert engine.state_dict() == {"index": 1, "micro_batch": 0}


def test_the_state_goes_on_and_nonsense_is_refused() -> None:
    model = _network()
    with sbp.attach(model, [Watcher()]) as engine:
        engine.load_state_dict({"index": 7, "micro_batch": 1, "cut": {}, "form_times": None})  # as 0.5 stored it
        engine.backward(_loss(model))
        good = {"index": 1, "micro_batch": 0}
        for wrong in ({}, {"index": 1}, good | {"index": -1}, good | {"index": 1.0}, good | {"cut": {"0": 1}}):
            with pytest.raises(UsageError, match="load_state_dict needs the result"):
                engine.load_state_dict(wrong)
    assert SEEN[0][1] == Step(7, 1)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_decides_as_without(use_reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model, ids = tiny_model("llama"), tokens(0)
        model.enable_input_require_grads()
        if checkpointing:
            checkpoint_activations(model, use_reentrant=use_reentrant)
        with sbp.attach(model, [ROWS], seed=5) as engine:
            engine.backward(model(input_ids=ids, labels=ids).loss)
            assert engine.report().kept_share == 0.25
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_attention_that_uses_its_weight_directly_shows_as_never_called() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = nn.ModuleDict({"attention": attention, "head": nn.Linear(8, 2)})
    x = torch.randn(1, 3, 8)
    with sbp.attach(model, [ROWS]) as engine:
        engine.backward(model["head"](attention(x, x, x)[0]).sum())
        assert engine.report().never_called == ("attention.out_proj",)


@pytest.mark.parametrize("name", ["linear", "conv1d"])
def test_a_linear_may_be_called_by_the_name_of_its_argument(name: str) -> None:
    layer, key = (nn.Linear(4, 3), "input") if name == "linear" else (Conv1D(3, 4), "x")
    x = torch.linspace(-1, 1, 20).view(5, 4)
    layer(x).square().sum().backward()
    dense, layer.weight.grad = layer.weight.grad, None
    with sbp.attach(layer, [sbp.make_policy("topk", keep=1.0)]) as engine:
        engine.backward(layer(**{key: x}).square().sum())
        with pytest.raises(TypeError):
            layer(x, nonsense=1)
        with engine.disabled():
            layer(**{key: x})
    assert torch.equal(layer.weight.grad, dense)


def test_vmap_over_a_linear_is_refused_by_our_own_error() -> None:
    model, x = _network(), torch.ones(2, 5, 4)
    with sbp.attach(model, [ROWS]) as engine:
        with pytest.raises(UnsupportedError, match=r"torch.func \(vmap, grad, jacrev\) on '0' of an attached model"):
            torch.func.vmap(model)(x)
        with torch.no_grad():
            assert torch.func.vmap(model)(x).shape == (2, 5, 3)
        with engine.disabled():
            assert torch.func.vmap(model)(x).shape == (2, 5, 3)


def test_a_backward_inside_disabled_counts_as_nothing() -> None:
    model = _network()
    optimizer = torch.optim.SGD(model.parameters())
    with sbp.attach(model, [ROWS], optimizer=optimizer) as engine:
        engine.backward(_loss(model))
        before = engine.state_dict(), engine.report()
        with engine.disabled():
            engine.backward(_loss(model))
        assert (engine.state_dict(), engine.report()) == before


@pytest.mark.parametrize("along", ["rows", "columns", "blocks"])
@pytest.mark.parametrize("size", [1e-25, 1e-42, 1e-5, 1e30])
def test_gradients_so_small_that_squares_vanish_are_chosen_by_norm(along: str, size: float) -> None:
    grad_NO = torch.full((4, 4), size * 1e-3)
    grad_NO[2:, 2:] = size
    policy = sbp.make_policy("topk", keep=0.25 if along == "blocks" else 0.5, along=along, block=(2, 2))
    selection = policy.select(grad_NO, Site("x", 4, (4,)), Step(0))
    assert selection is not None
    kept = selection.apply(grad_NO)
    assert torch.equal(kept[2:, 2:], grad_NO[2:, 2:])
    assert int((kept != 0).sum()) == int((selection.apply(torch.ones(4, 4)) != 0).sum())


@pytest.mark.parametrize("along", ["rows", "columns", "blocks"])
def test_scaling_against_underflow_changes_no_choice_elsewhere(along: str) -> None:
    policy = sbp.make_policy("topk", keep=0.25, along=along, block=(2, 2))
    for seed in range(20):
        grad_NO = torch.randn(16, 12, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 10)
        chosen, site = policy.select(grad_NO, Site("x", 12, (16,)), Step(0)), Site("x", 12, (16,))
        plain = grad_NO.square()
        if along == "rows":
            score = torch.linalg.vector_norm(grad_NO, dim=1)
        else:
            score = plain.sum(0) if along == "columns" else choice.sum_blocks(plain, (2, 2))
        expected = policy.choose(score, grad_NO, site)
        assert torch.equal(chosen.index_K, expected.index_K)
