"""The same through trainers of transformers and trl, and through a recipe: training without and with ``lossless``.

The oracle is the same training without the policy. A callback takes the gradients before each update; the learning
rate is 0, so that every update has the same weights.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import sparsebp_cli as sbp
from sparsebp_cli.errors import SparseBPError
from tests.exactness.batch import IGNORED
from tests.exactness.judge import MICRO, NUM_UPDATES, WRONG, Outcome, Subject, policies_beside, policy_of
from tests.exactness.step import AloneWhereRestarting, Step
from tests.exactness.subject import make_model
from tests.trainer.test_trl import make_tokenizer, reward, texts

OPTIONS: dict[str, Any] = {
    "learning_rate": 0.0,
    "max_grad_norm": 0.0,
    "max_steps": NUM_UPDATES,
    "optim": "sgd",
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "remove_unused_columns": False,
}


class Gradients(TrainerCallback):
    """Takes the gradients before each update."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Take them."""
        self.steps.append(Step.of(model, 0.0))


def judge_trainer(subject: Subject) -> list[Outcome]:
    """Judge each update of a short training."""
    if subject.case["entry"] == "recipe":
        from tests.exactness.recipe import judge_recipe

        return judge_recipe(subject)
    case = subject.case
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            expected = _train(subject, policies_beside(case), Path(folder) / "plain")[0]
        except Exception as error:  # a model that this trainer does not train
            return [Outcome("unjudged", f"{type(error).__name__}: {error}"[:120])] * NUM_UPDATES
        try:
            got, engine = _train(subject, [*policies_beside(case), policy_of(case)], Path(folder) / "own")
        except SparseBPError as error:
            return [Outcome("refused", str(error))] * NUM_UPDATES
        except Exception as error:
            return [Outcome("wrong", f"{type(error).__name__}: {error}"[:300])] * NUM_UPDATES
    packing = next(part for part in engine.extensions if hasattr(part, "failure"))
    counts, failure = packing.counts, str(packing.failure)
    reason = failure or next(iter(counts.refused), "nothing to leave out")
    alone = AloneWhereRestarting(make_model(case))
    found = []
    for number, (one, two) in enumerate(zip(expected, got, strict=True)):
        if not one.is_finite or one.is_empty:
            found.append(Outcome("unjudged", "the plain gradient is empty or not finite"))
        elif (error := one.error(two)) > WRONG and any(map(alone.mixes, itertools.chain(*subject.updates))):
            found.append(Outcome("unjudged", "the plain forward of this family lets texts in a row read each other"))
        elif error > WRONG:
            found.append(Outcome("wrong", f"update {number + 1}: error {error:.1e}; {failure or counts.describe()}"))
        else:
            # Counted by the share of batches: a trainer's updates are not told apart.
            is_packed = (number + 1) * counts.batches <= len(got) * counts.packed
            found.append(Outcome("right") if is_packed else Outcome("plain", reason))
    return found


def _train(subject: Subject, policies: list[sbp.Policy], folder: Path) -> tuple[list[Step], Any]:
    """Return the gradients of each update, and the engine, if any."""
    case, gradients = subject.case, Gradients()
    torch.manual_seed(subject.seed)
    trainer = _make(subject, folder, policies if case["entry"] == "PolicyTrainer" else None)
    callback = None
    if policies and case["entry"] != "PolicyTrainer":
        callback = sbp.PolicyCallback(policies).join(trainer)
    trainer.add_callback(gradients)
    trainer.train()
    if not policies:
        return gradients.steps, None
    return gradients.steps, trainer.engine if callback is None else callback.engine


def _make(subject: Subject, folder: Path, policies: list[sbp.Policy] | None) -> Any:
    case, model = subject.case, make_model(subject.case)
    options = OPTIONS | {"gradient_accumulation_steps": MICRO[case["accumulation"]], "seed": subject.seed % 1000}
    if case["wrapper"] == "checkpointing":
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if case["entry"] in MAKERS:
        return MAKERS[case["entry"]](subject, folder, model, options)
    batches = [batch for update in subject.updates for batch in update]
    options |= {"per_device_train_batch_size": 1, "label_smoothing_factor": 0.1 * (case["loss"] == "smoothing")}
    arguments: dict[str, Any] = {
        "model": model,
        "args": TrainingArguments(str(folder), **options),
        "train_dataset": [{"index": number} for number in range(len(batches))],
        "data_collator": lambda items: dict(batches[items[0]["index"]]),
        "compute_loss_func": _own_loss if case["loss"] == "logits" else None,
    }
    if case["entry"] == "callback" or not policies:
        return Trainer(**arguments)
    return sbp.PolicyTrainer(**arguments, policies=policies)


def _own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    z, label = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(z, label, ignore_index=IGNORED, reduction="sum") / 11


def _completions(seed: int, names: tuple[str, ...]) -> Dataset:
    prompts = [text for text in texts(8, 14 + seed % 6, seed) for _ in range(2)]
    return Dataset.from_dict({"prompt": prompts, **{name: texts(16, 10, seed + n) for n, name in enumerate(names, 1)}})


def _sft(subject: Subject, folder: Path, model: Any, options: dict[str, Any]) -> Any:
    options = options | {"per_device_train_batch_size": 3, "completion_only_loss": True}
    data = _completions(subject.seed, ("completion",))
    return SFTTrainer(model, SFTConfig(str(folder), **options), train_dataset=data, processing_class=make_tokenizer())


def _dpo(subject: Subject, folder: Path, model: Any, options: dict[str, Any]) -> Any:
    options = options | {"per_device_train_batch_size": 2}
    data = _completions(subject.seed, ("chosen", "rejected"))
    reference = None if subject.case["adapter"] != "none" else make_model(subject.case)
    config = DPOConfig(str(folder), **options)
    return DPOTrainer(model, reference, config, train_dataset=data, processing_class=make_tokenizer())


def _grpo(subject: Subject, folder: Path, model: Any, options: dict[str, Any]) -> Any:
    options = options | {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}
    data = _completions(subject.seed, ())
    config = GRPOConfig(str(folder), **options)
    return GRPOTrainer(model, reward, config, train_dataset=data, processing_class=make_tokenizer())


MAKERS = {"SFT": _sft, "DPO": _dpo, "GRPO": _grpo}
