"""The engine of a plain module costs little beyond torch itself: nothing heavy is imported, and nothing is printed."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("accelerate", "mlflow", "peft", "sympy", "torch._dynamo", "torchao", "transformers")

ATTACH = f"""
import sys
import torch
import sparsebp_cli as sbp
model = torch.nn.Linear(4, 4)  # without an optimizer: torch's own import torch._dynamo
engine = sbp.attach(model, [sbp.make_policy("topk", keep=0.5, along="rows")], sites="linears")
engine.backward(model(torch.ones(2, 4)).sum())
engine.detach()
assert model.weight.grad is not None
print([name for name in {HEAVY!r} if name in sys.modules])
"""


def test_attach_imports_neither_transformers_nor_dynamo_and_is_silent() -> None:
    done = subprocess.run([sys.executable, "-c", ATTACH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
