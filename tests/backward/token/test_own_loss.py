"""A model whose forward computes its loss itself is tried once: it is refused unless that is transformers' loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForCausalLM, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.backward import AttentionLayout, BranchLayout
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy.token import TokenMode

from .case import Marked, assert_near, make_batch, plain_step, step
from .test_families import decoder

BART = (BranchLayout("self_attn", "out_proj", attention=AttentionLayout(("q_proj",), ("k_proj", "v_proj"))),)


class ShiftsItself(LlamaForCausalLM):
    """Computes transformers' loss in code of its own."""

    def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
        output = super().forward(input_ids=input_ids, **options)
        if labels is not None:
            logits_NV = output.logits[:, :-1].flatten(0, 1)
            output.loss = nn.functional.cross_entropy(logits_NV, labels[:, 1:].flatten())
        return output


def bart() -> BartForCausalLM:
    sizes = {"d_model": 32, "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4}
    return BartForCausalLM(BartConfig(vocab_size=64, **sizes)).train()


@pytest.fixture
def _bart_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "bart_layout-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bart-layout\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sparsebp.layouts]\nBartDecoderLayer = {__name__}:BART\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_bart_layout")
@pytest.mark.parametrize("mode", ["exact", "detach"])
@pytest.mark.parametrize("execution", ["fast", "reference"])
def test_a_model_that_does_not_shift_its_labels_is_refused(mode: TokenMode, execution: str) -> None:
    model, before = bart(), torch.get_rng_state()
    with pytest.raises(UnsupportedError, match="forward of BartForCausalLM computes another loss") as caught:
        step(model, make_batch("scattered"), mode, execution=execution)
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_computes_the_same_loss_itself_is_right() -> None:
    model, batch = decoder("llama"), make_batch("scattered", "right")
    model.__class__ = ShiftsItself
    assert_near(step(model, batch, "exact"), plain_step(model, batch))


@pytest.mark.usefixtures("_bart_layout")
def test_a_loss_of_ones_own_from_the_logits_of_such_a_model_is_right() -> None:
    model, batch = bart(), make_batch("scattered")
    with sbp.attach(model, [Marked()]) as engine:
        engine.columns(**{name: batch.arguments[name] for name in ("labels", "trained", "carries")})
        logits = model(input_ids=batch.inputs["input_ids"]).logits
    assert torch.equal((logits.abs().sum(-1) > 0)[:, :-1], batch.trained[:, :-1])
