"""FLOPs of a policy update under trl's fused head: plain, packed, and with a part of it drawn.

    python benchmarks/drawn.py

Four groups of four answers, prompt 48, answers 32, a llama of three layers with a vocabulary of 8,192; two groups have
no advantage. Forward and backward of the update alone, without references. Counted on the CPU by the engine's counter.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops

PACKED = {"name": "lossless", "verify": "never"}
UNIFORM = {"name": "uniform", "keep": 0.25, "start": 0, "end": 1, "interrupt": 0}
FORMS: dict[str, list[Any]] = {
    "plain": [],
    "uniform, a quarter": [UNIFORM],
    "lossless": [PACKED],
    "lossless, uniform, a quarter": [PACKED, UNIFORM],
}


def count(policies: list[Any]) -> int:
    """Return the FLOPs of the second update."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    prompts = torch.randint(3, 8192, (4, 48)).repeat_interleave(4, 0)
    ids = torch.cat((prompts, torch.randint(3, 8192, (16, 32))), 1)
    labels = ids.masked_fill(torch.arange(80) < 48, -100)
    advantages = torch.tensor([1.0, -1, 0.5, -0.5, *[0.0] * 4, -1, 1, 1, -1, *[0.0] * 4])
    total = 0
    with sbp.attach(model, policies) as engine:
        for _ in range(2):
            if UNIFORM not in policies:  # lossless then gets a part of the batch
                engine.columns(example_weight=advantages)
            with count_flops() as flops:
                output = model(input_ids=ids, labels=labels, fused_lm_head=True)
                ratio = (output.log_probs - output.log_probs.detach()).exp()
                engine.backward(-(ratio * advantages[:, None] * output.label_mask).sum() / output.label_mask.sum())
            total = int(flops.by_operator.total())
    return total


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    plain = count([])
    print("| update | MFLOP | share |\n| --- | --- | --- |")
    for name, policies in FORMS.items():
        spent = count(policies)
        print(f"| {name} | {spent / 1e6:,.0f} | {spent / plain:.2f} |")


if __name__ == "__main__":
    main()
