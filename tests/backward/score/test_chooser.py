"""What a token selector is shown of a batch, what it costs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import Field
from torch import Tensor

from sparsebp_cli.backward import attach, count_flops
from sparsebp_cli.backward.kind.score.scorer import next_tokens
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policies.tokens import SelectedTokens
from sparsebp_cli.policies.topk import TopK
from sparsebp_cli.policy import Score, ScoredTokenSelector, Step, Tokens
from sparsebp_shelf.example import Uniform
from tests.backward.families import tiny_decoder
from tests.backward.score.test_scorer import batch, score

EXCESS: dict[str, Any] = {"score": "excess", "keep": 0.5, "reference": "another"}


class Watching(ScoredTokenSelector):
    """Trains all, and keeps what it was shown."""

    wants: list[str] = Field(default_factory=list)
    seen: list[Any] = Field(default_factory=list)

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset(self.wants)  # type: ignore[arg-type]

    def score_tokens(self, tokens: Tokens, step: Step) -> Tensor | None:
        self.seen.append((tokens, step))
        return torch.zeros(tokens.target_BT.shape)


def other_model():
    torch.manual_seed(5)
    model = tiny_decoder("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) / 20)
    return model.eval()


def shown(policy: Watching, arguments: dict[str, Tensor], **options: Any) -> Tokens:
    with attach(tiny_decoder("llama"), [policy], **options) as engine:
        engine.backward(engine_model(engine)(**arguments).loss)
    return policy.seen[0][0]


def engine_model(engine):
    return engine.extensions[0].decoder.model


def test_a_selector_is_shown_targets_padding_scores_and_columns() -> None:
    arguments, reference = batch(), other_model()
    column_BT = torch.arange(36).view(3, 12)
    policy = Watching(wants=["loss", "entropy", "reference_loss"], mask_column="marks", keep=0.5)
    tokens = shown(policy, arguments | {"marks": column_BT}, reference=reference)
    assert torch.equal(tokens.input_ids_BT, arguments["input_ids"])
    assert torch.equal(tokens.target_BT, next_tokens(arguments["labels"]) != -100)
    assert torch.equal(tokens.real_BT, arguments["attention_mask"] == 1)
    assert torch.equal(tokens.columns["marks"], column_BT)
    expected = score(tiny_decoder("llama"), arguments)
    assert torch.equal(tokens.scores["loss"], expected["loss"])
    assert torch.equal(tokens.scores["entropy"], expected["entropy"])
    assert torch.equal(tokens.scores["reference_loss"], score(reference, arguments)["loss"])
    assert not torch.equal(tokens.scores["reference_loss"], tokens.scores["loss"])


def test_a_reference_may_come_with_the_batch() -> None:
    arguments = batch()
    scores_BT = torch.rand(3, 12)
    policy = Watching(wants=["reference_loss"], keep=0.5)
    tokens = shown(policy, arguments | {"reference_loss": scores_BT}, reference="batch")
    assert torch.equal(tokens.scores["reference_loss"], scores_BT * tokens.target_BT)


def test_cached_and_fly_choose_the_same() -> None:
    arguments, reference, found = batch(), other_model(), []
    for options in ({"reference": reference}, {"reference": "batch"}):
        model = tiny_decoder("llama")
        given = arguments | (
            {} if options["reference"] is reference else {"reference_loss": score(reference, arguments)["loss"]}
        )
        with attach(model, [SelectedTokens(**EXCESS)], **options) as engine:
            engine.backward(model(**given).loss)
            found.append((engine.take_chosen(), [p.grad.clone() for p in model.parameters()]))
    (fly, gradients), (cached, same) = found
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    assert int(fly.trained) == int(cached.trained) == round(0.5 * int(fly.targets))


def test_scores_cost_what_was_executed_and_nothing_where_none_is_needed() -> None:
    arguments, reference = batch(), other_model()

    def cost(policy, **options) -> Any:
        model = tiny_decoder("llama")
        with attach(model, [policy], **options) as engine, count_flops():
            engine.backward(model(**arguments).loss)
        return engine.take_chosen()

    own = cost(SelectedTokens(score="loss", keep=0.5))
    both = cost(SelectedTokens(**EXCESS), reference=reference)
    none = cost(SelectedTokens(score="random", keep=0.5))
    assert own.scoring_flops > 0
    assert both.scoring_flops == 2 * own.scoring_flops
    assert (none.scoring_flops, none.scoring_seconds) == (0, 0.0)
    assert own.scoring_seconds > 0.0
    for chosen in (own, both, none):
        assert chosen.trained_share == pytest.approx(0.5, abs=0.03)
        assert 0.0 < chosen.carried_share < chosen.trained_share


def test_probing_draws_anew_counts_apart_and_leaves_no_trace() -> None:
    model, arguments = tiny_decoder("llama"), batch()
    with attach(model, [SelectedTokens(score="random", keep=0.3)]) as engine:
        losses = []
        for draw in (1, 2):
            with engine.probing(draw):
                loss = model(**arguments).loss
                losses.append(float(loss.detach()))
                engine.backward(loss)
                assert int(engine.report().chosen.targets) == int((next_tokens(arguments["labels"]) != -100).sum())
        assert losses[0] != losses[1]
        assert engine.take_chosen() is None
        assert engine.report().chosen is None
        with engine.disabled():
            assert model(**arguments).logits is not None
        assert engine.report().chosen is None


def test_examples_first_then_their_tokens() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    policies = [
        SelectedTokens(score="loss", keep=0.5),
        Uniform(start=0.0, end=1.0, interrupt=0, keep=0.5),
        TopK(keep=0.5),
    ]
    with attach(model, policies) as engine:
        engine.backward(model(**arguments).loss)
        chosen = engine.take_chosen()
    targets_B = (next_tokens(arguments["labels"]) != -100).sum(1)
    assert int(chosen.targets) == int(targets_B.sum())
    assert (chosen.examples, chosen.chosen_examples) == (4, 2)
    assert int(chosen.trained) < 0.3 * int(targets_B.sum())
    assert "forward" not in model.__dict__
    # Of all: half of the examples, about half of their positions, and half of what arrives.
    assert engine.report().kept_share == pytest.approx(0.125, abs=0.03)


@pytest.mark.parametrize(
    ("policies", "options", "text"),
    [
        ([SelectedTokens(**EXCESS)], {}, r"SelectedTokens needs a reference model: pass attach\(reference=MODEL\)"),
        ([SelectedTokens(**EXCESS)], {"reference": "austen"}, "reference must be a model or 'batch', got 'austen'"),
        ([SelectedTokens(score="loss", keep=0.5)], {"reference": "batch"}, "no policy uses a reference"),
        ([TopK(keep=0.5)], {"reference": "batch"}, "no policy uses a reference"),
    ],
)
def test_what_is_missing_is_told_before_the_model_is_changed(policies, options, text) -> None:
    model = tiny_decoder("llama")
    with pytest.raises(UsageError, match=text):
        attach(model, policies, **options)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_reference_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="64 tokens, like the trained model's, got 70"):
        attach(tiny_decoder("llama"), [SelectedTokens(**EXCESS)], reference=tiny_decoder("llama", vocab_size=70))


def test_a_missing_or_misshapen_column_is_told() -> None:
    model, arguments = tiny_decoder("llama"), batch()
    with attach(model, [SelectedTokens(score="mask", mask_column="loss_mask")]):
        with pytest.raises(UsageError, match=r"reads the column 'loss_mask'.*did you mean loss_masks"):
            model(**arguments, loss_masks=torch.ones(3, 12))
        with pytest.raises(UsageError, match=r"must have the labels' shape \(3, 12\), got \(3, 11\)"):
            model(**arguments, loss_mask=torch.ones(3, 11))
