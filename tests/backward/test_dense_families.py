"""Dense through the linears is PyTorch's own backward, to the last bit, in fifteen decoder families."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

from .conftest import tokens
from .families import DECODERS

pytestmark = pytest.mark.promise("R18")


def _gradients(
    family: str, attention: str, dtype: torch.dtype, checkpointed: bool, attached: bool
) -> list[Tensor | None]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **DECODERS[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).train()
    if checkpointed:
        checkpoint_activations(model)
    ids = tokens(0)
    torch.manual_seed(1)
    if attached:
        with sbp.attach(model, [sbp.make_policy("dense")]) as engine:
            engine.backward(model(input_ids=ids, labels=ids).loss)
    else:
        model(input_ids=ids, labels=ids).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "attention"),
    # transformers has no gemma2 with sdpa
    [(f, a) for f in DECODERS for a in ("eager", "sdpa") if (f, a) != ("gemma2", "sdpa")],
)
def test_dense_is_plain_pytorch(family: str, attention: str, dtype: torch.dtype, checkpointed: bool) -> None:
    plain, ours = (_gradients(family, attention, dtype, checkpointed, attached) for attached in (False, True))
    assert all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(plain, ours, strict=True)
    )
