"""What the process that workers are forked from has imported: each of them would spend most of its time on it."""

from __future__ import annotations

import gc
from importlib import import_module

for name in (
    "sparsebp_cli.worker.training",
    "sparsebp_cli.worker.build",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "datasets",
):
    import_module(name)
import_module("sparsebp_cli.worker.environment").describe_environment()  # reads metadata once
import_module("sparsebp_cli.policy").find_policies()
gc.freeze()  # a worker's collections do not walk through all of it
