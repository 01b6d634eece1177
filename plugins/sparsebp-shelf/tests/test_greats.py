"""GREATS: examples are added greedily, by what they gain less what those before have gained; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsebp_cli.backward import attach
from sparsebp_cli.backward.phase import attach_phases
from sparsebp_cli.composition import PolicyFacts, Setup, refuse
from sparsebp_cli.errors import RecipeError, UnsupportedError, UsageError
from sparsebp_cli.policy import Examples, Step
from sparsebp_cli.recipe import load_recipe
from sparsebp_shelf.example import Uniform
from sparsebp_shelf.part import Subnet
from sparsebp_shelf.policies.greats import Greats, select_greedily
from tests.backward.families import tiny_decoder
from tests.backward.score.test_scorer import batch

GAIN_B = torch.tensor([1.0, 0.9, 0.5, 0.1])
CURVATURE_BB = torch.tensor([[1, 0.8, 0, 0], [0.8, 1, 0.1, 0], [0, 0.1, 1, 0], [0, 0, 0, 1]])


def attached(policy: Any, model: Any = None, **options: Any) -> Any:
    model = tiny_decoder("llama") if model is None else model
    given = {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "validation": batch(4)} | options
    return attach(model, policy, **{name: value for name, value in given.items() if value is not None})


def test_the_example_most_like_the_first_one_is_added_last() -> None:
    assert select_greedily(GAIN_B, CURVATURE_BB, 3).tolist() == [0, 2, 3]
    assert select_greedily(GAIN_B, CURVATURE_BB, 4).tolist() == [0, 2, 3, 1]
    assert select_greedily(GAIN_B, torch.zeros(4, 4), 3).tolist() == [0, 1, 2]


def test_the_second_order_term_grows_with_the_learning_rate() -> None:
    for rate, expected in ((1.0, [0, 2]), (0.1, [0, 1]), (0.0, [0, 1])):
        examples = Examples(4, GAIN_B, product_B=GAIN_B, product_BB=CURVATURE_BB, learning_rate=rate)
        chosen = Greats(keep=0.5).choose(examples, Step(0))
        assert chosen is not None
        assert chosen.tolist() == expected


def test_its_control_draws_as_many_uniformly() -> None:
    assert Greats(keep=0.2).control == {"name": "uniform", "start": 0, "end": 1, "interrupt": 0, "keep": 0.2}
    assert Greats(keep=1.0).control is None
    assert Greats(keep=1.0).num_validation == 0


def test_what_lacks_validation_examples_or_has_them_for_nothing_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"Greats compares gradients with gradients of validation examples: pass attach\("
    ):
        attached(Greats(), validation=None)
    with pytest.raises(UsageError, match="validation is given, but no policy uses it"):
        attached(Uniform(start=0.0, end=1.0))
    with pytest.raises(
        UsageError, match="validation must have at least 5 examples, because Greats draws that many, got 4"
    ):
        attached(Greats(validation_batch_size=5))
    with pytest.raises(UsageError, match="validation must have labels, got input_ids"):
        attached(Greats(), validation={"input_ids": batch(4)["input_ids"]})


def test_what_it_is_not_built_with_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match=r"Greats needs attach\(optimizer=\.\.\.\): its second-order term has the"
    ):
        attached(Greats(), optimizer=None)
    with pytest.raises(UnsupportedError, match=r"Greats does not support activation checkpointing \(at 'model'\)"):
        attached(Greats(), tiny_decoder("llama", checkpointing=True))
    with pytest.raises(UnsupportedError, match="Greats with segments=2 is not supported"):
        attached(Greats(), segments=2)
    with pytest.raises(UnsupportedError, match="Greats and Subnet in one training is not supported: give one of them"):
        attached([Greats(), Subnet()])
    frozen = tiny_decoder("llama").requires_grad_(requires_grad=False)
    frozen.model.norm.weight.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="needs at least one linear layer whose weight is trained"):
        attached(Greats(), frozen)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loop": "trainer"}, "Greats needs validation examples, which a Trainer does not give; run a recipe"),
        ({"float8": "lm_head"}, "Greats with float8='lm_head' is not supported: float8 rounds"),
        ({"checkpointing": "full"}, "Greats needs checkpointing='none', got 'full'"),
    ],
)
def test_loops_and_options_that_do_not_go_with_it_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        refuse(Setup([PolicyFacts.of(Greats())], options))
    refuse(Setup([PolicyFacts.of(Greats(keep=1.0))], options))


def test_a_phase_that_compares_has_the_validation_examples_of_the_schedule() -> None:
    model, schedule = tiny_decoder("llama"), [{"until": 0.5, "policy": "dense"}, {"policy": Greats(keep=0.5)}]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    chosen = []
    with attach_phases(model, schedule, optimizer=optimizer, num_steps=2, validation=batch(4)) as engine:
        for _ in range(2):
            engine.backward(model(**batch(4)).loss)
            chosen.append(engine.engine.take_chosen())
            optimizer.step()
    assert chosen[0] is None
    assert chosen[1].chosen_examples == 2
    with pytest.raises(UsageError, match="validation is given, but no policy uses it"):
        attach_phases(
            model,
            [{"until": 0.5, "policy": "dense"}, {"policy": "dense"}],
            optimizer=optimizer,
            num_steps=2,
            validation=batch(4),
        )


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("", "'greats' compares gradients with those of validation examples: give dataset.policy_validation_examples"),
        ("backward: {checkpointing: full}", "'greats' needs backward.checkpointing: none, got full"),
    ],
)
def test_a_recipe_without_what_it_reads_is_refused(more: str, text: str, tmp_path: Any) -> None:
    part = ", policy_validation_examples: 8" if more else ""
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"version: 1\nmodel: {{config: {{model_type: llama}}, tokenizer: none}}\ndataset: {{name: austen{part}}}\n"
        f"training: {{max_steps: 1}}\npolicy: [{{name: greats}}]\n{more}\n"
    )
    with pytest.raises(RecipeError, match=text):
        load_recipe(file)
