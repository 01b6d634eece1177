"""``sparsebp audit --write``: the line of lossless in a script, after which it trains as before with less work."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sparsebp_audit.verb.script_line import describe_change, find_change
from sparsebp_cli.errors import UnsupportedError

Audit = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = """
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0))
    data = []
    for length in (24, 40, 30, 48, 20, 36, 44, 28) * 2:
        ids = torch.randint(3, 64, (48,))
        ids[:16], ids[length:] = torch.arange(16) + 3, 0
        labels = ids.clone()
        labels[:16] = labels[length:] = -100
        data.append({"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(48) < length).long()})
    options = dict(max_steps=12, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=1e-2)
    options |= dict(optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant")
    trainer = Trainer(model, TrainingArguments(tempfile.mkdtemp(), **options), train_dataset=data)
    trainer.train()
    return trainer


if __name__ == "__main__":
    trainer = main()
"""


def train(file: Path) -> tuple[Any, int]:
    """Run a script here, and return its trainer and the FLOPs of it all."""
    with FlopCounterMode(display=False) as counter:
        trainer = runpy.run_path(str(file), run_name="__main__")["trainer"]
    return trainer, counter.get_total_flops()


@pytest.mark.slow
def test_the_changed_script_trains_to_the_same_weights_with_less_work(tmp_path: Path, run_audit: Audit) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    shown = run_audit("--steps", "2", "--stop", "--", sys.executable, script)
    line = 'import sparsebp_cli as sbp; sbp.PolicyCallback("lossless").join(trainer)'
    assert shown.stdout.splitlines()[-2:] == [f"next: `--write` puts into {script}:", f"   {line}"]
    done = run_audit("--write", "--steps", "2", "--stop", "--", sys.executable, script)
    assert done.returncode == 0, done.stderr[-2000:]
    added = [line for line in done.stdout.splitlines() if line.startswith("+")]
    assert added == [
        f"+++ {script}",
        "+import sparsebp_cli as sbp",
        '+    sbp.PolicyCallback("lossless").join(trainer)',
    ]
    old = script.with_name("train.py.orig")
    assert f"written: {script}; the old file: {old}" in done.stderr
    assert old.read_text(encoding="utf-8") == SCRIPT
    (plain, plain_flops), (packed, packed_flops) = train(old), train(script)
    # By plain gradient descent, weights differ as the sum of all gradients does.
    for before, after in zip(plain.model.parameters(), packed.model.parameters(), strict=True):
        assert torch.allclose(before, after, rtol=1e-5, atol=1e-6)
    [engine] = [found.engine for found in packed.callback_handler.callbacks if hasattr(found, "engine")]
    assert "gradient compared with the ordinary one in" in engine.notes["packing"]
    # The first step is compared with a plain one, and the trainer counts its work; all others have less.
    assert packed_flops < 0.75 * plain_flops


def test_a_loop_of_its_own_gets_the_lines_for_a_loop(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "for batch in batches:\n    value = model(**batch).loss\n    value.backward()\n", encoding="utf-8"
    )
    attach = 'import sparsebp_cli as sbp; engine = sbp.attach(model, "lossless", optimizer=optimizer)'
    assert describe_change(script) == [
        ("write by hand, before the loop", attach),
        ("in place of the call in line 3 of train.py", "engine.backward(value)"),
    ]
    with pytest.raises(UnsupportedError, match=r"engine.backward\(value\) in line 3; for a trainer: write by hand"):
        find_change(script)
    for other in ("accelerator.backward(loss)\n", "f(trainer)\n", SCRIPT.replace("trainer.train()", "")):
        script.write_text(other, encoding="utf-8")
        assert describe_change(script)[0][0] == "write by hand, after the line that creates the trainer"
