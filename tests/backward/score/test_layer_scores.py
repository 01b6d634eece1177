"""Scores from inside of the layers are those of their definitions, leave no trace, and cost what they execute."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebp_cli.backward import ModuleTrace, attach, count_flops
from sparsebp_cli.backward.decoder.decoder import find_decoder
from sparsebp_cli.backward.kind.score import scorer as room
from sparsebp_cli.backward.kind.score.cost import ScoringCost
from sparsebp_cli.backward.kind.score.layer_scores import INSIDE
from sparsebp_cli.backward.kind.score.scorer import Scorer, next_tokens
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policies.tokens import SelectedTokens
from sparsebp_cli.policy import Score
from tests.backward.conftest import VOCABULARY
from tests.backward.families import tiny_decoder
from tests.backward.score.test_scorer import batch


def score(model: Any, arguments: dict[str, Tensor], wanted: set[Score] | frozenset[Score] = INSIDE) -> Any:
    scorer = Scorer(model, "the test", find_decoder(model))
    return scorer.score(arguments, next_tokens(arguments["labels"]), partial(type(model).forward, model), wanted)


def by_definition(model: Any, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the scores from what a plain forward returns of all layers, with a graph of everything."""
    model = model.eval()
    model.config._attn_implementation = "eager"
    layers, added = find_decoder(model).layers, []
    handles = [
        layer.module.register_forward_hook(
            lambda _, args, output: added.append((output[0] if isinstance(output, tuple) else output) - args[0])
        )
        for layer in layers
    ]
    inputs = {name: value for name, value in arguments.items() if name != "labels"}
    output = model(**inputs, use_cache=False, output_attentions=True, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    next_BT, real_BT = next_tokens(arguments["labels"]), arguments["attention_mask"] == 1
    losses = nn.functional.cross_entropy(output.logits.transpose(1, 2), next_BT, reduction="none", ignore_index=-100)
    (grad,) = torch.autograd.grad(losses.sum(), output.hidden_states[len(layers) - 1])
    received_BT = torch.zeros(next_BT.shape)
    for example, query in real_BT.nonzero().tolist():
        received_BT[example] += output.attentions[-1][example, :, query].mean(0)
    found = {
        "attention": received_BT,
        "last_gradient": grad.norm(dim=-1),
        "update": sum(one.norm(dim=-1) for one in added),
    }
    return {name: value.detach().masked_fill(next_BT == -100, 0.0) for name, value in found.items()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox", "phi3", "olmo2", "mistral"])
def test_scores_are_those_of_the_definitions(family: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_LOGITS", 5 * VOCABULARY)  # the head in pieces
    if family == "gemma2" and attention == "sdpa":
        attention = "eager"  # its soft caps know no sdpa
    model, arguments = tiny_decoder(family, attn_implementation=attention), batch()
    found, expected = score(model, arguments), by_definition(model, arguments)
    for name, wanted_BT in expected.items():
        torch.testing.assert_close(
            found[name], wanted_BT, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert wanted_BT[wanted_BT > 0].std() > 1e-3 * wanted_BT.max()


def test_scoring_inside_of_layers_leaves_no_trace() -> None:
    model, arguments = tiny_decoder("llama", attention_dropout=0.5), batch()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    first, state = score(model, arguments), torch.get_rng_state()
    again = score(model, arguments)
    assert all(torch.equal(first[name], again[name]) for name in first), "dropout was on"
    assert not any(value.requires_grad for value in first.values())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        score(model, arguments)
        assert not torch.is_grad_enabled()


def test_the_gradient_costs_one_layer_and_the_head_and_all_of_it_counts_as_forward() -> None:
    model, arguments = tiny_decoder("llama"), batch()
    found = {}
    for name in ("loss", "update", "attention", "last_gradient"):
        with ModuleTrace(model) as trace, count_flops(trace) as count, ScoringCost(torch.device("cpu")) as cost:
            score(model, arguments, {name})
        assert cost.flops == count.total == count.forward.total()
        assert not count.backward
        assert not count.recomputed
        found[name] = count
    examples, targets = len(arguments["labels"]), int((next_tokens(arguments["labels"]) != -100).sum())
    head = 2 * model.lm_head.weight.numel()
    layers = found["update"].total - examples * head  # of each example the last position, which nobody reads
    assert found["attention"].total == found["update"].total
    assert found["loss"].total == layers + (examples + targets) * head
    plain = tiny_decoder("llama").eval()
    hidden = plain.model(arguments["input_ids"], arguments["attention_mask"], output_hidden_states=True).hidden_states
    target_BT = next_tokens(arguments["labels"])
    loss = nn.functional.cross_entropy(plain.lm_head(hidden[-1][target_BT != -100]), target_BT[target_BT != -100])
    with count_flops() as partial_backward:
        torch.autograd.grad(loss, hidden[-2])
    assert found["last_gradient"].total - found["loss"].total == partial_backward.total
    with count_flops() as backward:
        plain(**arguments).loss.backward()
    assert partial_backward.total < backward.total / 4


@pytest.mark.parametrize("mode", ["exact", "detach"])
@pytest.mark.parametrize(
    "options", [{"score": "tokenseek"}, {"score": "tokenseek", "attention_weight": 0.0}, {"score": "update"}], ids=str
)
def test_a_policy_trains_the_largest_scores_and_its_backward_costs_nothing_more(options: Any, mode: Any) -> None:
    model, arguments = tiny_decoder("llama"), batch()
    with attach(model, SelectedTokens(**options, keep=0.25, mode=mode)) as engine:
        with ModuleTrace(model) as trace, count_flops(trace) as count:
            loss = model(**arguments).loss
            chosen = engine.take_chosen()
            assert count.total == count.forward.total()
            assert 0 < chosen.scoring_flops < count.total
            engine.backward(loss)
        counted = [site.calls for site in engine.report().sites]
    assert set(counted) == {1}
    plain = tiny_decoder("llama")
    expected = by_definition(tiny_decoder("llama"), arguments)
    means = {name: value.sum() / (value > 0).sum() for name, value in expected.items()}
    total_BT = expected["update"]
    if options["score"] == "tokenseek":
        share = options.get("attention_weight", 0.5)
        parts = (("attention", share), ("last_gradient", 1 - share))
        total_BT = sum(part * expected[name] / means[name] for name, part in parts)
    number = round(0.25 * int((total_BT > 0).sum()))
    assert int(chosen.trained) == number
    if mode == "exact":
        kept = torch.zeros(total_BT.numel(), dtype=torch.bool)
        kept[total_BT.flatten().topk(number).indices] = True
        logits_BTV = plain(**{k: v for k, v in arguments.items() if k != "labels"}).logits
        losses = nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1)[kept], next_tokens(arguments["labels"]).flatten()[kept]
        )
        losses.backward()
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_everything_kept_is_dense() -> None:
    selected, dense, arguments = tiny_decoder("llama"), tiny_decoder("llama"), batch()
    arguments = {name: value[:1] for name, value in arguments.items()}  # without padding, of which no rows are computed
    arguments["labels"] = arguments["input_ids"]
    with attach(selected, SelectedTokens(score="tokenseek", keep=1.0)) as engine:
        engine.backward(selected(**arguments).loss)
    dense(**arguments).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(selected.parameters(), dense.parameters(), strict=True))


def test_a_mask_by_query_is_refused_with_a_score_of_attention() -> None:
    model, arguments = tiny_decoder("llama"), batch()
    arguments["attention_mask"] = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    with pytest.raises(UnsupportedError, match=r"a score of attention needs an attention_mask of shape \(B, T\)"):
        score(model, arguments, {"attention"})
