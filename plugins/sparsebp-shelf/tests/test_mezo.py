"""MeZO: the estimate, the weights that it leaves, and what its runs count."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.composition import PolicyFacts, Setup, find_refusals
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import Stateful, Step
from sparsebp_cli.testing import check_policy
from sparsebp_shelf.estimator import DirectionDraw, GradientEstimator, MeZO
from tests.backward.conftest import tiny_model, tokens


class Quadratic(nn.Module):
    """A loss of the second order in two parameters, the second in two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        self.two = nn.Parameter(torch.tensor([[0.5], [3.0]], dtype=torch.float64))

    def forward(self) -> Tensor:
        return (self.one[:, None] * self.two).sum() + self.one.square().sum() + 0.3 * self.two.sum()


def made(policy: Any = "mezo", **options: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    model = tiny_model("llama", attention_dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, sbp.attach(model, policy, optimizer=optimizer, seed=3, **options)


def bits(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def direction(model: nn.Module, index: int, seed: int = 3) -> dict[str, Tensor]:
    step = Step(index, seed=seed)
    return {
        name: torch.randn(p.shape, generator=step.generator(DirectionDraw(name)))
        for name, p in model.named_parameters()
    }


def test_the_mean_of_its_draws_is_the_gradient_of_a_quadratic() -> None:
    model = Quadratic()
    model().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    found = []
    engine = sbp.attach(model, MeZO(scale=0.1))
    for _ in range(2000):
        model.zero_grad()
        engine.estimate(model)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    drawn = torch.stack(found)
    error = (drawn.mean(0) - gradient).abs()
    assert bool((error < 5.0 * drawn.std(0) / len(drawn) ** 0.5).all())
    assert float(drawn.std(0).min()) > 0.1  # draws differ


def test_a_step_with_sgd_is_that_of_the_paper() -> None:
    model, optimizer, engine = made(MeZO(scale=1e-2))
    by_hand = tiny_model("llama", attention_dropout=0.1).eval()
    for index in range(3):
        batches = [tokens(10 * index), tokens(10 * index + 1)]
        z = direction(by_hand, index)
        losses = []
        for sign in (1.0, -2.0):
            for name, p in by_hand.named_parameters():
                p.data.add_(sign * 1e-2 * z[name])
            losses.append(sum(by_hand(input_ids=ids, labels=ids).loss.item() for ids in batches))
        for name, p in by_hand.named_parameters():
            p.data.add_(1e-2 * z[name])
            p.data.sub_(1e-3 * (losses[0] - losses[1]) / 2e-2 * z[name])
        for ids in batches:
            engine.estimate(lambda ids=ids: model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_generators_and_modes_are_left_to_the_last_bit(dtype: torch.dtype) -> None:
    model, _, engine = made()
    model.to(dtype)
    model.model.layers[0].eval()
    before, state = bits(model), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    ids = tokens(0)
    loss = engine.estimate(lambda: model(input_ids=ids, labels=ids).loss)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert not loss.requires_grad
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


def test_a_forward_that_fails_leaves_the_weights_as_they_were() -> None:
    model, _, engine = made()
    before, calls = bits(model), 0

    def forward() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("no memory")
        return model(input_ids=tokens(0), labels=tokens(0)).loss

    with pytest.raises(RuntimeError, match="no memory"):
        engine.estimate(forward)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))


def test_micro_batches_of_a_step_share_their_direction_and_steps_do_not() -> None:
    model, optimizer, engine = made()
    seen = []
    for number in range(4):
        model.zero_grad()
        engine.estimate(lambda n=number: model(input_ids=tokens(n), labels=tokens(n)).loss)
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        if number == 1:
            optimizer.step()
    cosine = torch.nn.functional.cosine_similarity
    assert float(cosine(seen[0], seen[1], 0).abs()) > 0.999
    assert float(cosine(seen[2], seen[3], 0).abs()) > 0.999
    assert float(cosine(seen[1], seen[2], 0).abs()) < 0.1


def test_frozen_parameters_are_neither_shifted_nor_given_a_gradient() -> None:
    model, _, engine = made()
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    address, seen = frozen.detach().clone(), []

    def forward() -> Tensor:
        seen.append(torch.equal(frozen, address))
        return model(input_ids=tokens(0), labels=tokens(0)).loss

    engine.estimate(forward)
    assert seen == [True, True]
    assert frozen.grad is None


def test_calls_that_do_not_fit_are_refused() -> None:
    model, _, engine = made()
    loss = model(input_ids=tokens(0), labels=tokens(0)).loss
    with pytest.raises(UsageError, match=r"MeZO estimates gradients without a backward: call engine\.estimate"):
        engine.backward(loss)
    with engine.disabled(), pytest.raises(UsageError, match="needs an attached and enabled policy"):
        engine.estimate(lambda: loss)
    engine.detach()
    with pytest.raises(UsageError, match="needs an attached and enabled policy"):
        engine.estimate(lambda: loss)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UsageError, match="trained parameters, but the model trains none"):
        sbp.attach(model, "mezo").estimate(lambda: loss)
    with pytest.raises(UsageError, match="needs an attached and enabled policy"):
        sbp.attach(tiny_model("llama"), "dense").estimate(lambda: loss)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ({"name": "topk", "keep": 0.5}, "in one training is not supported"),
        ({"name": "dropbp", "keep": 0.5}, "in one training is not supported"),
        ({"name": "frozen", "freeze": ["*.layers.0.*"]}, "in one training is not supported"),
        ({"name": "wta-crs", "keep": 0.5}, "in one training is not supported"),
    ],
)
def test_another_policy_is_refused_by_name(policy: Any, text: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(UnsupportedError, match=text):
        sbp.attach(model, [policy, "mezo"], optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sites": "nodes"}, "has no backward, and so no sites"),
        ({"segments": 2}, "segments=2 has nothing to compute again"),
        ({"update": "eager"}, "has no backward: needs update='deferred'"),
    ],
)
def test_an_option_of_the_backward_is_refused_by_name(options: Any, text: str) -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=text):
        sbp.attach(model, "mezo", optimizer=optimizer, **options)


