"""Load a policy's reference model and its loss of every training token, cached on disk or computed batch by batch.

The cache key depends only on the data, the reference's weights and the numerical precision. The cost of scoring is
stored with the scores, so that runs that reuse them still report it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from sparsebp_cli.backward import count_flops
from sparsebp_cli.backward.kind.score.cost import ScoringCost
from sparsebp_cli.backward.kind.score.scorer import Scorer, next_tokens
from sparsebp_cli.policy import Policy, ReferenceReader
from sparsebp_cli.policy.reference import REFERENCE_COLUMN
from sparsebp_cli.recipe.schema import ModelSection, Recipe
from sparsebp_cli.run import home
from sparsebp_cli.worker.batch import ordered_batches
from sparsebp_cli.worker.data import Data
from sparsebp_cli.worker.model import build_model


@dataclass(frozen=True)
class Reference:
    """The data with reference losses, or the model that computes them during training."""

    data: Data  # training examples have the column reference_loss if scores are cached
    # argument reference of attach(): the model, "batch", or None without a reference
    attached: nn.Module | Literal["batch"] | None = None
    facts: dict[str, object] | None = None  # for the event log
    columns: frozenset[str] = frozenset()  # additional columns that a batch must include


def build_reference(
    policies: Sequence[Policy],
    recipe: Recipe,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    tell: Callable[[str], None],
) -> Reference:
    """Load the reference model that a policy names, and its cached scores. ``tell`` receives a line before scoring,
    which may take long. Without such a policy, return only the data."""
    policy = next((p for p in policies if isinstance(p, ReferenceReader) and p.reads_reference), None)
    if policy is None:
        return Reference(data)
    section = ModelSection(name=policy.reference, dtype=recipe.model.dtype, attention=recipe.model.attention)
    model: nn.Module = build_model(section, tokenizer, None)
    model.eval().requires_grad_(False).to(accelerator.device)
    digest = _digest(model)
    facts: dict[str, object] = {"name": policy.reference, "digest": digest, "scores": policy.reference_scores}
    if policy.reference_scores == "fly":
        return Reference(data, model, facts)
    precision = (
        f"{recipe.model.dtype} {recipe.model.attention} {recipe.training.mixed_precision} {accelerator.device.type}"
    )
    key = hashlib.sha256(f"{data.digest()} {digest} {precision}".encode()).hexdigest()[:32]
    path = home() / "cache" / "reference" / f"{key}.safetensors"
    kept = _read(path, data)
    if kept is None:
        tell(f"reference model {policy.reference} scores {len(data.train)} training examples once; scores are cached")
        kept = _score(model, data, tokenizer, accelerator, recipe.training.per_device_train_batch_size)
        _write(path, *kept)
        facts["from_cache"] = False
    scores, cost = kept
    borders = np.cumsum([len(example.input_ids) for example in data.train])[:-1]
    train = [
        replace(example, columns=example.columns | {REFERENCE_COLUMN: part})
        for example, part in zip(data.train, np.split(scores, borders), strict=True)
    ]
    with_scores = replace(data, train=train)
    return Reference(with_scores, "batch", {"from_cache": True} | facts | cost, frozenset({REFERENCE_COLUMN}))


Kept = tuple[np.ndarray, dict[str, float]]


def _score(
    model: nn.Module, data: Data, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator, size: int
) -> Kept:
    """Return the loss of every training token in the order of the data, and the counted cost of scoring."""
    scorer, cost = Scorer(model, "the reference"), {"seconds": 0.0, "flops": 0.0}
    assert isinstance(tokenizer.pad_token_id, int)
    lengths = [len(example.input_ids) for example in data.train]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)  # batches of similar lengths need little padding
    numbers, examples = iter(order), [data.train[number] for number in order]
    by_number: dict[int, np.ndarray] = {}
    for batch in ordered_batches(examples, size, tokenizer.pad_token_id):
        on_device = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        labels = on_device.pop("labels")
        with count_flops(), ScoringCost(accelerator.device) as spent, accelerator.autocast():
            loss_BT = scorer.score(on_device, next_tokens(labels), model, {"loss"})["loss"].cpu().numpy()
        by_number |= {(number := next(numbers)): row[: lengths[number]] for row in loss_BT}
        cost = {"seconds": cost["seconds"] + float(spent.seconds), "flops": cost["flops"] + spent.flops}
    return np.concatenate([by_number[number] for number in range(len(lengths))]), cost


def _digest(model: nn.Module) -> str:
    """Return 16 hexadecimal digits that depend on every weight."""
    sha = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().cpu().contiguous().flatten()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # Hash bytes, because NumPy has no bfloat16.
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def _read(path: Path, data: Data) -> Kept | None:
    try:
        with safe_open(path, framework="numpy") as file:
            scores, cost = file.get_tensor(REFERENCE_COLUMN), json.loads(file.metadata()["cost"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None  # missing or damaged: score again
    return (scores, cost) if len(scores) == sum(len(example.input_ids) for example in data.train) else None


def _write(path: Path, scores: np.ndarray, cost: dict[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Include the process id, because two runs may score the same examples at the same time.
    part = path.with_name(f".{os.getpid()}-{path.name}")
    save_file({REFERENCE_COLUMN: scores}, part, metadata={"cost": json.dumps(cost)})
    part.replace(path)
