"""What eager update promises beside right weights: its cost, its state, what it refuses, and what it says."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsebp_cli.backward import attach
from sparsebp_cli.errors import DivergedError, UnsupportedError, UsageError
from tests.backward.eager_case import Branches, Llama, Recurrent, assert_equal, train


def clipped_by_hand(by: str) -> dict[str, Tensor]:
    model = Llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    previous = None
    for step in range(5):
        model(step).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        for p in model.parameters():
            own = p.grad.norm()
            limit = own if by == "parameter" or previous is None else previous
            p.grad.mul_(min(1.0, 0.05 / (float(limit) + 1e-6)))
        previous = norm
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("by", ["parameter", "previous"])
def test_clipping_by_other_norms_is_as_written_down(by: str) -> None:
    model = Llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = attach(model, [], optimizer=optimizer, update="eager", max_grad_norm=0.05, eager_clip=by)
    for step in range(5):
        engine.backward(model(step))
        optimizer.step()
    for name, expected in clipped_by_hand(by).items():
        torch.testing.assert_close(model.get_parameter(name), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by", ["parameter", "previous", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_bit_identical(by: str, dtype: torch.dtype) -> None:
    def build() -> tuple[nn.Module, Any, Any]:
        model = Branches(True).to(dtype)
        run = model.run
        model.run = lambda function, x: run(function, x.to(dtype))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, attach(model, [], optimizer=optimizer, **clipping)

    clipping = {"update": "eager", "max_grad_norm": 0.01, "eager_clip": by}
    first, optimizer, engine = build()
    for step in range(6):
        if step == 3:
            weights = {name: p.detach().clone() for name, p in first.state_dict().items()}
            state, moments = engine.state_dict(), copy.deepcopy(optimizer.state_dict())
        engine.backward(first(step))
        optimizer.step()
    second, optimizer, engine = build()
    second.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    engine.load_state_dict(state)
    for step in range(3, 6):
        engine.backward(second(step))
        optimizer.step()
    assert_equal(dict(second.named_parameters()), dict(first.named_parameters()))


def test_gradients_that_are_not_finite_update_nothing_and_are_told_by_name() -> None:
    def run(by: str | None) -> tuple[nn.Module, dict[str, Tensor]]:
        model = Llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        norm = None if by is None else 1.0
        engine = attach(model, [], optimizer=optimizer, update="eager", max_grad_norm=norm, eager_clip=by)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        bad = model.inner.model.layers[0].mlp.up_proj.weight
        bad.register_hook(lambda gradient: gradient * float("nan"))
        told = r"gradient norm is nan at step 1, first in inner.model.layers.0.mlp.up_proj.weight; "
        told += "nothing was updated" if by == "exact" else r"\d+ of 21 parameters were updated"
        with pytest.raises(DivergedError, match=told):
            engine.backward(model(0))
        return model, before

    model, before = run("exact")
    assert_equal(dict(model.named_parameters()), before)
    for by in ("parameter", "previous", None):
        model, before = run(by)
        bad = "inner.model.layers.0.mlp.up_proj.weight"
        assert torch.equal(model.get_parameter(bad), before[bad])
        assert all(p.isfinite().all() for p in model.parameters())


def test_two_passes_in_one_step_are_refused_by_name_and_micro_batches_are_not() -> None:
    model = Llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = attach(model, [], optimizer=optimizer, update="eager")
    engine.backward(model(0), is_last=False)
    engine.backward(model(1))
    with pytest.raises(UsageError, match="is_last=False"):
        engine.backward(model(2))
    optimizer.step()
    engine.backward(model(2))


def test_what_is_hidden_from_graph_and_forward_is_refused_not_updated_twice() -> None:
    class Hidden(torch.autograd.Function):
        """Differentiates a parameter that is not among its inputs, in a pass of its own."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
            ctx.layer = layer
            ctx.save_for_backward(x)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            with torch.enable_grad():
                x, layer = ctx.saved_tensors[0].detach(), ctx.layer
                nn.functional.linear(x, layer.weight, layer.bias).sum().backward()
            return grad, None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(Hidden.apply(x, self.layer)).square().sum()  # what is hidden arrives last

    model = Model()
    engine = attach(model, [], optimizer=torch.optim.SGD(model.parameters(), lr=0.1), update="eager")
    with pytest.raises(UsageError, match=r"layer.(weight|bias) got another gradient after its update"):
        engine.backward(model(torch.ones(2, 4, requires_grad=True)))