class _Plugin(GradientEstimator):
    @property
    def unbiased(self) -> bool:
        return True

    @property
    def shifts(self) -> tuple[float, ...]:
        return 0.5, 0.0

    def draw(self, shape: Any, generator: torch.Generator) -> Tensor:
        return torch.randn(tuple(shape), generator=generator)

    def estimate(self, loss_S: Any, step: Step) -> float:
        return (loss_S[0] - loss_S[-1]) / 0.5


class _OneSided(_Plugin):
    """On one side, the odd terms of a normal direction cancel in the mean."""


class _Same(_Plugin):
    def draw(self, shape: Any, generator: torch.Generator) -> Tensor:
        return torch.ones(tuple(shape))


class _Global(_Plugin):
    def draw(self, shape: Any, generator: torch.Generator) -> Tensor:
        return torch.randn(tuple(shape))


class _Double(_Plugin):
    def estimate(self, loss_S: Any, step: Step) -> float:
        return 2.0 * (loss_S[0] - loss_S[1]) / 0.5


class _Bent(_Plugin):
    def estimate(self, loss_S: Any, step: Step) -> float:
        return (loss_S[0] - loss_S[1]) ** 2


class _OnePoint(_Plugin):
    @property
    def shifts(self) -> tuple[float, ...]:
        return (0.5,)


def test_the_suite_passes_what_keeps_the_contract() -> None:
    check_policy(_OneSided())
    check_policy("mezo", scale=0.5)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (_Same, "draws one direction at all steps"),
        (_Global, "uses a global random generator"),
        (_Double, "its mean is not the gradient"),
        (_Bent, "not linear in the losses"),
        (_OnePoint, "at least two different finite numbers"),
    ],
)
def test_the_suite_finds_a_broken_promise(policy: type[GradientEstimator], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_policy(policy())


def test_a_state_is_refused_by_name() -> None:
    class Keeps(_Plugin, Stateful):
        observes: ClassVar[Any] = frozenset()

        def init(self, sites: Any) -> Any:
            return {"seen": 0.0}

        def observe(self, state: Any, observation: Any, step: Step) -> Any:
            return state

    facts = PolicyFacts.of(Keeps())
    texts = [refusal.text for refusal in find_refusals(Setup([facts], {"loop": "own"}))]
    assert any("keeps a state, which is not supported" in text for text in texts)
