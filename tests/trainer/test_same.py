"""Without an approximating policy a trainer with policies trains what ``Trainer`` trains, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer

import sparsebp_cli as sbp

from .conftest import (
    CHECKPOINTING,
    TRAINER,
    Make,
    differing,
    is_free,
    make_arguments,
    make_examples,
    make_model,
    through,
    weights,
)

# peft 0.21 asks transformers 5.23 by its old name
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.xdist_group("plain trainings"),
]

DENSE = ["dense"]
TRAINED = "policy/trained_share"
KEPT = [{"name": "topk", "keep": 1.0, "along": "rows"}]


class OwnLoss(Trainer):
    """The mean over examples of each one's mean, with the labels taken out of the batch."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses_BT = nn.functional.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100
        )
        loss = (losses_BT.sum(1) / labels[:, 1:].ne(-100).sum(1)).mean()
        return (loss, outputs) if return_outputs else loss


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Right padding, of examples of different lengths."""
    cut = [{k: v[: len(v) - number] for k, v in example.items()} for number, example in enumerate(examples)]
    pad = nn.utils.rnn.pad_sequence
    ids = pad([example["input_ids"] for example in cut], batch_first=True)
    labels = pad([example["labels"] for example in cut], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels}


def own_loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """A loss that the user hands in as a function."""
    loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch if num_items_in_batch is not None else loss / labels[:, 1:].ne(-100).sum()


def lora(model: LlamaForCausalLM) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation and clipping": {"args": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}},
    "bf16": {"args": {"bf16": True}},
    "checkpointing": {"args": {CHECKPOINTING: True}},
    "label smoothing": {"args": {"label_smoothing_factor": 0.1}},
    "dropout": {"config": {"attention_dropout": 0.2}},
    "tied weights": {"config": {"tie_word_embeddings": True}},
    "lora": {"wrap": lora, "args": {"gradient_accumulation_steps": 2}},
    "lora, bf16, checkpointing": {"wrap": lora, "args": {"bf16": True, CHECKPOINTING: True}},
    "own loss and collator": {"base": OwnLoss, "kwargs": {"data_collator": collate}},
    "loss function": {"kwargs": {"compute_loss_func": own_loss_func}, "args": {"gradient_accumulation_steps": 2}},
    "epochs that do not divide": {"args": {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}},
    "another optimizer": {"args": {"optim": "adafactor", "lr_scheduler_type": "cosine", "warmup_steps": 2}},
    "evaluation": {"args": {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}},
    "noisy embeddings": {"args": {"neftune_noise_alpha": 5.0}},
}


def build(case: dict[str, Any], folder: Path) -> tuple[type[Trainer], dict[str, Any]]:
    model: Any = make_model(**case.get("config", {}))
    kwargs = {
        "model": case.get("wrap", lambda same: same)(model),
        "args": make_arguments(folder, **case.get("args", {})),
        "train_dataset": make_examples(16),
        "eval_dataset": make_examples(4),
    }
    return case.get("base", Trainer), kwargs | case.get("kwargs", {})


def log_of(trainer: Any) -> list[list[Any]]:
    """What both log."""
    return [[log.get(key) for key in ("step", "loss", "eval_loss", "grad_norm")] for log in trainer.state.log_history]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Tensor], list[Any]]]:
    """Weights and log of ``Trainer`` by case."""

    @functools.cache
    def train(name: str) -> tuple[dict[str, Tensor], list[Any]]:
        base, kwargs = build(CASES[name], tmp_path_factory.mktemp("plain"))
        trainer = base(**kwargs)
        before = weights(trainer.model)
        trainer.train()
        assert differing(before, weights(trainer.model))
        return weights(trainer.model), log_of(trainer)

    return train


BOTH = ("lora, bf16, checkpointing", "own loss and collator", "epochs that do not divide")


@pytest.mark.always(
    "accumulation and clipping-PolicyTrainer",
    "checkpointing-PolicyTrainer",
    "lora, bf16, checkpointing-PolicyTrainer",
    "tied weights-PolicyTrainer",
    "epochs that do not divide-PolicyCallback",
)
@pytest.mark.parametrize(("name", "door"), through(CASES, BOTH), indirect=["door"])
def test_dense_and_keep_of_one_train_the_same_weights_as_trainer(
    name: str, door: Make, tmp_path: Path, plain: Callable[[str], tuple[dict[str, Tensor], list[Any]]]
) -> None:
    base, kwargs = build(CASES[name], tmp_path)
    trainer = door(base, DENSE if name in ("plain", "lora") else KEPT, {}, **kwargs)
    trainer.train()
    trained, log = plain(name)
    assert differing(trained, weights(trainer.model)) == []
    assert log_of(trainer) == log
    assert trainer.policy_callback.engine.report().num_backwards >= trainer.state.global_step


WAYS: list[dict[str, Any]] = [
    {"backward": {"sites": "nodes"}},
    {"backward": {"execution": "reference"}},
    {"backward": {"segments": 2}},
]


@pytest.mark.always(
    "PolicyTrainer-{'backward': {'segments': 2}}",
)
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("door", [TRAINER], indirect=True)
def test_every_way_of_attaching_is_dense_without_a_policy(
    options: dict[str, Any], door: Make, tmp_path: Path, plain: Callable[[str], tuple[dict[str, Tensor], list[Any]]]
) -> None:
    base, kwargs = build(CASES["accumulation and clipping"], tmp_path)
    trainer = door(base, [], options, **kwargs)
    trainer.train()
    assert differing(plain("accumulation and clipping")[0], weights(trainer.model)) == []
    assert is_free(trainer)


POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "random rows": ("linears", {"name": "random", "keep": 0.5, "along": "rows"}),
    "topk rows": ("linears", {"name": "topk", "keep": 0.25, "along": "rows"}),
    "tokens exactly": ("linears", {"name": "tokens", "score": "random", "keep": 0.5}),
    "tokens detached": ("linears", {"name": "tokens", "score": "loss", "keep": 0.5, "mode": "detach"}),
    "examples": ("linears", {"name": "selective-backprop", "keep": 0.5, "start": 0.3, "end": 0.9}),
    "parameters": ("linears", {"name": "frozen", "freeze": ["*.layers.0.*"]}),
}


@pytest.mark.always(
    "random rows-PolicyCallback", "examples-PolicyTrainer", "parameters-PolicyTrainer", "tokens detached-PolicyTrainer"
)
@pytest.mark.parametrize(("name", "door"), through(POLICIES, ["random rows", "tokens detached"]), indirect=["door"])
def test_a_policy_trains_what_it_trains_in_a_loop_of_ones_own(name: str, door: Make, tmp_path: Path) -> None:
    sites, policy = POLICIES[name]
    exclude = ["lm_head"] if policy["name"] in ("topk", "random") and sites == "linears" else []
    options = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "seed": 5}
    trainer = door(
        Trainer,
        [policy],
        {"backward": {"sites": sites, "exclude": exclude}},
        model=make_model(),
        args=make_arguments(
            tmp_path, gradient_accumulation_steps=2, max_steps=6, train_sampling_strategy="sequential", **options
        ),
        train_dataset=make_examples(24),
    )
    trainer.train()

    model = make_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    made = [sbp.make_policy(policy["name"], **{key: value for key, value in policy.items() if key != "name"})]
    examples = make_examples(24)
    with sbp.attach(model, made, sites=sites, exclude=exclude, optimizer=optimizer, seed=5, num_steps=6) as engine:
        for start in range(0, 24, 4):
            pair = [examples[start : start + 2], examples[start + 2 : start + 4]]
            batches = [{key: torch.stack([e[key] for e in part]) for key in part[0]} for part in pair]
            number = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in batches)
            for batch in batches:
                engine.backward(model(**batch, num_items_in_batch=number).loss)
            optimizer.step()
            optimizer.zero_grad()
        report, other = engine.report(), trainer.policy_callback.engine.report()
        assert report.sites == other.sites
        if report.chosen is not None:  # all but the seconds
            assert report.chosen.trained_share == other.chosen.trained_share == trainer.state.log_history[-1][TRAINED]
    assert differing(weights(model), weights(trainer.model)) == []
    assert is_free(trainer)


def test_evaluation_is_dense(door: Make, tmp_path: Path) -> None:
    values = []
    for policies in ([], [{"name": "topk", "keep": 0.1, "along": "rows"}]):
        trainer = door(
            Trainer,
            policies,
            {},
            model=make_model(),
            args=make_arguments(tmp_path, eval_on_start=True, eval_strategy="steps", eval_steps=4, max_steps=4),
            train_dataset=make_examples(8),
            eval_dataset=make_examples(6),
        )
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=0.0)
        trainer.train()
        values.append([log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log])
        assert trainer.predict(make_examples(2)).metrics["test_loss"] > 0
    assert values[0][0] == values[1][0]  # the same weights
    assert values[0][-1] != values[1][-1]


@pytest.mark.compiles
def test_a_compiled_model_trains_the_same_and_stays_compiled(tmp_path: Path) -> None:
    def train(kind: type[Trainer], **options: Any) -> Any:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        args = make_arguments(tmp_path, max_steps=2, optim="sgd", torch_compile=True, torch_compile_backend="aot_eager")
        trainer = kind(model=make_model(), args=args, train_dataset=make_examples(4), **options)
        trainer.train()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        return trainer

    plain, ours = train(Trainer), train(sbp.PolicyTrainer, policies=KEPT)
    found, wanted = weights(ours.model), weights(plain.model)
    assert max((found[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-6
    assert not any("flops/forward" in log for log in ours.state.log_history)  # counters would undo compiling
    torch._dynamo.reset()
