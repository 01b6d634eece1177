"""RHO-loss: the examples furthest above the reference are trained, as a batch of their own; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from sparsebp_cli.backward import attach
from sparsebp_cli.errors import RecipeError, UnsupportedError, UsageError
from sparsebp_cli.policies.tokens import SelectedTokens
from sparsebp_cli.policy import Step
from sparsebp_cli.recipe import load_recipe
from sparsebp_shelf.example import Examples
from sparsebp_shelf.policies.rho import Rho
from tests.backward.conftest import FAMILIES, VOCABULARY
from tests.backward.families import tiny_decoder
from tests.backward.score.test_scorer import batch


def other_decoder() -> Any:
    """Return a reference with other weights and fewer layers."""
    torch.manual_seed(7)
    options = FAMILIES["llama"] | {"vocab_size": VOCABULARY, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **options)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # so that its losses differ as much as those of a trained model
    return model


def losses(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    """Return the loss of each example alone, without dropout."""
    model.eval()
    with torch.no_grad():
        rows = ({name: value[n : n + 1] for name, value in arguments.items()} for n in range(len(arguments["labels"])))
        found = torch.stack([model(**row).loss for row in rows])
    model.train()
    return found


def gradients(model: Any, arguments: dict[str, Tensor], **options: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    if options:
        with attach(model, options.pop("policy"), **options) as engine:
            engine.backward(model(**arguments).loss)
    else:
        model(**arguments).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_the_largest_differences_are_chosen() -> None:
    loss_B, reference_B = torch.tensor([3.0, 1.0, 2.0, 5.0]), torch.tensor([2.5, 0.1, 0.2, 5.5])
    examples = Examples(4, loss_B, reference_loss_B=reference_B)  # differences 0.5, 0.9, 1.8, -0.5
    for keep, expected in ((0.25, [2]), (0.5, [1, 2]), (0.75, [0, 1, 2])):
        chosen = Rho(keep=keep).choose(examples, Step(0))
        assert chosen is not None
        assert chosen.tolist() == expected


def test_the_gradient_is_that_of_a_batch_of_the_chosen_examples_alone() -> None:
    model, reference, arguments = tiny_decoder("llama"), other_decoder(), batch(6)
    difference = losses(model, arguments) - losses(reference, arguments)
    chosen = difference.argsort(descending=True)[:2].sort().values
    assert chosen.tolist() != losses(model, arguments).argsort(descending=True)[:2].sort().values.tolist()
    alone = gradients(model, {name: value[chosen] for name, value in arguments.items()})
    ours = gradients(model, arguments, policy=Rho(keep=1 / 3), reference=reference)
    assert all(map(torch.equal, ours, alone))
    assert all(parameter.grad is None for parameter in reference.parameters())

    logits = reference(**{name: value for name, value in arguments.items() if name != "labels"}).logits
    next_BT = torch.nn.functional.pad(arguments["labels"][:, 1:], (0, 1), value=-100)
    column = torch.nn.functional.cross_entropy(logits.transpose(1, 2), next_BT, reduction="none").detach()
    with_column = arguments | {"reference_loss": column}
    assert all(map(torch.equal, gradients(model, with_column, policy=Rho(keep=1 / 3), reference="batch"), alone))


def test_the_forward_of_the_reference_is_counted() -> None:
    from sparsebp_cli.backward import count_flops

    model, arguments, found = tiny_decoder("llama"), batch(6), []
    for reference in (other_decoder(), "batch"):
        column = {"reference_loss": torch.zeros(6, 12)} if reference == "batch" else {}
        with attach(model, Rho(keep=1 / 3), reference=reference) as engine, count_flops():
            engine.backward(model(**arguments, **column).loss)
            chosen = engine.take_chosen()
            assert chosen is not None
            found.append(chosen.scoring_flops)
    assert found[0] > found[1] > 0


def test_what_has_no_losses_of_a_reference_is_refused_by_name() -> None:
    model, arguments = tiny_decoder("llama"), batch(4)
    with pytest.raises(UsageError, match=r"Rho needs a reference model: pass attach\(reference=MODEL\)"):
        attach(model, Rho())
    with attach(model, Rho(), reference="batch"), pytest.raises(UsageError, match="needs the column 'reference_loss'"):
        model(**arguments)
    tokens = SelectedTokens(score="excess", keep=0.5, reference="austen-llama")
    with pytest.raises(UnsupportedError, match="SelectedTokens and Rho both compare with a reference model: give one"):
        attach(model, [tokens, Rho()], reference="batch")
    config = AutoConfig.for_model("llama", **(FAMILIES["llama"] | {"num_labels": 4, "pad_token_id": 0}))
    classifier = AutoModelForSequenceClassification.from_config(config).train()
    text = "Rho compares losses with a reference language model"
    with attach(classifier, Rho(), reference="batch"), pytest.raises(UnsupportedError, match=text):
        classifier(input_ids=arguments["input_ids"], labels=torch.tensor([0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("dataset", "policy", "text"),
    [
        (
            "{name: austen}",
            "{name: rho}",
            "'rho' needs a reference model: set its option reference to the name or path",
        ),
        (
            "{name: austen, format: classification}",
            "{name: rho, reference: austen-llama}",
            "needs dataset.format: text or completion, got classification",
        ),
    ],
)
def test_a_recipe_without_what_it_reads_is_refused(dataset: str, policy: str, text: str, tmp_path: Any) -> None:
    file = tmp_path / "recipe.yaml"
    model = "{config: {model_type: llama}, tokenizer: none}"
    file.write_text(f"version: 1\nmodel: {model}\ndataset: {dataset}\ntraining: {{max_steps: 1}}\npolicy: [{policy}]\n")
    with pytest.raises(RecipeError, match=text):
        load_recipe(file)


def test_its_control_draws_as_many_uniformly() -> None:
    assert Rho(keep=0.2).control == {"name": "uniform", "start": 0, "end": 1, "interrupt": 0, "keep": 0.2}
    assert Rho(keep=1.0).control is None
