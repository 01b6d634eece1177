"""Write the model of a checkpoint as a transformers folder, for ``sparsebp model --checkpoint``.

The request is JSON: ``plan`` (its file), ``labels`` (the number of classes, or null), ``step``, and an existing
``folder``. A checkpoint has trained parameters and buffers; frozen ones come from the recipe again, random ones from
its seed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate.utils import set_seed
from transformers.utils.logging import disable_progress_bar

from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.plan import Plan
from sparsebp_cli.worker.answer import converse
from sparsebp_cli.worker.build import write_whole
from sparsebp_cli.worker.checkpoint import CheckpointFolder
from sparsebp_cli.worker.model import build_model, build_tokenizer, read_architecture


def rebuild(request: str, tell: Callable[[str, int, int], None]) -> Mapping[str, object]:
    """Write the model. Raise UnsupportedError if the checkpoint does not fit the recipe's model."""
    asked = json.loads(request)
    plan_file = Path(asked["plan"])
    recipe, step = Plan.load(plan_file).recipe, int(asked["step"])
    tell(f"the model of step {step}", 0, 0)
    disable_progress_bar()
    tokenizer = build_tokenizer(recipe.model)
    if recipe.dataset.chat_template is not None:
        tokenizer.chat_template = recipe.dataset.chat_template
    architecture = read_architecture(recipe.model, recipe.dataset.format)
    set_seed(recipe.training.seed)  # as in the run, before its weights were created
    model = build_model(recipe.model, tokenizer, asked["labels"], architecture=architecture)
    own = model.state_dict(keep_vars=True)
    weights = CheckpointFolder(plan_file.parent / "checkpoints", 1, writes=False).load(step).weights
    for name, tensor in weights.items():
        if name not in own or own[name].shape != tensor.shape:
            raise UnsupportedError(
                f"the checkpoint of step {step} has the weight {name}, which the recipe's model does not have"
            )
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
    write_whole(model, tokenizer, Path(asked["folder"]))
    return {}


if __name__ == "__main__":
    sys.exit(converse(rebuild))
