"""Examples that stop behind the first layers: the others train as if their rows had been gathered there by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.asset.checkpointing import checkpoint_activations
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import Measure, Stateful, Step, make_policies
from sparsebp_cli.run import History, metric
from sparsebp_cli.testing import check_kind, check_state
from sparsebp_shelf.midway import MIDWAY_SELECTOR, Features, MidwaySelector, PartialForward, ReadFeatures
from sparsebp_shelf.midway.partial_forward import surprise
from sparsebp_shelf.midway.suite import check_midway_selector
from tests.backward.conftest import FAMILIES, tiny_model, tokens
from tests.chaos.kill import resume_killed
from tests.proof import prove
from tests.worker.conftest import LLAMA

LENGTH, BATCH, AFTER = 8, 5, 2
OFF = {"gpt2": {"n_layer": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}}
MASK = torch.tensor([[1] * LENGTH, [1] * 5 + [0] * 3, [1] * LENGTH, [1] * 3 + [0] * 5, [1] * 7 + [0]])
HALF = PartialForward(keep=0.6, after=AFTER, by="random")
CHOSEN = [0, 1, 3]


class Fixed(MidwaySelector):
    """The same examples at every step."""

    index: tuple[int, ...] = (0, 1, 3)

    @property
    def exact(self) -> bool:
        return False

    @property
    def num_first(self) -> int:
        return AFTER

    @property
    def reads_features(self) -> bool:
        return False

    def count(self, number: int, step: Step) -> int:
        return len(self.index)

    def choose(self, features: Features, step: Step) -> Tensor:
        return torch.tensor(self.index)


def made(family: str = "llama", **options: Any) -> Any:
    return tiny_model(family, **(OFF.get(family, {"num_hidden_layers": 4}) | options)).double()


def batch(seed: int = 0, number: int = BATCH) -> dict[str, Tensor]:
    ids, mask = tokens(seed, number, LENGTH), MASK[:number]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gather_by_hand(model: Any, arguments: dict[str, Tensor], index: list[int]) -> Tensor:
    """Return the loss of a forward whose rows are gathered behind the first layers: of that layer's output the chosen
    rows are taken, and put into a forward of these rows alone."""
    inner = getattr(model, "model", None) or getattr(model, "transformer", None) or model.gpt_neox
    layer, seen = (getattr(inner, "layers", None) or inner.h)[AFTER - 1], list[Tensor]()
    handle = layer.register_forward_hook(lambda _, __, output: seen.append(output))
    model(**arguments)
    handle.remove()
    handle = layer.register_forward_hook(lambda _, __, ___: seen[0][index])
    loss: Tensor = model(**{name: value[index] for name, value in arguments.items()}).loss
    handle.remove()
    return loss


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2"])
def test_it_equals_gathering_the_rows_by_hand(family: str) -> None:
    model, arguments = made(family), batch()
    expected = gather_by_hand(model, arguments, CHOSEN)
    expected.backward()
    theirs = gradients(model)
    model.zero_grad()
    engine = sbp.attach(model, Fixed())
    loss = model(**arguments).loss
    engine.backward(loss)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)  # transformers computes the loss in float32
    ours = gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-7, msg=name)
    assert "3 of 5 examples went on behind the first 2 layers" in str(engine.report())
    engine.detach()
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_classes_of_chosen_examples_are_learnt() -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **FAMILIES["llama"] | {"num_hidden_layers": 4, "num_labels": 3})
    model = AutoModelForSequenceClassification.from_config(config).double().train()
    arguments = batch() | {"labels": torch.tensor([0, 1, 2, 0, 1])}
    with torch.no_grad():
        expected = model(**{name: value[CHOSEN] for name, value in arguments.items()}).loss
    engine = sbp.attach(model, Fixed())
    loss = model(**arguments).loss
    engine.backward(loss)
    torch.testing.assert_close(loss.detach(), expected)  # the first layers do not mix examples


def test_the_mean_over_the_whole_step_keeps_the_share_of_the_targets_that_go_on() -> None:
    model, arguments = made(), batch()
    with torch.no_grad():
        mean = model(**{name: value[CHOSEN] for name, value in arguments.items()}).loss
    sbp.attach(model, Fixed())
    targets = (arguments["labels"][:, 1:] != -100).sum()
    loss = model(**arguments, num_items_in_batch=4 * targets).loss
    torch.testing.assert_close(loss.detach(), mean / 4)


def test_checkpointed_layers_have_the_same_gradients() -> None:
    plain, again = made(), made()
    checkpoint_activations(again)
    for model in (plain, again):
        sbp.attach(model, HALF, seed=1).backward(model(**batch()).loss)
    theirs = gradients(again)
    assert all(torch.equal(theirs[name], gradient) for name, gradient in gradients(plain).items())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("policy", [HALF, PartialForward(keep=0.4, after=1)], ids=["random", "density"])
def test_what_is_claimed_is_executed(policy: PartialForward, checkpointing: bool) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if checkpointing:
        checkpoint_activations(model)
    engine = sbp.attach(model, policy, optimizer=optimizer)
    engine.backward(model(**batch(1)).loss)  # the estimate begins
    optimizer.step()
    proof = prove(model, engine, lambda: model(**batch()).loss, checkpointing=checkpointing)
    assert proof.claimed_forward_flops < 0.9 * proof.dense.flops.forward.total()  # no forward is there for scores alone


def test_the_rarest_go_on_by_the_normal_density_of_the_features() -> None:
    policy = PartialForward(keep=0.5, smoothing=0.0)
    generator = torch.Generator().manual_seed(0)
    seen_BD, new_BD = torch.randn(200, 4, generator=generator) * 3.0 + 1.0, torch.randn(6, 4, generator=generator) * 9.0
    zeros = torch.zeros(4, dtype=torch.float64)
    weight = torch.ones((), dtype=torch.float64)
    state = {"mean": zeros + seen_BD.double().mean(0), "square": seen_BD.double().square().mean(0), "weight": weight}
    density = torch.distributions.Normal(state["mean"], seen_BD.double().std(0, correction=0)).log_prob(new_BD).sum(1)
    order = surprise(new_BD, state).argsort()
    assert torch.equal(order, density.argsort(descending=True))
    index_K = policy.choose(Features(6, new_BD), Step(3, state={**state, "begun": 1.0}))
    assert index_K.tolist() == sorted(density.argsort()[:3].tolist())


def test_the_estimate_is_the_running_mean_of_the_features_behind_the_layer() -> None:
    model, seen = made(), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = sbp.attach(model, PartialForward(after=1, smoothing=0.8), optimizer=optimizer)
    model.model.layers[0].register_forward_hook(
        lambda _, __, output: seen.append(output.detach()) if len(output) == BATCH else None
    )
    expected = torch.zeros(32, dtype=torch.float64)
    for step in range(3):
        seen.clear()
        engine.backward(model(**batch(step)).loss)
        engine.backward(model(**batch(step + 10)).loss)
        optimizer.step()
        optimizer.zero_grad()
        mask_BT1 = MASK[:, :, None].double()
        feature_ND = torch.cat([((x * mask_BT1).sum(1) / mask_BT1.sum(1)) for x in seen]).float().double()
        expected = 0.8 * expected + 0.2 * feature_ND.mean(0)
        state = {key.removeprefix("0/"): value for key, value in engine.state_dict()["policy_state"].items()}
        torch.testing.assert_close(state["mean"], expected, rtol=1e-6, atol=1e-9)
        assert float(state["weight"]) == pytest.approx(1.0 - 0.8 ** (step + 1))
        assert engine.report().chosen.chosen_examples == [10, 14, 18][step]  # all of them before there is an estimate


def test_the_control_draws_as_many_at_the_same_place() -> None:
    policy = PartialForward(keep=0.4, after=3)
    control = make_policies(policy.control)[0]
    assert isinstance(control, PartialForward)
    assert (control.by, control.after, control.keep) == ("random", 3, 0.4)
    assert control.control is None
    drawn = torch.cat([control.choose(Features(10), Step(index)) for index in range(2000)])
    share = torch.bincount(drawn) / 2000
    assert bool(((share - 0.4).abs() < 5 * (0.4 * 0.6 / 2000) ** 0.5).all())


@pytest.mark.slow
def test_it_keeps_what_every_kind_promises() -> None:
    policies = [PartialForward(keep=1.0), PartialForward(keep=0.5, smoothing=0.5), PartialForward(by="random")]
    check_kind(
        MIDWAY_SELECTOR,
        policies,
        make_model=lambda: tiny_model("llama", hidden_size=8, intermediate_size=8, vocab_size=64),
        loss=lambda model, number: model(**batch(number, 3)).loss,
    )


@pytest.mark.slow
def test_a_killed_run_resumes_identically_and_does_what_it_claims(tiny_recipe: Any, prepared: Any) -> None:
    recipe = tiny_recipe(
        model={"config": LLAMA | {"num_hidden_layers": 3, "attention_dropout": 0.1}},
        policy=[{"name": "partial-forward", "keep": 0.5}],
        training={"max_steps": 10, "gradient_accumulation_steps": 2, "max_grad_norm": None},
        checkpoint={"every": 3},
        measure={"probe_every": 4, "warmup_steps": 0},
        backward={"checkpointing": "full"},
    )
    history = History.load(resume_killed(recipe, prepared).path)
    assert set(history.series(metric.EXCESS_SHARE.name).values()) == {0.0}


def test_what_is_not_built_is_refused_by_name() -> None:
    model = made()
    for other in ({"name": "topk", "keep": 0.5}, {"name": "uniform"}, {"name": "lossless"}):
        with pytest.raises(UnsupportedError, match="in one forward is not supported"):
            sbp.attach(model, [other, HALF], num_steps=4)
    with pytest.raises(UnsupportedError, match="segments run the layers without gradients first"):
        sbp.attach(model, HALF, segments=2)
    with pytest.raises(UnsupportedError, match="through 4 layers, which must be fewer than the model's 4"):
        sbp.attach(model, PartialForward(after=4))
    with pytest.raises(UnsupportedError, match="needs a transformers model with one stack of layers, got Linear"):
        sbp.attach(nn.Linear(2, 2), HALF)
    with pytest.raises(PolicyError, match=r"keep: must be in \(0, 1\]"):
        sbp.make_policy("partial-forward", keep=0.0)
    engine = sbp.attach(model, HALF)
    with pytest.raises(UsageError, match="needs labels among the model's arguments"):
        model(input_ids=tokens(0))
    engine.detach()
    with pytest.raises(UsageError, match="was not called"):
        sbp.attach(model.eval(), HALF).backward(model(**batch()).loss)


class _Backwards(Fixed):
    index: tuple[int, ...] = (2, 0)


class _Twice(Fixed):
    index: tuple[int, ...] = (0, 0)


class _Exact(Fixed):
    index: tuple[int, ...] = (0,)

    @property
    def exact(self) -> bool:
        return True


class _Global(Fixed):
    index: tuple[int, ...] = (0,)

    def choose(self, features: Features, step: Step) -> Tensor:
        torch.rand(1)
        return super().choose(features, step)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (_Backwards, "count must be a whole number from 1 to 1"),
        (_Exact, "says it is exact"),
        (_Global, "uses a global random generator"),
    ],
)
def test_the_suite_finds_a_broken_promise(policy: type[MidwaySelector], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_midway_selector(policy())


class _Grows(Stateful[Any], Fixed):
    """Its state has another shape behind a step."""

    @property
    def observes(self) -> Any:
        return frozenset({ReadFeatures})

    def measure(self, seen: Any, step: Step) -> dict[str, Measure]:
        return {"sum": Measure(seen.feature_BD.sum(0))}

    def init(self, places: Any, /) -> Any:
        return {"sum": torch.zeros(1)}

    def observe(self, state: Any, observation: Any, step: Step) -> Any:
        return {"sum": next(iter(observation["sum"].values()), state["sum"])}


def test_the_state_of_a_kind_of_ones_own_is_checked_with_what_it_is_shown() -> None:
    with pytest.raises(AssertionError, match="observe returns other entries than init"):
        check_midway_selector(_Grows())
    with pytest.raises(AssertionError, match="observes ReadFeatures, which a policy of its kind is not shown"):
        check_state(_Grows(), ())


@pytest.mark.parametrize("policy", [_Backwards, _Twice])
def test_a_broken_choice_is_refused_in_the_forward(policy: type[MidwaySelector]) -> None:
    model = made()
    sbp.attach(model, policy())
    with pytest.raises(PolicyError, match="must choose 2 ascending examples below 5"):
        model(**batch())
