"""Forms that are slower than dense are not used: chosen from given times, without a clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_cli.backward.linear import form_choice, function
from sparsebp_cli.backward.linear.form_choice import find_choice
from sparsebp_cli.backward.linear.timing import Masked
from sparsebp_cli.policy import Columns, GradientSelector, Rows

ROWS = {"name": "topk", "keep": 0.25, "along": "rows"}
NUM_ROWS = 64
WIDE, NARROW = (96, 32), (4, 96)  # outputs and inputs


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 4))


def loss_of(net: nn.Module) -> Tensor:
    x = torch.randn(NUM_ROWS, 32, generator=torch.Generator().manual_seed(1))
    return net(x.requires_grad_()).square().sum()


def given(seconds: dict[tuple[int, int], float]) -> Callable[[Callable[[], object]], float]:
    """A clock by which masking takes a millisecond, and the form at each shape what is given, in milliseconds."""

    def timer(run: Any) -> float:
        source, grad_NO, _, weight = run.args[:4]
        run()
        assert weight.shape[0] == grad_NO.shape[1]
        return 1e-3 * (1.0 if isinstance(source.selection, Masked) else seconds[tuple(weight.shape)])

    return timer


def never(_: object) -> float:
    raise AssertionError("something was timed")


def attach(net: nn.Module, policy: Any = ROWS, **options: Any) -> sbp.Engine:
    return sbp.attach(net, policy, time_forms=True, **options)


def time_by(engine: sbp.Engine, seconds: dict[tuple[int, int], float], **options: Any) -> Any:
    choice = find_choice(engine)
    assert choice is not None
    return choice.measure(NUM_ROWS, timer=given(seconds), **options)


@contextmanager
def kernels(kind: type = Rows) -> Iterator[list[tuple[int, int]]]:
    """The shapes of the linears whose product ran in its own form."""
    shapes: list[tuple[int, int]] = []
    form = function._KERNELS[kind]

    def run(layout: Any, grad_NO: Tensor, x_ND: Any, weight: Any, *rest: Any) -> Any:
        shapes.append((grad_NO.shape[1], (x_ND if weight is None else weight).shape[1]))
        return form(layout, grad_NO, x_ND, weight, *rest)

    with patch.dict(function._KERNELS, {kind: run}):
        yield shapes


def gradients(net: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in net.parameters()]
    assert all(gradient is not None for gradient in found)
    return found  # type: ignore[return-value]


def test_a_form_that_was_slower_is_masked_and_the_others_are_used() -> None:
    net, expected = model(), model()
    engine = attach(net)
    times = time_by(engine, {WIDE: 0.5, NARROW: 2.0})
    assert [(one.num_outputs, one.points) for one in times.timed] == [(96, ((0.25, 0.5),)), (4, ((0.25, 2.0),))]
    with kernels() as shapes:
        engine.backward(loss_of(net))
    assert shapes == [WIDE]
    sbp.attach(expected, ROWS, execution="reference").backward(loss_of(expected))
    for number, (mine, theirs) in enumerate(zip(gradients(net), gradients(expected), strict=True)):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        assert number < 2 or torch.equal(mine, theirs)  # the narrow one multiplies as the reference does


def test_work_of_a_masked_form_is_claimed_and_executed_as_dense() -> None:
    net = model()
    engine = attach(net)
    time_by(engine, {WIDE: 0.5, NARROW: 2.0})
    loss = loss_of(net)
    with count_flops() as executed:
        engine.backward(loss)
    wide, narrow = engine.report().sites
    assert (wide.claimed_flops / wide.dense_flops, narrow.claimed_flops / narrow.dense_flops) == (0.25, 1.0)
    assert (wide.kept_share, narrow.kept_share) == (0.25, 0.25)
    assert executed.total == engine.report().claimed_flops


def test_times_do_not_change_what_is_kept() -> None:
    kept = []
    for seconds in (0.5, 2.0):
        net = model()
        engine = attach(net, {"name": "random", "keep": 0.25, "along": "columns"})
        time_by(engine, {WIDE: seconds, NARROW: seconds})
        with kernels(Columns) as shapes:
            engine.backward(loss_of(net))
        assert len(shapes) == (2 if seconds < 1.0 else 0)
        kept.append([gradient != 0 for gradient in gradients(net)])
    assert all(torch.equal(one, two) for one, two in zip(*kept, strict=True))


def test_a_share_that_falls_over_the_steps_crosses_the_break_even() -> None:
    net = model()
    engine = attach(net, ROWS | {"keep": 0.1, "keep_warmup_steps": 2})
    choice = find_choice(engine)
    assert choice is not None

    def timer(run: Any) -> float:  # as long as its share of rows, and a fixed part
        selection = run.args[0].selection
        return 1e-3 * (1.0 if isinstance(selection, Masked) else 0.8 + selection.index_K.numel() / NUM_ROWS)

    times = choice.measure(NUM_ROWS, timer=timer)
    assert [round(one.limit, 1) for one in times.timed] == [0.2, 0.2]
    used = []
    for _ in range(3):  # keeps 1, 0.32 and 0.1
        with kernels() as shapes:
            engine.backward(loss_of(net))
        used.append(len(shapes))
    assert used == [0, 0, 2]


def test_dgrad_and_wgrad_that_are_selected_apart_are_masked_apart() -> None:
    net = model()
    engine = attach(net, {"name": "crs", "keep": 0.5, "products": "both"})
    choice = find_choice(engine)
    assert choice is not None
    kinds = {use.kind for use in choice.uses()}
    assert len(kinds) == 2
    slow = min(kinds)

    def timer(run: Any) -> float:
        selection = run.args[0].selection
        return 1e-3 * (2.0 if type(selection).__name__ == slow else 1.0 if isinstance(selection, Masked) else 0.5)

    choice.measure(NUM_ROWS, timer=timer)
    with kernels(Rows) as rows, kernels(Columns) as columns:
        engine.backward(loss_of(net))
    assert bool(rows) == (slow != "Rows")
    assert bool(columns) == (slow != "Columns")
    assert sum(site.claimed_flops for site in engine.report().sites) == 0.75 * engine.report().dense_flops


def test_a_state_decides_on_another_machine_without_timing() -> None:
    engine = attach(net := model())
    time_by(engine, {WIDE: 2.0, NARROW: 0.5})
    engine.backward(loss_of(net))
    state = json.loads(json.dumps(engine.state_dict()))
    resumed = attach(again := model())
    resumed.load_state_dict(state)
    with kernels() as shapes, patch.object(form_choice, "time_all", never):
        resumed.backward(loss_of(again))
    assert shapes == [NARROW]
    assert all(torch.equal(one, two) for one, two in zip(gradients(net), gradients(again), strict=True))
    with pytest.raises(sbp.UsageError, match="no times of forms"):
        resumed.load_state_dict(state | {"form_times": [3]})


def test_a_backward_without_times_or_an_engine_that_takes_none_is_refused() -> None:
    engine = attach(net := model())
    with pytest.raises(sbp.UsageError, match=r"needs sparsebp_cli\.time_forms"):
        engine.backward(loss_of(net))
    with engine.disabled():
        engine.backward(loss_of(net))
    with pytest.raises(sbp.UsageError, match="num_rows must be at least 1, got 0"):
        sbp.time_forms(engine, num_rows=0)
    with pytest.raises(sbp.UsageError, match=r"attach\(time_forms=True\)"):
        sbp.time_forms(sbp.attach(model(), ROWS), num_rows=8)
    with pytest.raises(sbp.UnsupportedError, match="time_forms=True needs sites='linears'"):
        attach(model(), ROWS, sites="branches")


def test_the_public_function_times_with_the_clock_and_tells() -> None:
    engine, told = attach(net := model()), list[str]()
    times = sbp.time_forms(engine, num_rows=NUM_ROWS, tell=told.append)
    assert {(one.kind, one.num_rows, one.dtype, one.device) for one in times.timed} == {("Rows", 64, "float32", "cpu")}
    assert told[0] == "timing 2 forms of products at linears, for at most 10 s"
    assert "of 2 linears mask what is selected" in told[1]
    engine.backward(loss_of(net))
    with patch.object(form_choice, "time_all", lambda cases, *_: iter([]) if not cases else never(cases)):
        assert sbp.time_forms(engine, num_rows=NUM_ROWS) == times  # what is known is not timed again


def test_what_the_time_does_not_suffice_for_is_used_untimed() -> None:
    engine = attach(net := model())
    times = time_by(engine, {WIDE: 2e4, NARROW: 2e4}, most_seconds=10.0)
    assert times.timed == ()
    with kernels() as shapes:
        engine.backward(loss_of(net))
    assert shapes == [NARROW, WIDE]


def test_the_first_of_several_processes_times_and_all_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr(form_choice, "_is_together", lambda: True)

    def broadcast(values: list[object]) -> None:
        sent.append(values[0])
        values[0] = sent[0]

    monkeypatch.setattr(distributed, "broadcast_object_list", broadcast)
    found = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "get_rank", lambda rank=rank: rank)
        engine = attach(net := model())
        choice = find_choice(engine)
        assert choice is not None
        found.append(choice.measure(NUM_ROWS, timer=never if rank else given({WIDE: 2.0, NARROW: 0.5})))
        with kernels() as shapes:
            engine.backward(loss_of(net))
        assert shapes == [NARROW]
    assert found[0] == found[1]


@pytest.mark.parametrize(("along", "keep"), [("blocks", 0.25), ("elements", 0.02)])
def test_every_kind_with_a_form_can_be_timed(along: str, keep: float) -> None:
    if along == "elements" and not torch.backends.mkl.is_available():
        pytest.skip("single entries have a form where MKL is")
    engine = attach(net := model(), {"name": "topk", "keep": keep, "along": along})
    times = time_by(engine, {WIDE: 2.0, NARROW: 2.0})
    assert [one.kind.lower() for one in times.timed] == [along, along]
    engine.backward(loss_of(net))
    assert engine.report().claimed_share == 1.0


def test_a_later_phase_keeps_the_times() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    phases = [{"until": 0.5, "policy": "dense"}, {"policy": [ROWS]}]
    engine = sbp.attach_phases(net, phases, optimizer=optimizer, num_steps=2, time_forms=True)
    choice, topk = find_choice(engine.engine), sbp.make_policy("topk", keep=0.25, along="rows")
    assert choice is not None
    assert isinstance(topk, GradientSelector)
    choice.measure(NUM_ROWS, policies=[topk], timer=given({WIDE: 2.0, NARROW: 0.5}))
    engine.backward(loss_of(net))
    optimizer.step()
    with kernels() as shapes:
        engine.backward(loss_of(net))
    assert shapes == [NARROW]
