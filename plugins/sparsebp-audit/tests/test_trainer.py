"""The audit over ``transformers.Trainer``: the waste that is there, to the numbers of theory, and none in a clean run.

Shape letters: B examples, T positions, D hidden width, I width inside the MLP, V vocabulary, L layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import sparsebp_audit
from sparsebp_audit.report import AuditReport
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

B, D, I, V, L = 4, 32, 64, 128, 4  # noqa: E741 - the shape letters of this file
LAYER = 4 * D * D + 3 * D * I  # weights of one layer's linears


def _model(length: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=I,
        num_hidden_layers=L,
        num_attention_heads=2,
        max_position_embeddings=length,
    )
    return LlamaForCausalLM(config)


def _train(model: LlamaForCausalLM, examples: list[dict[str, Any]], folder: Path, **options: Any) -> AuditReport:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=B,
        max_steps=3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples)
    with sparsebp_audit.audit(model) as audit:
        trainer.train()
    return audit.report()


def _examples(length: int, prompt: int, end: int) -> list[dict[str, Any]]:
    """Completions: the prompt is not trained, and what comes after ``end`` is padding."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(3 * B):
        ids = torch.randint(1, V, (length,), generator=generator)
        ids[end:] = 0
        labels = ids.clone()
        labels[:prompt] = labels[end:] = -100
        found.append({"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(length) < end).long()})
    return found


def test_masks_padding_and_frozen_layers_are_found_with_the_numbers_of_theory(tmp_path: Path) -> None:
    length, prompt, end = 32, 16, 24
    model = _model(length)
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    report = _train(model, _examples(length, prompt, end), tmp_path)
    padding, trained = length - end, end - prompt  # positions of an example; the target of one is the next one's label
    assert {finding.kind for finding in report.findings} == {"ignored-logits", "padding", "zero-rows"}

    logits = report.finding("ignored-logits")
    assert logits is not None
    rows = B * (length - trained)
    assert logits.flops == 3 * 2 * D * V * rows  # forward, dgrad and wgrad of rows without a label
    assert logits.saved_bytes == pytest.approx(
        4 * V * rows, rel=0.1
    )  # the loss keeps probabilities; hidden rows, a little
    assert logits.modules[0] == "lm_head"
    assert logits.exact

    padded = report.finding("padding")
    assert padded is not None  # the frozen layer has a forward alone
    assert padded.flops == pytest.approx(B * padding * (2 * LAYER * L + 4 * LAYER * (L - 1)), rel=1e-9)

    zero = report.finding("zero-rows")
    assert zero is not None
    # The last real position has no label; in the last layer, only keys and values of the prompt are read.
    last = 2 * D * D + (length - padding - trained) * (LAYER - 2 * D * D)
    forward = 2 * B * LAYER * L  # of that position, to which no trained one attends
    theory = 4 * B * ((L - 2) * LAYER + last) + forward
    assert theory <= zero.flops <= theory + 4 * B * (L - 2) * D * D  # one key alone: its query's gradient is rounding
    assert report.wasted_flops_share == pytest.approx(
        sum(finding.flops for finding in report.findings) / report.step_flops
    )
    assert any("through attention, so the work for these rows is needed" in note for note in report.notes)


def test_a_clean_run_has_no_waste(tmp_path: Path) -> None:
    length = 256  # the last position of each example is never trained: 0.4 %
    examples = [{"input_ids": (ids := torch.randint(1, V, (length,))), "labels": ids} for _ in range(3 * B)]
    report = _train(_model(length), examples, tmp_path)
    assert report.findings == ()
    assert report.verdict == "no waste found above 0.5 % of a step"
    assert report.notes == ()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_accumulation_and_clipping_are_no_waste(tmp_path: Path, reentrant: bool) -> None:
    length = 256
    examples = [{"input_ids": (ids := torch.randint(1, V, (length,))), "labels": ids} for _ in range(6 * B)]
    model = _model(length)
    model.config.use_cache = False
    checkpoint_activations(model, use_reentrant=reentrant)
    report = _train(model, examples, tmp_path, gradient_accumulation_steps=2)
    assert (report.steps, report.backwards) == (3, 6)
    assert report.recomputed_flops > 0
    assert report.findings == ()


def test_padding_is_the_same_waste_under_checkpointing(tmp_path: Path) -> None:
    found = []
    for is_checkpointed in (False, True):
        model = _model(32)
        if is_checkpointed:
            model.config.use_cache = False
            checkpoint_activations(model)
        found.append(_train(model, _examples(32, 0, 16), tmp_path).finding("padding"))
    plain, again = found
    assert plain is not None
    assert again is not None
    assert plain.flops == again.flops


def test_the_flops_of_a_step_are_those_of_theory(tmp_path: Path) -> None:
    length = 64
    examples = [{"input_ids": (ids := torch.randint(1, V, (length,))), "labels": ids} for _ in range(3 * B)]
    report = _train(_model(length), examples, tmp_path)
    rows = B * length
    for kind in ("dgrad_flops", "wgrad_flops"):
        count = sum(getattr(row, kind) for row in report.modules)
        assert count == 2 * rows * (L * LAYER + D * V)
    attention = 2 * B * length * length * D
    rotary = {0, 2 * length * D // 2 // 2}  # older transformers compute the angles as a product of matrices
    assert report.forward_flops - 2 * rows * (L * LAYER + D * V) - 2 * L * attention in rotary
    assert sum(row.other_flops for row in report.modules) == 5 * L * attention


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_under_checkpointing_waste_only_the_gradient_of_embeddings(reentrant: bool) -> None:
    length = 256
    model = _model(length)
    model.enable_input_require_grads()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    checkpoint_activations(model, use_reentrant=reentrant)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.01)

    def train() -> None:
        for _ in range(3):
            ids = torch.randint(0, V, (2, length))
            adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    report = sparsebp_audit.audit(train)
    if reentrant:  # which needs it, and hides its parameters from the graph
        assert report.findings == ()
    else:
        (finding,) = report.findings
        # q, k and v of the first layer, and what adapters add to q and v: only the embeddings are below
        assert (finding.kind, finding.flops) == ("unread-leaf", 2 * 2 * length * (3 * D * D + 2 * 4 * D))
