"""What every selector can do: layers in or out, a warm-up of the kept share, error feedback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import GradientSelector, Rows, Selection, Site, Step
from tests.selector import Promises

from .conftest import tiny_model, tokens

SHOWN: list[Tensor] = []


class FirstRow(Promises):
    """Keeps the first row of three, and notes what it is shown."""

    @property
    def selection(self) -> type[Selection] | None:
        return Rows

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        SHOWN.append(grad_NO.clone())
        return Rows(torch.zeros(1, dtype=torch.int64))


@pytest.fixture(autouse=True)
def _forget() -> None:
    SHOWN.clear()


def _backward(engine: sbp.Engine, linear: nn.Linear, gradient: Tensor) -> None:
    engine.backward(linear(torch.ones(*gradient.shape[:-1], 2)), lambda output: output.backward(gradient))


def test_what_was_cut_is_added_at_the_next_step() -> None:
    linear, one, two = nn.Linear(2, 2), torch.full((3, 2), 1.0), torch.full((3, 2), 10.0)
    with sbp.attach(linear, [FirstRow(error_feedback=True)]) as engine:
        for gradient in (one, two, two):
            _backward(engine, linear, gradient)
    kept, cut = torch.tensor([[True], [False], [False]]), torch.tensor([[0.0], [1.0], [1.0]])
    assert torch.equal(SHOWN[0], one)
    assert torch.equal(SHOWN[1], two + cut)
    assert torch.equal(SHOWN[2], two + (two + cut).masked_fill(kept, 0.0))


def test_error_feedback_keeps_micro_batches_apart() -> None:
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    with sbp.attach(linear, [FirstRow(error_feedback=True)], optimizer=optimizer) as engine:
        for _ in range(2):
            for scale in (1.0, 100.0):
                _backward(engine, linear, torch.full((3, 2), scale))
            optimizer.step()
    assert [float(shown[1, 0]) for shown in SHOWN] == [1.0, 100.0, 2.0, 200.0]


def test_error_feedback_goes_through_a_state_and_a_probe_leaves_it() -> None:
    linear, gradient = nn.Linear(2, 2), torch.full((3, 2), 1.0)
    with sbp.attach(linear, [FirstRow(error_feedback=True)]) as engine:
        _backward(engine, linear, gradient)
        with engine.probing():
            _backward(engine, linear, gradient)
        state = engine.state_dict()
    assert {key: value.tolist() for key, value in state["cut"].items()} == {"/0/0": [[0, 0], [1, 1], [1, 1]]}
    with sbp.attach(linear, [FirstRow(error_feedback=True)]) as engine:
        engine.load_state_dict(state)
        _backward(engine, linear, gradient)
    assert float(SHOWN[-1][1, 0]) == 2.0


def test_error_feedback_takes_a_smaller_last_batch_and_what_was_cut_waits() -> None:
    linear = nn.Linear(2, 2)
    with sbp.attach(linear, [FirstRow(error_feedback=True)]) as engine:
        _backward(engine, linear, torch.full((3, 2), 1.0))
        _backward(engine, linear, torch.full((2, 2), 10.0))  # the last batch of an epoch
        _backward(engine, linear, torch.full((4, 2), 100.0))
    assert [shown[:, 0].tolist() for shown in SHOWN] == [[1, 1, 1], [10, 11], [100, 111, 101, 100]]


def test_error_feedback_keeps_examples_and_positions_apart() -> None:
    linear = nn.Linear(2, 1)
    with sbp.attach(linear, [FirstRow(error_feedback=True)]) as engine:
        for gradient in (torch.arange(6.0).view(2, 3, 1), torch.zeros(2, 2, 1)):
            _backward(engine, linear, gradient)
    assert SHOWN[-1][:, 0].tolist() == [0, 1, 3, 4]  # of two examples, positions 0 and 1; row 0 was kept


def test_error_feedback_goes_on_from_a_checkpoint_that_is_flat() -> None:
    linear = nn.Linear(2, 1)
    with sbp.attach(linear, [FirstRow(error_feedback=True)]) as engine:
        engine.load_state_dict({"index": 1, "micro_batch": 0, "cut": {"/0/0": torch.arange(6.0).view(6, 1)}})
        _backward(engine, linear, torch.zeros(2, 3, 1))
    assert SHOWN[-1][:, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.model
@pytest.mark.parametrize(("layers", "asked"), [([0], {0}), ([-1], {1}), ([0, -1], {0, 1}), ([], set()), (None, {0, 1})])
def test_only_the_layers_that_were_named_are_asked(layers: list[int] | None, asked: set[int]) -> None:
    model, ids = tiny_model("llama"), tokens(0)
    policy = sbp.make_policy("topk", keep=0.25, layers=layers)
    with sbp.attach(model, [policy]) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
        report = engine.report()
    inside = [site for site in report.sites if site.layer is not None]
    assert {site.layer for site in inside if site.kept_share != 1.0} == asked
    outside = [site.kept_share for site in report.sites if site.layer is None]
    assert set(outside) <= ({0.25} if layers is None else {1.0})


@pytest.mark.model
def test_a_layer_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="layers: the model has no layer 2; allowed: -2 to 1"):
        sbp.attach(tiny_model("llama"), [sbp.make_policy("topk", keep=0.5, layers=[2])])
    with pytest.raises(UnsupportedError, match="has no layer 0; allowed: none: no layers were found"):
        sbp.attach(nn.Linear(2, 2), [sbp.make_policy("topk", keep=0.5, layers=[0])])


def test_the_kept_share_falls_by_one_factor_a_step() -> None:
    linear, shares = nn.Linear(2, 2), []
    policy = sbp.make_policy("topk", keep=1 / 16, keep_warmup_steps=4)
    with sbp.attach(linear, [policy]) as engine:
        for _ in range(6):
            _backward(engine, linear, torch.randn(64, 2, generator=torch.Generator().manual_seed(0)))
            shares.append(engine.take_kept_share())
            assert engine.claim().claimed_flops == engine.claim().dense_flops * shares[-1]
    assert shares == [1.0, 0.5, 0.25, 0.125, 1 / 16, 1 / 16]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "dither", "keep_warmup_steps": 3}, "keep_warmup_steps needs a policy that has the option keep"),
        ({"name": "topk", "keep": 0.5, "along": "2:4", "keep_warmup_steps": 3}, "keep_warmup_steps must be 0"),
        ({"name": "topk", "keep": 0.25, "along": "2:4"}, r"keep must be 0.5, or 1.0 for dense, got 0.25"),
        ({"name": "topk", "keep": 0.5, "along": "columns", "within": "example"}, "is not allowed with along: columns"),
        ({"name": "random", "keep": 0.5, "within": "row"}, "within: row is not allowed with along: rows"),
        ({"name": "topk", "keep": 0.5, "block": [0, 4]}, "must be"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PolicyError, match=text) as caught:
        sbp.make_policy(options.pop("name"), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["topk", "random"])
def test_the_same_number_of_rows_is_kept_of_each_example(name: str) -> None:
    policy = sbp.make_policy(name, keep=0.25, within="example")
    assert isinstance(policy, GradientSelector)
    rows = policy.select(torch.randn(24, 5), Site("layer", 5, (3, 8)), Step(0))
    assert isinstance(rows, Rows)
    assert rows.num_examples == 3
    assert (rows.index_K // 8).tolist() == [0, 0, 1, 1, 2, 2]
