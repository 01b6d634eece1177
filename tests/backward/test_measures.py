"""What was executed, what was stored, and how near a gradient is: held against hand calculation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import compare_gradients, count_flops, saved_bytes, tensor_bytes
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

from .conftest import VOCABULARY, tiny_model, tokens

B, T, D, INTERMEDIATE, HEADS, KV_HEADS, LAYERS = 2, 16, 32, 48, 4, 2, 2
N, HEAD_WIDTH = B * T, D // HEADS
KV = KV_HEADS * HEAD_WIDTH
LINEARS = LAYERS * (2 * D * D + 2 * D * KV + 3 * D * INTERMEDIATE) + D * VOCABULARY  # weights' entries
FORWARD_ATTENTION = LAYERS * 2 * (2 * B * HEADS * T * T * HEAD_WIDTH)  # scores, values
# Positions by frequencies: multiplied elementwise, or as matrices, for the batch or for each example.
ROTARY = {2 * count * T * HEAD_WIDTH // 2 for count in (0, 1, B)}


def _count(attention: str) -> tuple[dict[str, int], dict[str, int]]:
    model, ids = tiny_model("llama", attn_implementation=attention), tokens(0)
    with count_flops() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with count_flops() as backward:
        loss.backward()
    return dict(forward.by_operator), dict(backward.by_operator)


def test_forward_and_backward_flops_are_those_calculated_by_hand() -> None:
    forward, backward = _count("sdpa")
    attention = forward.pop("aten._scaled_dot_product_flash_attention_for_cpu")
    assert attention == FORWARD_ATTENTION
    assert sum(forward.values()) - 2 * N * LINEARS in ROTARY
    attention = backward.pop("aten._scaled_dot_product_flash_attention_for_cpu_backward")
    assert attention == FORWARD_ATTENTION // 2 * 5  # the scores again, and two gradients for each of two products
    assert sum(backward.values()) == 4 * N * LINEARS


def test_eager_attention_is_counted_as_its_matrix_products() -> None:
    forward, backward = _count("eager")
    assert sum(forward.values()) - 2 * N * LINEARS - FORWARD_ATTENTION in ROTARY
    assert sum(backward.values()) == 4 * N * LINEARS + 2 * FORWARD_ATTENTION


def test_a_composite_operator_is_counted_under_inference_mode() -> None:
    with torch.inference_mode(), count_flops() as count:
        nn.functional.linear(torch.ones(2, 3, 4), torch.ones(5, 4))
    assert count.total == 2 * 6 * 4 * 5


def test_grouped_products_are_counted() -> None:
    ends = torch.tensor([2, 5, 7], dtype=torch.int32)
    a, b = torch.ones(7, 16, dtype=torch.bfloat16), torch.ones(3, 16, 8, dtype=torch.bfloat16)
    with count_flops() as count:
        torch._grouped_mm(a, b, offs=ends)
    assert count.total == 2 * 7 * 16 * 8


@pytest.mark.parametrize("keep", [0.5, 0.25])
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_the_share_kept_is_the_share_of_the_linears_backward_that_is_executed(keep: float, along: str) -> None:
    model, ids = tiny_model("llama"), tokens(0)
    with sbp.attach(model, [sbp.make_policy("topk", keep=keep, along=along)]) as engine:
        loss = model(input_ids=ids, labels=ids).loss
        with count_flops() as count:
            engine.backward(loss)
        claim, report = engine.claim(), engine.report()
    executed = sum(flops for name, flops in count.by_operator.items() if "attention" not in name)
    assert claim.dense_flops == report.dense_flops == 4 * N * LINEARS
    assert executed == claim.claimed_flops == report.claimed_flops == keep * claim.dense_flops
    assert report.kept_share == keep


def test_elements_multiply_everything_and_claim_nothing() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    with sbp.attach(model, [sbp.make_policy("topk", keep=0.25, along="elements")]) as engine:
        loss = model(input_ids=ids, labels=ids).loss
        with count_flops() as count:
            engine.backward(loss)
        assert engine.claim().claimed_flops == engine.claim().dense_flops == 4 * N * LINEARS
        assert engine.report().kept_share == 0.25
    assert sum(flops for name, flops in count.by_operator.items() if "attention" not in name) == 4 * N * LINEARS


@pytest.mark.parametrize(
    ("weight_trained", "input_trained", "expected"),
    [(True, True, 4 * 7 * 5), (True, False, 4 * 7 * 5), (False, True, 0)],
)
def test_only_what_the_backward_reads_is_saved(weight_trained: bool, input_trained: bool, expected: int) -> None:
    linear, x = nn.Linear(5, 3), torch.randn(7, 5, requires_grad=input_trained)
    linear.weight.requires_grad_(weight_trained)
    with sbp.attach(linear, []), saved_bytes(linear.parameters()) as saved:
        output = linear(x)
    assert saved.total == expected
    with sbp.attach(linear, []), saved_bytes() as everything:
        output = linear(x)
    assert everything.total == expected + (4 * 3 * 5 if input_trained else 0)
    assert output.requires_grad


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_attached_model_saves_as_much_as_a_plain_one(family: str) -> None:
    model, ids = tiny_model(family), tokens(0)
    totals = []
    for engine in (None, sbp.attach(model, [sbp.make_policy("topk", keep=0.1)])):
        with saved_bytes(model.parameters()) as saved:
            loss = model(input_ids=ids, labels=ids).loss
        totals.append(saved.total)
        del loss, engine
    assert totals[0] == totals[1] > 0


def test_activation_checkpointing_saves_less() -> None:
    model, ids = tiny_model("llama", num_hidden_layers=4), tokens(0)
    with saved_bytes(model.parameters()) as plain:
        kept = model(input_ids=ids, labels=ids).loss
    checkpoint_activations(model)
    with saved_bytes(model.parameters()) as checkpointed:
        kept_too = model(input_ids=ids, labels=ids).loss
    assert torch.equal(kept, kept_too)
    assert 0 < checkpointed.total < plain.total / 3


def test_shared_storage_is_counted_once() -> None:
    tensor = torch.zeros(10)
    assert tensor_bytes([tensor, tensor[2:], None, torch.zeros(3, dtype=torch.bfloat16)]) == 40 + 6


def test_fidelity_is_cosine_and_relative_error_over_all_parameters() -> None:
    ours = [torch.tensor([3.0, 0.0]), None, torch.tensor([[0.0]])]
    dense = [torch.tensor([3.0, 0.0]), torch.tensor([4.0]), None]
    fidelity = compare_gradients(ours, dense)
    assert fidelity.cosine == pytest.approx(3 / 5)
    assert fidelity.relative_error == pytest.approx(4 / 5)
    same = compare_gradients(dense, dense)
    assert (same.cosine, same.relative_error) == (1.0, 0.0)
    nothing = compare_gradients(ours, [None, None, None])
    assert (nothing.cosine, nothing.relative_error) == (None, None)
    with pytest.raises(ValueError, match="equally many gradients, got 3 and 1"):
        compare_gradients(ours, [None])


def test_fidelity_accumulates_in_double_precision() -> None:
    large, tiny = torch.full((2_000_000,), 1e-3), torch.full((2_000_000,), 1e-3)
    tiny[0] += 1e-7
    exact = float((large.double() - tiny.double()).norm() / tiny.double().norm())
    assert compare_gradients([large], [tiny]).relative_error == pytest.approx(exact, rel=1e-6)
