"""Sparse recompute at the residual branches is masking the gradient of their outputs, whatever is selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsebp_cli as sbp
from sparsebp_cli.asset.checkpointing import checkpoint_activations

from .branch_case import IDS, LEFT, RIGHT, ROWS, RandomWeights, assert_fast_is_reference, assert_same, step
from .conftest import tokens
from .families import DECODERS, tiny_decoder

# Their norms compute in float32, whose sums over rows depend on how many there are.
COARSE = dict.fromkeys(("gemma", "gemma2", "gemma3_text"), 1e-06)
SELECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("topk", {"along": "rows", "keep": 0.3}),
    "rows of examples": ("topk", {"along": "rows", "within": "example", "keep": 0.3}),
    "columns": ("topk", {"along": "columns", "keep": 0.3}),
    "blocks": ("topk", {"along": "blocks", "block": (4, 8), "keep": 0.3}),
    "elements": ("topk", {"along": "elements", "keep": 0.3}),
    "2:4": ("topk", {"along": "2:4", "keep": 0.5}),
    "weighted rows": ("random", {"along": "rows", "keep": 0.3, "weighted": True}),
    "weighted rows of examples": ("random", {"along": "rows", "keep": 0.3, "weighted": True, "within": "example"}),
    "one row": ("topk", {"along": "rows", "keep": 0.001}),
    "all rows": ("random", {"along": "rows", "keep": 1.0}),
    "dense": ("dense", {}),
}


def _double(family: str, **options: Any) -> nn.Module:
    return tiny_decoder(family, dtype=torch.float64, **options)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("family", ["llama", "phi", "olmo2", "gpt2"])
def test_every_selection_is_its_reference(family: str, selection: str) -> None:
    name, options = SELECTIONS[selection]
    assert_fast_is_reference(lambda: _double(family, **_NO_DROPOUT.get(family, {})), sbp.make_policy(name, **options))


_NO_DROPOUT = {"gpt2": {"attn_pdrop": 0.0}}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", DECODERS)
def test_every_family_is_its_reference_without_padding_and_padded_on_either_side(family: str, attention: str) -> None:
    if (family, attention) == ("gemma2", "sdpa"):
        attention = "eager"  # its soft caps know no sdpa
    options = {"attn_implementation": attention, **_NO_DROPOUT.get(family, {})}
    for within in ("batch", "example"):
        policy = sbp.make_policy("topk", keep=0.3, along="rows", within=within)
        for mask in (None, LEFT, RIGHT):
            single = mask is not None and attention == "eager"  # in float64 the mask's lowest float32 is not low enough
            outcome = assert_fast_is_reference(
                lambda single=single: tiny_decoder(family, dtype=_dtype(single=single), **options),
                policy,
                tolerance=5e-6 if single else COARSE.get(family, 1e-12),
                inputs=[{"attention_mask": mask}],
            )
            assert outcome.report is not None
            assert outcome.report.notes == ()


def _dtype(*, single: bool) -> torch.dtype:
    return torch.float32 if single else torch.float64


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_rows_with_any_weights_are_their_reference(data: st.DataObject) -> None:
    """Also none, all, and examples with none."""
    family = data.draw(st.sampled_from(["llama", "phi3", "gemma3_text", "gpt_neox"]))
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    rows = data.draw(st.lists(st.integers(0, batch * length - 1), unique=True))
    ids = tokens(2, batch, length + 1)[:, : length + 1]
    policy = RandomWeights(rows=tuple(r + r // length for r in rows))  # of length + 1 positions
    given_ids = [{"input_ids": ids, "labels": ids}]
    assert_fast_is_reference(lambda: _double(family), policy, tolerance=COARSE.get(family, 1e-12), inputs=given_ids)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_sliding_windows_shorter_than_the_text_are_their_reference(family: str) -> None:
    ids = tokens(3, 2, 24)
    given_ids = [{"input_ids": ids, "labels": ids}]

    def grads(window: int) -> Any:
        return assert_fast_is_reference(
            lambda: _double(family, sliding_window=window), tolerance=COARSE.get(family, 1e-12), inputs=given_ids
        )

    assert grads(5).loss != grads(64).loss


def test_packed_sequences_are_their_reference() -> None:
    positions = torch.tensor([[*range(9), *range(7)]] * 3)
    outcome = assert_fast_is_reference(lambda: _double("llama"), inputs=[{"position_ids": positions}])
    assert outcome.loss != step(_double("llama"), ROWS).loss


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("phi", {"resid_pdrop": 0.3}),
        ("phi3", {"resid_pdrop": 0.3}),
        ("gpt_neox", {"hidden_dropout": 0.3}),
        ("gpt2", {"resid_pdrop": 0.3, "attn_pdrop": 0.0}),
    ],
)
def test_dropout_in_and_after_a_branch_is_drawn_again_for_the_kept_rows(family: str, rates: dict[str, float]) -> None:
    outcome = assert_fast_is_reference(lambda: _double(family, **rates))
    assert outcome.report is not None
    assert outcome.report.notes == ()
    plain = step(_double(family, **rates), None, plain=True)
    assert torch.equal(outcome.generator, plain.generator)
    assert outcome.loss == plain.loss


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "rates"),
    [("llama", {"attention_dropout": 0.2}), ("gpt2", {}), ("gpt_neox", {"attention_dropout": 0.2})],
)
def test_dropped_attention_is_computed_again_whole_and_noted(
    family: str, rates: dict[str, float], attention: str
) -> None:
    outcome = assert_fast_is_reference(lambda: _double(family, attn_implementation=attention, **rates))
    assert outcome.report is not None
    assert len(outcome.report.notes) == 2
    assert all("is recomputed for all rows: its attention has dropout" in note for note in outcome.report.notes)
    assert torch.equal(outcome.generator, step(_double(family, **rates), None, plain=True).generator)


@pytest.mark.parametrize("rows", [(0, 3, 15, 16, 47), (20, 2), ()])
def test_unequal_numbers_of_rows_in_examples_are_their_reference(rows: tuple[int, ...]) -> None:
    assert_fast_is_reference(lambda: _double("llama"), RandomWeights(rows=rows))


def test_tied_weights_are_their_reference() -> None:
    model = _double("qwen2")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]
    assert_fast_is_reference(lambda: _double("qwen2"))


@pytest.mark.parametrize("frozen", ["embed_tokens", "layers.0.", "self_attn", "mlp", "norm", "proj", "layers.0.mlp.up"])
def test_frozen_parts_are_their_reference_and_get_nothing(frozen: str) -> None:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if frozen in name or (frozen == "layers.0." and "embed" in name):
                parameter.requires_grad_(False)

    outcome = assert_fast_is_reference(lambda: _double("llama"), prepare=freeze)
    empty = [name for name, grad in outcome.gradients.items() if grad is None]
    assert empty
    assert all(frozen in name or "embed" in name for name in empty)


def test_two_micro_batches_add_up_as_in_the_reference() -> None:
    other = tokens(9, batch=2, length=8)
    assert_fast_is_reference(
        lambda: _double("llama"),
        sbp.make_policy("random", keep=0.3),
        inputs=[{}, {"input_ids": other, "labels": other}],
    )


def test_two_forwards_before_two_backwards_keep_their_own_rows() -> None:
    def gradients(engine: str) -> list[torch.Tensor | None]:
        model = _double("phi", resid_pdrop=0.3)
        torch.manual_seed(3)
        with sbp.attach(
            model, [ROWS], sites="branches", execution=engine, optimizer=torch.optim.SGD(model.parameters())
        ) as e:
            losses = [model(input_ids=ids, labels=ids).loss for ids in (IDS, tokens(8))]
            for loss in reversed(losses):
                e.backward(loss)
        return [p.grad for p in model.parameters()]

    for ours, theirs in zip(gradients("fast"), gradients("reference"), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_autocast_bfloat16_is_its_reference(family: str) -> None:
    """bfloat16 has 8 bits; what is summed over rows is summed in another order."""
    options = _NO_DROPOUT.get(family, {})
    assert_fast_is_reference(lambda: tiny_decoder(family, **options), autocast=True, tolerance=0.03)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi", "gpt2"])
def test_activation_checkpointing_around_it_is_its_reference(family: str, use_reentrant: bool) -> None:
    def checkpoint(model: nn.Module) -> None:
        checkpoint_activations(model, use_reentrant=use_reentrant)
        model.enable_input_require_grads()  # type: ignore[operator]

    options = {"gpt2": {"attn_pdrop": 0.0}, "phi": {"resid_pdrop": 0.2}}.get(family, {})
    bare = assert_fast_is_reference(lambda: _double(family, **options))
    outcome = assert_fast_is_reference(lambda: _double(family, **options), prepare=checkpoint)
    assert_same(outcome, bare, 1e-12)


def test_error_feedback_and_warm_up_are_their_reference_over_steps() -> None:
    policy = sbp.make_policy("topk", keep=0.2, error_feedback=True, keep_warmup_steps=2)

    def train(**options: Any) -> tuple[list[float], list[float | None], list[torch.Tensor]]:
        model = _double("llama")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses, shares = [], []
        with sbp.attach(model, [policy], sites="branches", optimizer=optimizer, **options) as engine:
            for number in range(4):
                ids = tokens(number)
                loss = model(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                shares.append(engine.take_kept_share())
        return losses, shares, [p.detach() for p in model.parameters()]

    reference = train(execution="reference")
    assert reference[1] == pytest.approx([1.0, 14 / 32, 6 / 32, 6 / 32])
    for kept in ("none", "sparse"):
        fast = train(checkpointing=kept)
        assert fast[0] == pytest.approx(reference[0], rel=1e-9)
        assert fast[1] == reference[1]
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(fast[2], reference[2], strict=True))


@pytest.mark.parametrize(("layers", "expected"), [([0], {0}), ([-1], {1}), ([0, 1], {0, 1}), ([], set())])
def test_layers_that_are_left_out_stay_dense(layers: list[int], expected: set[int]) -> None:
    policy = sbp.make_policy("topk", keep=0.3, layers=layers)
    outcome = assert_fast_is_reference(lambda: _double("llama"), policy)
    assert outcome.report is not None
    assert {site.layer for site in outcome.report.sites if site.kept_share != 1.0} == expected
