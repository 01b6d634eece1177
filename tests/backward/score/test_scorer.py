"""The scores of a forward without gradients are those of the plain logits, in every family, and leave no trace."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparsebp_cli.backward import ModuleTrace, count_flops
from sparsebp_cli.backward.kind.score import scorer as room
from sparsebp_cli.backward.kind.score.cost import ScoringCost
from sparsebp_cli.backward.kind.score.scorer import Scorer, next_tokens
from sparsebp_cli.errors import UnsupportedError
from tests.backward.conftest import VOCABULARY
from tests.backward.families import DECODERS, tiny_decoder
from tests.backward.token.test_every_decoder import tiny

WANTED = ("loss", "entropy")


def batch(num_examples: int = 3, length: int = 12) -> dict[str, torch.Tensor]:
    """Right-padded examples of different length, the first third of each not trained."""
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(3, VOCABULARY, (num_examples, length), generator=generator)
    mask_BT, labels_BT = torch.ones_like(ids_BT), ids_BT.clone()
    for row in range(num_examples):
        mask_BT[row, length - row :] = 0
    labels_BT[mask_BT == 0] = -100
    labels_BT[:, : length // 3] = -100
    return {"input_ids": ids_BT, "labels": labels_BT, "attention_mask": mask_BT}


def score(model, arguments, wanted=WANTED):
    return Scorer(model, "the test").score(
        arguments, next_tokens(arguments["labels"]), partial(type(model).forward, model), wanted
    )


@pytest.mark.parametrize("rows", [None, 5], ids=["at-once", "in-pieces"])
@pytest.mark.parametrize("family", DECODERS)
def test_scores_are_those_of_the_plain_logits(family, rows, monkeypatch) -> None:
    if rows is not None:
        monkeypatch.setattr(room, "MOST_LOGITS", rows * VOCABULARY)
    options = {"final_logit_softcapping": 5.0} if family.startswith("gemma2") else {}
    model, arguments = tiny_decoder(family, **options), batch()
    found = score(model, arguments)
    with torch.no_grad():
        logits_BTV = model.eval()(**{k: v for k, v in arguments.items() if k != "labels"}).logits.float()
    next_BT = next_tokens(arguments["labels"])
    loss_BT = nn.functional.cross_entropy(logits_BTV.transpose(1, 2), next_BT, reduction="none", ignore_index=-100)
    entropy_BT = torch.distributions.Categorical(logits=logits_BTV).entropy().masked_fill(next_BT == -100, 0.0)
    torch.testing.assert_close(found["loss"], loss_BT, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["entropy"], entropy_BT, rtol=1e-5, atol=1e-5)
    assert found["loss"][next_BT != -100].std() > 0.01


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "opt", "bart", "mamba", "modernbert-decoder"])
def test_routers_and_other_outputs_beside_the_hidden_states_do_not_matter(family) -> None:
    config = CONFIG_MAPPING[family]
    model, arguments = tiny(config, MODEL_FOR_CAUSAL_LM_MAPPING[config]), batch()
    found = score(model, arguments)["loss"]
    with torch.no_grad():
        inputs = {name: value for name, value in arguments.items() if name != "labels"}
        logits_BTV = model.eval()(**inputs, use_cache=False).logits.float()
    next_BT = next_tokens(arguments["labels"])
    loss_BT = nn.functional.cross_entropy(logits_BTV.transpose(1, 2), next_BT, reduction="none", ignore_index=-100)
    torch.testing.assert_close(found, loss_BT, rtol=1e-5, atol=1e-5)


def test_scoring_leaves_no_trace() -> None:
    model = tiny_decoder("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model.transformer.h[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    hooks, state = len(model.transformer._forward_hooks), torch.get_rng_state()
    first = score(model, batch())
    assert torch.equal(first["loss"], score(model, batch())["loss"]), "dropout was on"
    assert torch.equal(state, torch.get_rng_state())
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert len(model.transformer._forward_hooks) == hooks
    assert "forward" not in model.transformer.__dict__
    assert not any(value.requires_grad for value in first.values())


def test_everything_is_put_back_after_an_error() -> None:
    model, arguments = tiny_decoder("llama"), batch()

    def fail(**given):
        if "logits_to_keep" in given:
            return type(model).forward(model, **given)
        raise RuntimeError("no head")

    with pytest.raises(RuntimeError, match="no head"):
        Scorer(model, "the test").score(arguments, next_tokens(arguments["labels"]), fail, WANTED)
    assert "forward" not in model.model.__dict__
    assert not model.model._forward_hooks
    assert model.model.training


def test_the_head_is_multiplied_for_targets_only_and_never_for_all_at_once(monkeypatch) -> None:
    monkeypatch.setattr(room, "MOST_LOGITS", 4 * VOCABULARY)
    model, arguments, seen = tiny_decoder("llama"), batch(), []
    model.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits.shape[-2]))
    score(model, arguments, ("loss",))
    assert sum(seen[1:]) == int((next_tokens(arguments["labels"]) != -100).sum())
    assert max(seen) == 4
    assert seen[0] == 1  # the pass through the layers


def test_the_cost_is_that_of_a_forward_and_belongs_to_its_modules() -> None:
    model, arguments = tiny_decoder("llama"), batch()
    with torch.no_grad(), count_flops() as plain:
        model.eval()(**arguments)
    with ModuleTrace(model.train()) as trace, count_flops(trace) as count, ScoringCost(torch.device("cpu")) as cost:
        score(model, arguments, ("loss",))
    assert cost.flops == count.total == count.forward.total()
    assert cost.seconds > 0.0
    head = count.forward["lm_head"]
    assert count.total - head == plain.total - 2 * arguments["labels"].numel() * model.lm_head.weight.numel()
    with ScoringCost(torch.device("cpu")) as cost:
        score(model, arguments, ("loss",))
    assert cost.flops == 0


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the test needs a transformers model with a language-modelling head"):
        Scorer(nn.Linear(2, 2), "the test")
    with pytest.raises(UnsupportedError, match="got LlamaModel"):
        Scorer(tiny_decoder("llama").model, "the test")


def test_a_forward_that_goes_past_its_base_is_refused() -> None:
    class Past(LlamaForCausalLM):
        def forward(self, input_ids, logits_to_keep=0, **_):
            return self.lm_head(self.model.embed_tokens(input_ids))

    with pytest.raises(UnsupportedError, match="the test needs a model that calls its base model; Past does not"):
        score(Past(tiny_decoder("llama").config), batch())