def test_probes_and_disabled_passes_leave_parameters_and_gradients_to_whoever_asked() -> None:
    model = Llama()
    engine = attach(model, [], optimizer=torch.optim.SGD(model.parameters(), lr=1.0), update="eager")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with engine.disabled():
        model(0).backward()
    dense = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with engine.probing():
        engine.backward(model(0))
    assert_equal({name: p.grad for name, p in model.named_parameters()}, dense)
    assert_equal(dict(model.named_parameters()), before)


class StopsOnce(nn.Module):
    """One layer used twice, the first time without a gradient of its own, and both times checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.first, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        def stopped(y: Tensor) -> Tensor:
            with torch.no_grad():
                gate = self.layer(y)
            return self.first(y) * gate

        for function in (stopped, lambda y: self.layer(y).tanh()):
            x = checkpoint(function, x, use_reentrant=self.reentrant)
        return x.square().sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_would_be_computed_again_with_changed_weights_is_refused_by_name(reentrant: bool) -> None:
    model = StopsOnce(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = attach(model, [], optimizer=optimizer, update="eager")
    x = torch.ones(2, 4, requires_grad=True)
    if reentrant:  # uses are counted there: the layer waits, and is right
        for _ in range(3):
            engine.backward(model(x))
            optimizer.step()
        assert set(engine.eager.report.waited) == {"layer.weight", "layer.bias"}
        return
    with pytest.raises(UsageError, match=r"layer.(weight|bias) is needed again after its update"):
        engine.backward(model(x))


def test_a_graph_that_still_needs_the_old_weights_notices() -> None:
    class ThroughData(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data.add_(p.grad, alpha=-group["lr"])

    layer = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh())
    engine = attach(model, [], optimizer=ThroughData(model.parameters(), lr=0.1), update="eager")
    x = torch.ones(2, 4, requires_grad=True)
    early = nn.functional.linear(nn.functional.linear(x, layer.weight.detach()), torch.eye(4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(model(early).sum())


class CountsInItsGroup(torch.optim.Optimizer):
    """Counts steps in the group, as many optimizers outside of PyTorch do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            if found:  # a step without gradients counts nothing
                group["step"] = group.get("step", 0) + 1
            for p in found:
                p.add_(p.grad, alpha=-group["lr"] / group["step"])


class ByTheSumOfAll(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


def test_options_of_groups_stay_those_of_the_users_optimizer() -> None:
    def make(_: Any) -> CountsInItsGroup:
        return CountsInItsGroup([{"params": model.cell.parameters(), "lr": 0.2}, {"params": model.head.parameters()}])

    weights: list[dict[str, Tensor]] = []
    for eager in (False, True):
        model = Recurrent()
        optimizer = make(model)
        engine = attach(model, [], optimizer=optimizer, update="eager") if eager else None
        for step in range(3):
            model(step).backward() if engine is None else engine.backward(model(step))
            optimizer.step()
            optimizer.zero_grad()
        assert [(group["lr"], group["step"]) for group in optimizer.param_groups] == [(0.2, 3), (0.1, 3)]
        weights.append(dict(model.named_parameters()))
    assert_equal(weights[1], weights[0])


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (torch.optim.LBFGS, {}, UnsupportedError, r"LBFGS, whose step\(\) needs a closure"),
        (
            lambda p: ByTheSumOfAll(p, lr=0.1),
            {},
            UnsupportedError,
            "ByTheSumOfAll, whose update of a parameter depends",
        ),
        (None, {}, UsageError, "update='eager' needs the argument optimizer="),
        (
            torch.optim.SGD,
            {"max_grad_norm": 1.0},
            UsageError,
            "with max_grad_norm=1.0 needs eager_clip='parameter', previous or exact",
        ),
        (torch.optim.SGD, {"max_grad_norm": -1.0, "eager_clip": "exact"}, UsageError, "greater than 0, got -1.0"),
        (
            torch.optim.SGD,
            {"eager_clip": "exact"},
            UsageError,
            "eager_clip='exact' has no effect with max_grad_norm=None",
        ),
        (torch.optim.SGD, {"max_grad_norm": 1.0, "eager_clip": "exakt"}, UsageError, "did you mean exact"),
        (
            torch.optim.SGD,
            {"update": "eagre"},
            UsageError,
            "update: got 'eagre'.*did you mean eager",
        ),
        (
            torch.optim.SGD,
            {"update": "deferred", "eager_clip": "exact"},
            UsageError,
            "needs update='eager', got 'deferred'",
        ),
        (
            torch.optim.SGD,
            {"sites": "nodes", "max_grad_norm": 1.0, "eager_clip": "exact"},
            UnsupportedError,
            "eager_clip='exact' needs two backward passes over one graph",
        ),
    ],
)
def test_what_cannot_be_updated_eagerly_is_refused_by_name_and_leaves_the_model(
    make: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    model = Recurrent()
    optimizer = None if make is None else make(model.parameters())
    with pytest.raises(error, match=text):
        attach(model, [], optimizer=optimizer, **({"update": "eager"} | options))
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_wrapped_model_is_refused_by_name() -> None:
    class Wrapped(nn.Module):
        __class__ = nn.parallel.DistributedDataParallel  # without a group of processes

    model = nn.Sequential(nn.Linear(2, 2), Wrapped())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="update='eager' works in one process"):
        attach(model, [], optimizer=optimizer, update="eager")


