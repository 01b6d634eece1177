"""Attentions that count the distances of their rows: those of the chosen rows are what their positions say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sparsebp_cli.backward.kind.token import row_plan as planning
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.backward.conftest import VOCABULARY

from .case import assert_near, make_batch, plain_step, step
from .definition import step_by_definition
from .test_joined import unequal
from .test_padding import trained_padding

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {},
    "mpt": {},
    "falcon": {"alibi": True, "parallel_attn": False, "multi_query": False},
    "gpt_neo": {"intermediate_size": 48, "window_size": 4, "attention_types": [[["global", "local"], 1]]},
}


def biased(family: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | options))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.train()


@pytest.mark.parametrize("family", FAMILIES)
def test_distances_are_those_of_the_positions_however_the_rows_are_arranged(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = biased(family)
    cases = [(make_batch("scattered"), False), (make_batch("scattered"), True), (make_batch("prompt"), False)]
    for batch, joins in cases:
        monkeypatch.setattr(planning, "_joining_pays", lambda *_, joins=joins, **__: joins)
        assert_near(step(model, batch, "detach"), step_by_definition(model, batch, "detach"))


@pytest.mark.parametrize("mask", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trained_padding_has_its_own_distances(family: str, mask: Any) -> None:
    model, batch = biased(family), trained_padding(mask)
    assert_near(step(model, batch, "exact"), plain_step(model, batch))
    assert_near(step(model, batch, "detach"), step_by_definition(model, batch, "detach"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpointed_layer_with_distances_gives_the_same_gradient(family: str) -> None:
    model = biased(family)
    stored = step(model, unequal(), "detach")
    checkpoint_activations(model)
    assert_near(step(model, unequal(), "detach"), stored, 1e-6)
