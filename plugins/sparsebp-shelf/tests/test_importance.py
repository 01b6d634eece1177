"""Importance: unbiased draws by the gradient at the logits, the gain that switches them on, and weights in the loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from sparsebp_cli.backward import attach
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policies.tokens import SelectedTokens
from sparsebp_cli.policy import Observation, Step
from sparsebp_shelf.example import Examples, ExampleSelector, ReadExamples, WeightedExamples
from sparsebp_shelf.policies.importance import Importance, measure_gain
from tests.backward.conftest import FAMILIES
from tests.backward.families import tiny_decoder
from tests.backward.score.test_scorer import batch
from tests.promise import Nothing

ALWAYS: dict[str, Any] = {"threshold": 0.0}


class Weighted(Nothing, ExampleSelector):
    """Chooses and weighs as the test says."""

    index: list[int]
    weight: list[float]

    @property
    def budget(self) -> float:
        return 1.0

    @property
    def weighs(self) -> bool:
        return True

    def needs_loss(self, step: Step) -> bool:
        return False

    def choose(self, examples: Examples, step: Step) -> WeightedExamples:
        return WeightedExamples(torch.tensor(self.index), torch.tensor(self.weight))


def gradients(model: Any) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def train(model: Any, arguments: dict[str, Tensor], policy: Any, draw: int = 0, **options: Any) -> Any:
    model.zero_grad(set_to_none=True)
    with attach(model, [policy], seed=draw, **options) as engine:
        output = model(**arguments)
        engine.backward(output.loss)
    return float(output.loss.detach()), gradients(model)


def row(arguments: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    return {name: value[number : number + 1] for name, value in arguments.items()}


def weighted_by_hand(model: Any, arguments: dict[str, Tensor], index: list[int], factors: list[float]) -> Any:
    """Sum the mean losses of single examples, each times a factor."""
    model.zero_grad(set_to_none=True)
    losses = [factor * model(**row(arguments, number)).loss for number, factor in zip(index, factors, strict=True)]
    loss = torch.stack(losses).sum()
    loss.backward()
    return float(loss.detach()), gradients(model)


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for mine, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_the_loss_is_the_weighted_sum_over_the_targets_of_the_whole_batch(family: str) -> None:
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    model, arguments = tiny_decoder(family, **options), batch(4)
    count_B = [int((arguments["labels"][n, 1:] != -100).sum()) for n in range(4)]
    assert len(set(count_B)) > 1, "examples of equal length would hide a mean over examples"
    factors = [3.0 * count_B[0] / sum(count_B), 0.5 * count_B[2] / sum(count_B)]
    policy = Weighted(index=[0, 2], weight=[3.0, 0.5])
    assert_same(train(model, arguments, policy), weighted_by_hand(model, arguments, [0, 2], factors))
    # with the number of targets of all micro-batches, as a Trainer passes it
    loss, _ = train(model, arguments | {"num_items_in_batch": torch.tensor(100)}, policy)
    alone, _ = weighted_by_hand(model, arguments, [0, 2], factors)
    assert loss == pytest.approx(alone * sum(count_B) / 100, rel=1e-5)


def test_examples_of_a_classification_are_weighed() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **(FAMILIES["llama"] | {"num_labels": 4, "pad_token_id": 0}))
    model = AutoModelForSequenceClassification.from_config(config).train()
    arguments = {"input_ids": batch(4)["input_ids"], "labels": torch.tensor([0, 3, 1, 2])}
    ours = train(model, arguments, Weighted(index=[1, 3], weight=[2.0, 4.0]))
    assert_same(ours, weighted_by_hand(model, arguments, [1, 3], [0.5, 1.0]))


def test_weights_of_one_are_the_plain_mean_and_a_tuple_stays_one() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    with attach(model, [Weighted(index=[0, 1, 2, 3], weight=[1.0] * 4)]):
        found = model(**arguments, return_dict=False)
        assert isinstance(found, tuple)
        again = model(**arguments)
    torch.testing.assert_close(found[0], model(**arguments).loss)
    assert torch.equal(again.loss, found[0])
    assert again[0] is again.loss


def test_a_model_whose_loss_is_another_one_is_refused() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    model.loss_function = lambda logits, **_: logits.square().mean()
    with attach(model, [Weighted(index=[0], weight=[1.0])]), pytest.raises(UnsupportedError, match="cross-entropy of"):
        model(**arguments)


@pytest.mark.parametrize(("other", "text"), [(SelectedTokens(score="random", keep=0.5), "in one forward"), (None, "")])
def test_what_does_not_go_with_weights_is_refused_by_name(other: Any, text: str) -> None:
    policies, options = ([Importance(), other], {}) if other else ([Importance()], {"segments": 2})
    with pytest.raises(UnsupportedError, match=text or "it weights the losses of examples outside of the model"):
        attach(tiny_decoder("llama"), policies, **options)


def test_the_norm_is_that_of_autograd_at_the_logits() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    seen = []

    class Keeping(Weighted):
        @property
        def reads_gradient_norm(self) -> bool:
            return True

        def needs_loss(self, step: Step) -> bool:
            return True

        def choose(self, examples: Examples, step: Step) -> WeightedExamples:
            seen.append(examples.gradient_norm_B)
            return super().choose(examples, step)

    train(model, arguments, Keeping(index=[0], weight=[1.0]))
    for number in range(4):
        one = row(arguments, number)
        labels = one.pop("labels")
        logits = model(**one).logits
        logits.retain_grad()
        torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="sum"
        ).backward()
        assert float(seen[0][number]) == pytest.approx(float(logits.grad.norm()), rel=1e-4)


def test_the_gain_is_the_papers_number() -> None:
    """METHODS of importance sampling: norms 1, 2, 3, 10 gain 1.33463; equal norms gain nothing."""
    assert float(measure_gain(torch.tensor([1.0, 2.0, 3.0, 10.0]))) == pytest.approx(1.33463, abs=1e-5)
    share = torch.tensor([1.0, 2.0, 3.0, 10.0]).double() / 16
    distance = (share - 0.25).square().sum() / share.square().sum()
    assert float(measure_gain(torch.tensor([1.0, 2.0, 3.0, 10.0]))) == pytest.approx(float((1 - distance) ** -0.5))
    assert float(measure_gain(torch.ones(7))) == pytest.approx(1.0)


def test_it_switches_on_where_the_gain_pays_for_the_forward() -> None:
    policy = Importance(keep=0.25, smoothing=0.5, every=4)
    state = policy.init(())
    assert [policy.needs_loss(Step(index, state=state)) for index in range(5)] == [True, False, False, False, True]
    norm_B = torch.tensor([100.0] + [0.0] * 15)  # gains 4
    unequal = policy.look([ReadExamples("0", Examples(16, gradient_norm_B=norm_B))], Step(0))
    for expected in (2.0, 3.0):
        state = policy.observe(state, unequal, Step(0))
        assert float(state["gain"]) == pytest.approx(expected)
    assert not policy.is_weighing(Step(1, state={"gain": torch.tensor(7.0 / 3.0)})), "1 + 1 / (3 keep) pays for it"
    assert policy.is_weighing(Step(1, state=state))
    assert policy.needs_loss(Step(1, state=state))
    assert policy.observe(state, Observation(), Step(1)) is state, "nothing was read"


def test_examples_are_drawn_in_proportion_and_weighted_by_one_over_it() -> None:
    policy = Importance(keep=0.4, **ALWAYS)
    norm_B = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0])
    expected = [0.1, 0.2, 0.3, 0.4, 1.0]
    counts = torch.zeros(5)
    for draw in range(2000):
        choice = policy.choose(Examples(5, norm_B, norm_B), Step(0, draw=draw, state=policy.init(())))
        assert choice is not None
        counts[choice.index_K] += 1
        for number, weight in zip(choice.index_K.tolist(), choice.weight_K.tolist(), strict=True):
            assert weight == pytest.approx(1.0 / expected[number], rel=1e-5)
    for number, share in enumerate(expected):
        assert abs(float(counts[number]) / 2000 - share) <= 6 * (share * (1 - share) / 2000) ** 0.5, number


def test_the_gradient_is_the_whole_batchs_in_the_mean_over_draws() -> None:
    """Its expectation over the two ways to draw one of two examples, with the probabilities that it states."""
    model, arguments = tiny_decoder("llama"), batch(2)
    model.zero_grad(set_to_none=True)
    model(**arguments).loss.backward()
    dense = gradients(model)
    mean = [torch.zeros_like(gradient) for gradient in dense]
    found: dict[float, int] = {}
    for draw in range(12):
        loss, sampled = train(model, arguments, Importance(keep=0.5, **ALWAYS), draw=draw)
        if loss not in found:
            found[loss] = draw
            parts = _times_probability(sampled, model, arguments, loss)
            mean = [total + part for total, part in zip(mean, parts, strict=True)]
    assert len(found) == 2
    for ours, theirs in zip(mean, dense, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def _times_probability(sampled: list[Tensor], model: Any, arguments: dict[str, Tensor], loss: float) -> list[Tensor]:
    """Multiply by the probability of the draw, found by the loss that it has: l_i T_i / (p_i T)."""
    targets = int((arguments["labels"][:, 1:] != -100).sum())
    parts = []
    for number in range(2):
        one = row(arguments, number)
        own = int((one["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            parts.append(float(model(**one).loss) * own / targets)
    norms = []
    for number in range(2):
        one = row(arguments, number)
        with torch.no_grad():
            logits = model(**{name: value for name, value in one.items() if name != "labels"}).logits[0, :-1]
        target = one["labels"][0, 1:]
        kept = target != -100
        share = logits[kept].softmax(-1) - torch.nn.functional.one_hot(target[kept], logits.shape[-1])
        norms.append(float(share.norm()))
    probabilities = [norm / sum(norms) for norm in norms]
    errors = [abs(part / p - loss) for part, p in zip(parts, probabilities, strict=True)]
    number = errors.index(min(errors))
    assert errors[number] < 1e-4 * abs(loss)
    return [gradient * probabilities[number] for gradient in sampled]


def test_everything_kept_is_dense_bit_for_bit() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    model.zero_grad(set_to_none=True)
    loss = model(**arguments).loss
    loss.backward()
    dense = gradients(model)
    found = train(model, arguments, Importance(keep=1.0))
    assert found[0] == float(loss.detach())
    assert all(torch.equal(mine, other) for mine, other in zip(found[1], dense, strict=True))


def test_its_control_draws_as_many_uniformly() -> None:
    assert Importance(keep=0.25).control == {"name": "uniform", "start": 0, "end": 1, "interrupt": 0, "keep": 0.25}
    assert Importance(keep=1.0).control is None


def test_a_step_that_diverged_does_not_decide_later_ones() -> None:
    policy = Importance(keep=0.5)
    state = {"gain": torch.tensor(1.5, dtype=torch.float64)}
    for value in (float("nan"), float("inf")):
        assert policy.observe(state, {"gain": {"0": torch.tensor(value)}}, Step(0)) == state
    assert policy.observe(state, {"gain": {"0": torch.tensor(2.5)}}, Step(0))["gain"] == pytest.approx(1.6)


def test_an_example_whose_loss_is_no_number_is_drawn() -> None:
    model, arguments = tiny_decoder("llama"), batch()
    unused = int(arguments["input_ids"][1, 3])
    arguments["input_ids"][arguments["input_ids"] == unused] = 3
    arguments["input_ids"][1, 3] = unused
    with torch.no_grad():
        model.get_input_embeddings().weight[unused] = torch.nan
    for draw in range(10):
        loss, _ = train(model, arguments, Importance(keep=0.3, **ALWAYS), draw)
        assert math.isnan(loss)


@pytest.mark.parametrize("number", [3, 4])
def test_positions_of_three_axes_go_with_their_examples(number: int) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    config = Qwen2VLConfig(text_config={**text, **heads, "rope_parameters": rope}, vision_config=vision)
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config).train()
    ids = torch.randint(3, 60, (number, 12))
    arguments = {"input_ids": ids, "labels": ids, "position_ids": torch.randint(0, 30, (3, number, 12))}
    policy = Weighted(index=[0, 2], weight=[0.5, 0.3])
    found = train(model, arguments, policy)
    rows = [
        {
            name: value[:, row : row + 1] if value.ndim == 3 else value[row : row + 1]
            for name, value in arguments.items()
        }
        for row in policy.index
    ]
    model.zero_grad(set_to_none=True)
    loss = sum(weight / number * model(**one).loss for weight, one in zip(policy.weight, rows, strict=True))
    loss.backward()
    assert_same(found, (float(loss.detach()), gradients(model)))