def test_a_gradient_scaler_is_refused_by_name() -> None:
    class Accelerated:  # as accelerate's with float16
        scaler = torch.amp.GradScaler("cpu")

        def backward(self, loss: Tensor) -> None:
            self.scaler.scale(loss).backward()

    model = Recurrent()
    engine = attach(model, [], optimizer=torch.optim.SGD(model.parameters(), lr=0.1), update="eager")
    with pytest.raises(UnsupportedError, match="update='eager' with a GradScaler is not supported"):
        engine.backward(model(0), Accelerated().backward)


def count_opcodes(num_parameters: int) -> tuple[int, int]:
    """Return how many bytecodes of Python a step runs, and how often the optimizer's parameters are looked at."""
    model = nn.Module()
    model.layers = nn.ParameterList(torch.ones(2) for _ in range(num_parameters))
    model.linear = nn.Linear(2, 2)  # something to attach to
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = attach(model, [], optimizer=optimizer, update="eager")
    num_opcodes = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal num_opcodes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num_opcodes += event == "opcode"
        return trace

    loss = torch.stack([*model.layers]).sum() + model.linear(torch.ones(2)).sum()
    before = sys.gettrace()
    gc.collect()
    gc.disable()  # what other tests have left would be finalized amid the count
    sys.settrace(trace)
    try:
        engine.backward(loss)
        optimizer.step()
    finally:
        sys.settrace(before)
        gc.enable()
    return num_opcodes, engine.eager.report.num_early


def test_the_cost_of_a_hook_does_not_grow_with_the_number_of_parameters() -> None:
    sizes = (50, 100, 200)
    count_opcodes(2)  # what is imported and cached at the first step
    counts = [count_opcodes(size) for size in sizes]
    assert [early for _, early in counts] == [size + 2 for size in sizes]
    (small, _), (middle, _), (large, _) = counts
    assert large - middle == pytest.approx(2 * (middle - small), rel=0.02)  # a scan in each hook would give 4


def test_gradients_are_never_there_together() -> None:
    _, engine = train(Llama, steps=2, eager=True)
    sizes = [p.nbytes for p in Llama().parameters()]
    assert engine.eager.report.gradient_bytes == max(sizes)
    _, engine = train(Llama, steps=2, eager=True, accumulation=2)
    assert engine.eager.report.gradient_bytes == sum(sizes)
    model = Llama()
    _, engine = train(Llama, steps=2, eager=True, segments=2)
    layer = sum(p.nbytes for p in model.inner.model.layers[0].parameters())
    assert engine.eager.report.gradient_bytes == layer


def test_the_run_is_told_how_it_clips_and_what_saves_nothing() -> None:
    _, engine = train(Llama, steps=2, eager=True, max_norm=0.5)
    (note,) = engine.report().notes
    assert note.endswith("clipped to 0.5 by the norm of all gradients, which an extra backward computes first")
    _, engine = train(lambda: Recurrent(True), steps=2, eager=True, accumulation=2)
    told = engine.report().notes
    assert told[0].endswith("gradients are not clipped")
    assert any(
        "2 of 4 parameters, such as cell.weight," in note and "at the end of the backward" in note for note in told
    )
    assert any("earlier micro-batches' gradients stay" in note for note in told)


def test_detach_gives_the_parameters_back_without_hooks() -> None:
    model = Recurrent(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, [], optimizer=optimizer, update="eager") as engine:
        engine.backward(model(0))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    model(1).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_that_a_script_sets_itself_update_as_after_a_backward() -> None:
    def weights(*, eager: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer, parameters = torch.optim.Adam(model.parameters(), lr=0.1), list(model.parameters())

        def backward(loss: Tensor) -> None:
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient

        with attach(model, [], optimizer=optimizer, update="eager" if eager else "deferred") as engine:
            for number in range(3):
                engine.backward(model(torch.full((2, 4), 1.0 + number)).square().sum(), backward)
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach() for parameter in parameters]

    assert all(map(torch.equal, weights(eager=True), weights(eager=False)))
