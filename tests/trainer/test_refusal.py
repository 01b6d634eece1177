"""What is wrong, or not supported, is said in one line when the trainer is made."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.trainer.refusal import make_first_batch

from .conftest import TRAINER, VOCABULARY, Make, is_free, make_arguments, make_examples, make_model

ROWS = {"name": "topk", "keep": 0.25, "along": "rows"}


def refuse(
    door: Make, folder: Path, kind: type[Exception], match: str, policies: Any = (ROWS,), **options: Any
) -> None:
    model = make_model()
    with pytest.raises(kind, match=match) as caught:
        door(Trainer, policies, options, model=model, args=make_arguments(folder), train_dataset=make_examples(2))
    assert "\n" not in str(caught.value)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []


@pytest.mark.parametrize(
    ("policies", "kind", "match"),
    [
        ("topk", PolicyError, "policy 'topk': keep: missing"),
        (["topp"], PolicyError, "unknown policy 'topp'.*did you mean topk"),
        ([{**ROWS, "keep": 1.5}], PolicyError, "policy 'topk': keep: .*1.5"),
        ([{"keep": 0.5}], PolicyError, "needs the key 'name'"),
        ([3], PolicyError, "a policy must be a name, a mapping or a Policy, got 3"),
        ([ROWS, {**ROWS, "name": "random"}], UnsupportedError, "make the same decision"),
    ],
)
def test_wrong_policies(policies: Any, kind: type[Exception], match: str, door: Make, tmp_path: Path) -> None:
    refuse(door, tmp_path, kind, match, policies)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        (
            {"backward": {"sites": "lines"}},
            UsageError,
            "sites: got 'lines', .*did you mean linears",
        ),
        (
            {"backward": {"exclude": ["lm_haed"]}},
            UsageError,
            "matches no linear layer; did you mean lm_head",
        ),
        ({"backward": {"execution": "quick"}}, UsageError, "execution: got 'quick', allowed: 'fast', 'reference'"),
        ({"backward": {"segment": 3}}, UsageError, "unknown key 'segment'.*did you mean segments"),
        ({"backward": {"checkpointing": "full"}}, UnsupportedError, "model.gradient_checkpointing_enable"),
        ({"backward": {"update": "eager"}}, UnsupportedError, "update='eager' in a transformers.Trainer"),
    ],
)
def test_wrong_options(options: dict[str, Any], kind: type[Exception], match: str, door: Make, tmp_path: Path) -> None:
    refuse(door, tmp_path, kind, match, **options)


@pytest.mark.parametrize(
    ("attribute", "value", "match"),
    [
        ("is_deepspeed_enabled", True, "DeepSpeed"),
        ("is_fsdp_enabled", True, "FSDP"),
        ("is_model_parallel", True, "a model on several devices"),
        ("is_distributed_loading_by_transformers", True, "sharded when it is loaded"),
        ("args.use_liger_kernel", True, "use_liger_kernel: its fused loss"),
        ("args.optim", "adalomo", "optim='adalomo'"),
        ("args._n_gpu", 2, "DataParallel"),
        ("args.parallelism_config", object(), "parallelism_config"),
    ],
)
def test_what_a_trainer_may_be_told_that_is_not_built(
    attribute: str, value: Any, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = Trainer(model=make_model(), args=make_arguments(tmp_path), train_dataset=make_examples(2))
    owner = trainer.args if attribute.startswith("args.") else trainer
    monkeypatch.setattr(owner, attribute.removeprefix("args."), value, raising=False)
    with pytest.raises(UnsupportedError, match=f"not supported with .*{match}"):
        sbp.PolicyCallback([ROWS]).join(trainer)
    assert is_free(trainer)
    assert not any(name in vars(trainer) for name in ("train", "log", "training_step"))


MASKED = {"name": "tokens", "score": "mask", "mask_column": "loss_mask"}
LOSSES = {"name": "tokens", "score": "loss", "keep": 0.5}
EXAMPLES = {"name": "uniform", "keep": 0.5}


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.sum()


@pytest.mark.parametrize("door", [TRAINER], indirect=True)
@pytest.mark.parametrize("policy", [MASKED, LOSSES, EXAMPLES], ids=lambda policy: policy["name"] + str(len(policy)))
@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        ({"torch_compile": True}, {}, "torch_compile: the policy changes the forward from step to step"),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1, which reads the logits of all positions"),
        ({}, {"compute_loss_func": own_loss}, "compute_loss_func, which reads the logits of all positions"),
    ],
    ids=["compile", "smoothing", "function"],
)
def test_what_reads_all_logits_does_not_go_with_a_choice_of_tokens_or_examples(
    policy: Any, args: dict[str, Any], kwargs: dict[str, Any], match: str, door: Make, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=match):
        door(Trainer, [policy], {}, model=make_model(), args=make_arguments(tmp_path, **args), **kwargs)


DETACHED = {"name": "tokens", "score": "loss", "keep": 0.5, "mode": "detach"}
SCORED = {"name": "selective-backprop", "keep": 0.5}


@pytest.mark.always("PolicyTrainer-tokens4", "PolicyCallback-selective-backprop2")
@pytest.mark.parametrize("policy", [MASKED, DETACHED, SCORED], ids=lambda policy: policy["name"] + str(len(policy)))
def test_a_loss_out_of_the_models_log_probabilities_does_not_go_with_a_choice(
    policy: Any, door: Make, tmp_path: Path
) -> None:
    """As trl 1.16 does it: the forward is replaced, and the head returns log-probabilities of labels alone."""
    model = make_model()
    plain = model.forward

    @functools.wraps(type(model).forward)
    def fused(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    model.forward = types.MethodType(fused, model)
    kwargs: dict[str, Any] = {"model": model, "args": make_arguments(tmp_path), "train_dataset": make_examples(2)}
    with pytest.raises(UnsupportedError, match="not supported with trl's fused head") as caught:
        door(Trainer, [policy], {}, **kwargs)
    assert "\n" not in str(caught.value)
    with pytest.raises(UnsupportedError, match="not supported with trl's fused head") as own:
        sbp.attach(model, [policy])
    assert "\n" not in str(own.value)
    door(Trainer, [ROWS], {"backward": {"exclude": ["lm_head"]}}, **kwargs).train()


def test_an_attached_model_is_refused(door: Make, tmp_path: Path) -> None:
    model = make_model()
    with (
        sbp.attach(model, []),
        pytest.raises(UnsupportedError, match="the model is already attached"),
    ):
        door(Trainer, [ROWS], {}, model=model, args=make_arguments(tmp_path), train_dataset=make_examples(2))


def test_both_names_are_those_of_the_package() -> None:
    assert {"PolicyTrainer", "PolicyCallback"} <= set(sbp.__all__)
    assert issubclass(sbp.PolicyTrainer, Trainer)


def test_an_option_beside_backward_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^sites is an option of the backward pass: give backward={'sites'"):
        sbp.PolicyTrainer(model=make_model(), args=make_arguments(tmp_path), sites="nodes")


def with_states() -> list[dict[str, Any]]:
    """Examples with an argument of the model's forward that no packer knows."""
    return [{**example, "encoder_hidden_states": torch.zeros(2, 32)} for example in make_examples(2)]


def test_arguments_that_the_first_step_would_refuse_are_refused_before(door: Make, tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model, arguments = GPT2LMHeadModel(config), make_arguments(tmp_path)
    match = "does not support encoder_hidden_states in training: leave it out of the batch"
    with pytest.raises(UnsupportedError, match=match):
        door(Trainer, "lossless", {}, model=model, args=arguments, train_dataset=with_states())
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []


def test_looking_at_a_batch_before_the_training_changes_no_random_number(tmp_path: Path) -> None:
    seen: list[float] = []

    def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(float(torch.rand(())) + random.random())
        return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}

    trainer = Trainer(make_model(), make_arguments(tmp_path), data_collator=collate, train_dataset=make_examples(2))
    before = torch.get_rng_state(), random.getstate()
    sbp.PolicyCallback("lossless").join(trainer)
    assert len(seen) == 1
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_data_that_can_be_read_once_is_not_read_before_the_training(tmp_path: Path) -> None:
    def generate() -> Iterator[dict[str, Any]]:
        yield from with_states()

    data = IterableDataset.from_generator(generate)
    trainer = Trainer(make_model(), make_arguments(tmp_path), train_dataset=data)
    assert make_first_batch(trainer) == {}
