"""The judge beside an enumeration, for every tiny decoder of the installed transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparsebp_audit.isolation import judge_batch
from sparsebp_audit.report import BatchJudgement
from tests.backward.isolation.enumeration import (
    MOVED,
    Enumerated,
    enlarge,
    enumerate_row,
    every_enlarged_model,
    packed_row,
)
from tests.backward.token.test_every_decoder import tiny

SAMPLE = ("LlamaConfig", "GptOssConfig", "OPTConfig", "MambaConfig", "BertConfig", "Qwen3MoeConfig", "Gemma3TextConfig")
MIXED = {"GptOssConfig", "OPTConfig", "MambaConfig", "BertConfig"}  # transformers 5.24


def explain_fault(judged: BatchJudgement, seen: Enumerated) -> str:
    """Return where a judgement contradicts what was enumerated; empty if it does not."""
    if judged.verdict == "unjudged":
        return f"not judged: {judged.reason}"
    if (judged.verdict == "mixed") is not seen.is_mixed:
        return f"judged {judged.verdict}, enumerated {seen}"
    read = {(pair.source, pair.target) for pair in judged.pairs}
    invented = [pair for pair in read if seen.moves[pair] == 0.0]
    targets = {target for _, target in read}
    missed = [pair for pair, moved in seen.moves.items() if pair[1] in targets and moved > MOVED and pair not in read]
    if seen.is_mixed and max(seen.moves.values()) > MOVED and not read:
        return "no pair was named"
    if judged.cost_steps > 3.0:
        return f"cost {judged.cost_steps:.2f} plain steps"
    return f"pairs invented {invented}, missed {missed}" if invented or missed else ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_packed_row_is_judged_as_an_enumeration_judges_it(name: str) -> None:
    config = next(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING if kind.__name__ == name)
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    model = tiny(config, kinds[0] if isinstance(kinds, tuple) else kinds)
    assert isinstance(model, PreTrainedModel)
    enlarge(model)
    judged = judge_batch(model, packed_row())
    assert explain_fault(judged, enumerate_row(model, packed_row())) == ""
    assert (judged.verdict == "mixed") is (name in MIXED)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_every_decoder_is_judged_as_an_enumeration_judges_it() -> None:
    faults, counts = {}, {"mixed": 0, "alone": 0}
    for name, model in every_enlarged_model():
        judged = judge_batch(model, packed_row())
        try:
            seen = enumerate_row(model, packed_row())
        except Exception as error:  # a model that says so
            if judged.verdict != "unjudged":
                faults[name] = f"judged {judged.verdict}, but raises {type(error).__name__}"
            continue
        if not all(torch.isfinite(torch.tensor(list(seen.moves.values())))):
            continue
        fault = explain_fault(judged, seen)
        if fault:
            faults[name] = fault
        else:
            counts[judged.verdict] += 1
    assert faults == {}
    assert counts["mixed"] >= 45
    assert counts["alone"] >= 90
