"""`lossless` by variable-length attention: two calls a layer, and the gradient of the plain step.

The kernel runs on GPUs only. Here equations of it stand in: forward and backward of one call, each sequence by itself,
with the causal order aligned to the last key. The backward reads the output and log-sum-exp that it gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertForMaskedLM

import sparsebp_cli as sbp
from sparsebp_cli.backward.kind.packing import varlen
from sparsebp_cli.backward.observe.flops import find_formula
from tests.backward.families import tiny_decoder
from tests.backward.packing.case import ALL, LIMIT, error, errors, gradients, make_batch
from tests.backward.packing.test_packing import _bert as bert
from tests.backward.packing.test_update import alone, attach, build, make_rows, split, train

pytestmark = pytest.mark.model


def sequences(tensors: list[Tensor], query_end: Tensor, key_end: Tensor) -> Iterator[tuple[slice, slice]]:
    assert len(query_end) == len(key_end)
    assert int(query_end[-1]) == len(tensors[0])
    assert int(key_end[-1]) == len(tensors[1])
    for (a, b), (c, d) in zip(pairwise(query_end.tolist()), pairwise(key_end.tolist()), strict=True):
        assert a < b
        assert c < d
        yield slice(a, b), slice(c, d)


def scores(query: Tensor, key: Tensor, scale: float, *, is_causal: bool) -> Tensor:
    """Return scores (H, M, K); query (M, H, D), key (K, J, D)."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    found = torch.einsum("mhd,khd->hmk", query, key) * scale
    if is_causal:
        shape = found.shape[1:]
        found = found.masked_fill(~torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0]), float("-inf"))
    return found


class Equations:
    """The kernel by its equations, and the number of its calls."""

    def __init__(self) -> None:
        self.num_forwards = self.num_backwards = 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float) -> tuple[Tensor, Tensor]:
        self.num_forwards += 1
        query_end, key_end, max_query, max_key, dropout, is_causal, _ = rest
        assert dropout == 0
        output, total = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
        for q, k in sequences([query, key], query_end, key_end):
            assert q.stop - q.start <= max_query
            assert k.stop - k.start <= max_key
            found = scores(query[q], key[k], scale, is_causal=is_causal)
            values = value[k].repeat_interleave(query.shape[1] // key.shape[1], 1)
            total[:, q] = found.logsumexp(2)
            output[q] = torch.einsum("hmk,khd->mhd", found.softmax(2), values)
        return output, total

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        total: Tensor,
        *rest: Any,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.num_backwards += 1
        query_end, key_end, _, _, dropout, is_causal, _, _ = rest
        assert dropout == 0
        ratio = query.shape[1] // key.shape[1]
        found = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for q, k in sequences([query, key], query_end, key_end):
            weights = (scores(query[q], key[k], scale, is_causal=is_causal) - total[:, q, None]).exp()
            values, keys = (part[k].repeat_interleave(ratio, 1) for part in (value, key))
            change = torch.einsum("mhd,khd->hmk", grad[q], values) - (grad[q] * output[q]).sum(2).t()[:, :, None]
            change = change * weights * scale
            found[0][q] = torch.einsum("hmk,khd->mhd", change, keys)
            of_key, of_value = (
                torch.einsum("hmk,mhd->khd", part, rows) for part, rows in ((change, query[q]), (weights, grad[q]))
            )
            for whole, part in ((found[1], of_key), (found[2], of_value)):
                whole[k] = part.unflatten(1, (-1, ratio)).sum(2)
        return found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Equations:
    equations = Equations()
    monkeypatch.setattr(varlen, "FORWARD", equations.forward)
    monkeypatch.setattr(varlen, "BACKWARD", equations.backward)
    monkeypatch.setattr(varlen, "has_kernel", lambda _: True)
    monkeypatch.setattr("sparsebp_cli.backward.kind.packing.layout.has_kernel", lambda _: True)
    monkeypatch.setattr(varlen, "DTYPES", (torch.float32,))
    monkeypatch.setattr(varlen, "_FOUND", {})
    return equations


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "olmo2"])
def test_the_gradient_is_that_of_the_plain_step(family: str, kernel: Equations) -> None:
    assert errors(tiny_decoder(family), ALL) == {}
    assert kernel.num_forwards > len(ALL)
    assert kernel.num_backwards > len(ALL)


def test_layers_with_a_window_shorter_than_a_text_run_group_by_group(kernel: Equations) -> None:
    assert errors(tiny_decoder("mistral")) == {}
    assert kernel.num_forwards == 0


def test_a_checkpointed_layer_runs_the_calls_again(kernel: Equations) -> None:
    assert errors(tiny_decoder("llama", checkpointing=True)) == {}
    assert kernel.num_forwards > kernel.num_backwards > 0


def test_an_encoder_attends_to_all_rows_of_its_segment(kernel: Equations) -> None:
    model = bert(BertForMaskedLM)
    assert errors(model, [("right", "completion", "none"), ("left", "dense", "none")]) == {}
    assert kernel.num_backwards > 0


def test_micro_batches_of_an_update_attend_to_keys_of_others(kernel: Equations) -> None:
    model, rows = build(), make_rows()
    with attach(model) as engine:
        found = train(model, engine, split(rows, 3, "answers"))
    assert error(alone(model, rows, "answers"), found) < LIMIT
    assert kernel.num_backwards > 0


def test_a_layer_has_two_calls_at_most(kernel: Equations) -> None:
    model = tiny_decoder("llama")
    layers = model.config.num_hidden_layers
    batch = make_batch("right", "completion", "tree")
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        with torch.inference_mode():
            model(**make_batch("left", "dense", "none"))  # compares a small case
        gradients(model, engine, batch)
        assert engine.report().whole_share is not None
        kernel.num_forwards = kernel.num_backwards = 0
        gradients(model, engine, batch)
    assert (kernel.num_forwards, kernel.num_backwards) == (2 * layers, 2 * layers)


@pytest.mark.parametrize("part", ["output", "total"])
def test_a_kernel_that_is_wrong_in_a_small_case_is_not_used(
    part: str, kernel: Equations, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        output, total = kernel.forward(*args, **kwargs)
        return (output * 1.1, total) if part == "output" else (output, total + 0.1)

    monkeypatch.setattr(varlen, "FORWARD", wrong)
    assert errors(tiny_decoder("llama")) == {}
    assert kernel.num_forwards == 2
    assert "cannot use a flash kernel" in caplog.text


def test_flops_are_those_of_the_pairs_of_each_sequence() -> None:
    query, key = torch.empty(12, 4, 8), torch.empty(9, 2, 8)
    ends = torch.tensor([0, 5, 12]), torch.tensor([0, 2, 9])
    pairs = 4 * (5 * 2 + 7 * 7)
    forward, backward = (find_formula(operator) for operator in (varlen.FORWARD, varlen.BACKWARD))
    assert forward is not None
    assert backward is not None
    assert forward(query, key, key, *ends, 7, 7, 0.0, True, False, scale=1.0) == 2 * pairs * 16
    assert backward(query, query, key, key, query, query, *ends, 7, 7, 0.0, True, query, query) == 2 * pairs * 40
