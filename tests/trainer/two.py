"""One of two processes that train together; told by test_processes.py. Writes what it found as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from sparsebp_cli.trainer import PolicyTrainer
from tests.trainer.conftest import differing, distance, make_arguments, make_examples, make_model, weights
from tests.trainer.test_lossless import collate
from tests.trainer.test_lossless import make_examples as make_completions

ROWS = [{"name": "random", "keep": 0.5, "along": "rows", "within": "example"}]
TOKENS = [{"name": "tokens", "score": "random", "keep": 0.5, "within": "example", "mode": "detach"}]


def main(folder: Path) -> dict[str, Any]:
    """Train plainly, densely through the engine, and with a policy: in one go and resumed."""

    def train(kind: type[Trainer], name: str, resume: Path | None = None, dropout: float = 0.1, **options: Any) -> Any:
        trainer = kind(
            model=make_model(attention_dropout=dropout),
            args=make_arguments(
                folder / name,
                max_steps=4,
                save_strategy="steps",
                save_steps=2,
                gradient_accumulation_steps=2,
                ddp_backend="gloo",
                logging_steps=2,
            ),
            **({"train_dataset": make_examples(32)} | options),
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer

    plain, dense = train(Trainer, "plain"), train(PolicyTrainer, "dense", policies=["dense"], log_flops_every=2)
    whole = train(PolicyTrainer, "rows", policies=ROWS, log_flops_every=2)
    again = train(PolicyTrainer, "again", folder / "rows" / "checkpoint-2", policies=ROWS, log_flops_every=None)
    chosen: dict[str, Any] = {"policies": TOKENS, "log_flops_every": None}
    tokens = train(PolicyTrainer, "tokens", **chosen)
    tokens_again = train(PolicyTrainer, "tokens-again", folder / "tokens" / "checkpoint-2", **chosen)
    data: dict[str, Any] = {"train_dataset": make_completions(header=True), "data_collator": collate, "dropout": 0.0}
    completions = train(Trainer, "completions", **data)
    packed = train(PolicyTrainer, "packed", policies="lossless", **data)
    return {
        "packed": distance(weights(completions.model), weights(packed.model)),
        "packing": packed.engine.notes["packing"],
        "wrapped": type(whole.model_wrapped).__name__,
        "dense": differing(weights(plain.model), weights(dense.model)),
        "resumed": differing(weights(whole.model), weights(again.model))
        + differing(weights(tokens.model), weights(tokens_again.model)),
        "changed": len(differing(weights(plain.model), weights(whole.model))),
        "sums": [sum(w.double().sum().item() for w in weights(one.model).values()) for one in (whole, tokens, packed)],
        "state": sorted(file.name for file in (folder / "rows" / "checkpoint-2").glob("sparsebp-*")),
        "flops": [log.get("flops/backward_executed") for log in whole.state.log_history],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    found = main(place)
    (place / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    os._exit(0)  # destroying a group of gloo may abort or hang (torch 2.13)
