"""The rule of the largest child: by hooks as by the walk, and what the users' questions come to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils._python_dispatch import TorchDispatchMode

import sparsebp_cli as sbp
from sparsebp_cli.backward import Report, Route
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import Edge, EdgeRouter, Policy, Step
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.graph import count_nodes
from tests.promise import Everything, Nothing

from .conftest import tokens
from .families import DECODERS, tiny_decoder

OPTIONS = [
    dict(zip(("leaves", "norm", "ties", "lookahead"), values, strict=True))
    for values in itertools.product(
        ("compete", "always"), ("l1", "l1_mean", "l2"), ("first", "all", "random"), (False, True)
    )
]


def _backward(
    model: nn.Module, loss: Tensor | None, policy: Policy, execution: str = "fast", **options: Any
) -> tuple[dict[str, Tensor | None], Report]:
    with sbp.attach(model, [policy], sites="nodes", execution=execution, **options) as attached:
        if loss is None:
            ids = tokens(0)
            torch.manual_seed(7)  # of dropout
            loss = model(input_ids=ids, labels=ids).loss
        attached.backward(loss)
        report = attached.report()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return gradients, report


def _route(report: Report) -> Route:
    assert report.route is not None
    return report.route


def _reached(gradients: dict[str, Tensor | None]) -> set[str]:
    return {name for name, grad in gradients.items() if grad is not None}


@pytest.mark.always("phi3", "gpt2", "llama")
@pytest.mark.parametrize("family", DECODERS)
def test_hooks_and_walk_are_the_same_with_every_option(family: str) -> None:
    for tied in (False, True):
        model = tiny_decoder(family, tie_word_embeddings=tied)
        seen = set()
        for options in OPTIONS:
            policy = sbp.make_policy("max-child", **options)
            (hooks, by_hooks), (walk, by_walk) = (
                _backward(model, None, policy, engine) for engine in ("fast", "reference")
            )
            assert _reached(hooks) == _reached(walk) == _route(by_hooks).parameters
            assert all(torch.equal(hooks[name], walk[name]) for name in _reached(hooks))
            assert _route(by_hooks) == _route(by_walk)
            seen.add(frozenset(_reached(hooks)))
        assert len(seen) > 1  # the options make a difference


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_literal_rule_stops_at_the_head(checkpointing: bool) -> None:
    """On a llama of two layers: the weight's L1 is larger than the input's at the first linear that is met."""
    model = tiny_decoder("llama", checkpointing=checkpointing)
    num_nodes = count_nodes(tiny_decoder("llama")(input_ids=tokens(0), labels=tokens(0)).loss)
    gradients, report = _backward(model, None, sbp.make_policy("max-child"))
    assert _reached(gradients) == {"lm_head.weight"}
    assert len(gradients) == 21
    route = _route(report)
    assert (route.num_nodes, route.num_nodes_reached, route.num_decisions) == (num_nodes - 4 * checkpointing, 7, 1)


def test_what_is_given_is_the_dense_gradient_as_long_as_the_way_is_whole() -> None:
    """The literal rule cuts nothing above the head, so the head's gradient is the dense one."""
    model, ids = tiny_decoder("llama"), tokens(0)
    gradients, _ = _backward(model, None, sbp.make_policy("max-child"))
    model(input_ids=ids, labels=ids).loss.backward()
    assert torch.equal(gradients["lm_head.weight"], model.lm_head.weight.grad)


class TwoLayers(nn.Module):
    """Two linears whose gradients' sizes a test can set: ``scale`` is the input's size at the last layer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.scale = scale
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(3))
            self.first.bias.fill_(0.0)
            self.last.weight.fill_(1.0)

    def forward(self) -> Tensor:
        return self.last(self.first(torch.full((1, 3), self.scale))).sum()


@pytest.mark.parametrize(
    ("scale", "leaves", "expected"),
    [
        (9.0, "compete", {"last.weight"}),  # (a): the weight's is the largest, and nothing else is computed
        (0.1, "compete", {"first.bias"}),  # (b): the input's is the largest, the last weight has none
        (9.0, "always", {"last.weight", "last.bias", "first.weight", "first.bias"}),
        (0.1, "always", {"last.weight", "last.bias", "first.weight", "first.bias"}),
    ],
)
def test_questions_a_and_b_have_their_answers(scale: float, leaves: str, expected: set[str]) -> None:
    model = TwoLayers(scale)
    gradients, _ = _backward(model, model(), sbp.make_policy("max-child", leaves=leaves))
    assert _reached(gradients) == expected


def test_question_c_a_larger_gradient_far_down_is_never_seen_and_lookahead_says_so() -> None:
    """At the last linear the weight's gradient (6) beats the input's (3), behind which lies the first weight's (18)."""
    model = TwoLayers(1.0)

    def loss() -> Tensor:
        return model.last(model.first(torch.full((1, 3), 20.0)) / 10.0).sum()

    true = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss(), list(model.parameters())), strict=True))
    assert max(true, key=lambda name: float(true[name].abs().sum())) == "first.weight"
    gradients, report = _backward(model, loss(), sbp.make_policy("max-child", lookahead=True))
    route = _route(report)
    assert _reached(gradients) == {"last.weight"}
    assert (route.num_judged, route.num_misses, route.miss_rate, route.num_largest_reached) == (1, 1, 1.0, 0)
    _, report = _backward(model, loss(), sbp.make_policy("max-child", leaves="always", lookahead=True))
    assert (_route(report).miss_rate, _route(report).num_largest_reached) == (0.0, 1)


class Residual(nn.Module):
    """A sum whose two children get the same gradient: the stream, then the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.branch = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        return (self.stream.exp() + self.branch.exp()).sum()


def test_a_tie_goes_to_the_first_to_all_or_to_one_drawn() -> None:
    model = Residual()

    def reached(ties: str, **options: Any) -> set[str]:
        return _reached(_backward(model, model(), sbp.make_policy("max-child", ties=ties), **options)[0])

    assert reached("first") == {"stream"}
    assert reached("all") == {"stream", "branch"}
    drawn = [reached("random", seed=seed) for seed in range(20)]
    assert {frozenset(names) for names in drawn} == {frozenset({"stream"}), frozenset({"branch"})}
    assert drawn == [reached("random", seed=seed) for seed in range(20)]


def test_a_parameter_is_a_leaf_behind_views_and_casts_of_it() -> None:
    class Asks(Everything, EdgeRouter):
        def route(self, edges: Sequence[Edge], step: Step) -> Sequence[int]:
            seen.append([(edge.name, edge.is_leaf) for edge in edges])
            return range(len(edges))

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            rows = self.weight[:2].t().to(torch.float64).unsqueeze(0)
            return (x.to(torch.float64) @ rows).sum() + (1 + self.scale).prod()

    seen: list[list[tuple[str, bool]]] = []
    model = Views()
    x = torch.ones(1, 3, 2, requires_grad=True)
    _backward(model, model(x * 2.0), Asks())
    assert all(is_leaf == (name in ("weight", "scale")) for edges in seen for name, is_leaf in edges)
    assert sum(("weight", True) in edges for edges in seen) >= 4  # every view of it, down to the parameter
    assert [("AddBackward0.0", False)] in seen  # 1 + scale is a computation, and no view
    assert x.grad is not None


class Doubles(Function):
    """As most Functions: zeros are filled in for gradients that did not arrive, and computed with."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x @ torch.eye(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Doubles.calls += 1
        return grad @ torch.eye(3)


class _Nodes(TorchDispatchMode):
    """Counts the nodes that run any kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        idle = func.overloadpacket is torch.ops.aten.detach or args[0] is None  # an attention without a gradient
        if node is not None and not idle:
            self.nodes[node._sequence_nr()] = node.name()
        return func(*args, **(kwargs or {}))


def _computing(family_options: dict[str, Any], policy: Policy | None) -> list[str]:
    model = tiny_decoder("llama", **family_options)
    ids = tokens(0)
    with sbp.attach(model, [] if policy is None else [policy], sites="nodes") as engine:
        loss = model(input_ids=ids, labels=ids).loss
        with _Nodes() as nodes:
            engine.backward(loss)
    return list(nodes.nodes.values())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_node_that_gets_nothing_costs_nothing(attention: str) -> None:
    """Of those that run a kernel, the norms of the gradients that are compared counted with their node."""
    options = {"attn_implementation": attention}
    literal, dense = _computing(options, sbp.make_policy("max-child")), _computing(options, None)
    assert set(literal) <= {
        *("NllLossBackward0", "LogSoftmaxBackward0", "ViewBackward0", "UnsafeViewBackward0"),
        *("MmBackward0", "TBackward0", "torch::autograd::AccumulateGrad"),
    }
    assert literal.count("MmBackward0") == 1
    assert dense.count("MmBackward0") == 15
    assert len(literal) <= 7
    assert len(dense) > 100


def test_a_checkpointed_layer_that_gets_nothing_is_not_run_again() -> None:
    model, ids = tiny_decoder("llama", checkpointing=True), tokens(0)
    runs = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(0))
    for policy, expected in (
        (sbp.make_policy("max-child"), 1),
        (sbp.make_policy("max-child", leaves="always", ties="all", norm="l1_mean"), 2),
    ):
        runs.clear()
        with sbp.attach(model, [policy], sites="nodes") as engine:
            engine.backward(model(input_ids=ids, labels=ids).loss)
            assert "Python, not PyTorch's engine, runs the backward graph" in engine.report().notes[0]
        assert len(runs) == expected


def test_a_function_of_python_that_gets_nothing_does_not_compute_with_zeros() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.weight = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))

        def forward(self) -> Tensor:
            return (Doubles.apply(self.below * 2.0) * 1e-6 @ self.weight).sum()

    model, Doubles.calls = Network(), 0
    gradients, _ = _backward(model, model(), sbp.make_policy("max-child"))
    assert _reached(gradients) == {"below"}  # the input of 1e-6 has the weight's gradient small
    assert Doubles.calls == 1
    Doubles.calls = 0
    with torch.no_grad():
        model.weight.mul_(1e-9)
    gradients, _ = _backward(model, model(), sbp.make_policy("max-child"))
    assert _reached(gradients) == {"weight"}
    assert Doubles.calls == 0
    loss = model()
    with sbp.attach(model, [sbp.make_policy("max-child")], sites="nodes") as engine:
        engine.backward(loss, lambda loss: loss.backward(retain_graph=True))
    model.zero_grad()
    loss.backward()  # afterwards it is as before
    assert model.below.grad is not None
    assert Doubles.calls == 1


@pytest.mark.parametrize("missing", ["none", "zero"])
def test_what_was_not_reached_has_no_gradient_or_zero_and_adamw_tells_them_apart(missing: str) -> None:
    model, ids = tiny_decoder("llama"), tokens(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()  # moments that go on moving
    optimizer.zero_grad()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with sbp.attach(model, [sbp.make_policy("max-child", missing=missing)], sites="nodes") as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
    for name, parameter in model.named_parameters():
        if name != "lm_head.weight":
            assert (parameter.grad is None) == (missing == "none")
            assert missing == "none" or not parameter.grad.any()
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == ({"lm_head.weight"} if missing == "none" else set(before))


def test_frozen_parameters_are_not_filled_with_zeros() -> None:
    model = tiny_decoder("llama")
    model.model.norm.weight.requires_grad_(False)
    gradients, _ = _backward(model, None, sbp.make_policy("max-child", missing="zero"))
    assert _reached(gradients) == set(gradients) - {"model.norm.weight"}


def test_routes_add_up_over_micro_batches_and_a_probe_leaves_none() -> None:
    model, policy = tiny_decoder("llama"), sbp.make_policy("max-child", leaves="always", ties="all", lookahead=True)
    with sbp.attach(model, [policy], sites="nodes") as engine:
        losses = [model(input_ids=tokens(number), labels=tokens(number)).loss for number in range(3)]
        num_nodes = count_nodes(losses[0])
        engine.backward(losses[0])
        engine.backward(losses[1])
        first = engine.take_route()
        assert first is not None
        assert first.num_backwards == 2
        assert first.num_nodes == 2 * num_nodes
        assert engine.take_route() is None
        with engine.probing():
            engine.backward(losses[2])
            assert engine.take_route().num_backwards == 1
        assert engine.take_route() is None
        assert engine.report().route == first
        assert first.nodes_reached == first.num_nodes_reached / 2


def test_excluded_modules_pass_everything_on() -> None:
    model = tiny_decoder("llama")
    gradients, _ = _backward(model, None, sbp.make_policy("max-child"), exclude=["*"])
    assert _reached(gradients) == set(gradients)
    gradients, _ = _backward(model, None, sbp.make_policy("max-child"), exclude=["lm_head"])
    assert "lm_head.weight" in _reached(gradients)
    assert len(_reached(gradients)) > 1


def test_a_router_that_returns_nonsense_is_named() -> None:
    class Wrong(Nothing, EdgeRouter):
        def route(self, edges: Sequence[Edge], step: Step) -> Sequence[int]:
            return [len(edges)]

    with pytest.raises(PolicyError, match=r"Wrong.route must return numbers in \[0, 1\), each at most once, got \[1\]"):
        _backward(nn.Module(), Residual()(), Wrong())


def test_a_parameter_that_nothing_leads_to_does_no_harm() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    policy = sbp.make_policy("max-child", leaves="always", lookahead=True)
    gradients, report = _backward(model, model["used"](torch.ones(1, 2)).sum(), policy)
    assert _reached(gradients) == {"used.weight", "used.bias"}
    assert _route(report).num_largest_reached == 1


def test_linears_are_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match="MaxChild decides at nodes of the autograd graph: it needs sites='nodes', got 'linears'"
    ):
        sbp.attach(tiny_decoder("llama"), [sbp.make_policy("max-child")])


def test_reentrant_checkpointing_is_refused_and_non_reentrant_is_not() -> None:
    model, ids = tiny_decoder("llama"), tokens(0)
    checkpoint_activations(model, use_reentrant=True)
    model.enable_input_require_grads()
    with (
        sbp.attach(model, [sbp.make_policy("max-child")], sites="nodes") as engine,
        pytest.raises(UnsupportedError, match="reentrant activation checkpointing"),
    ):
        engine.backward(model(input_ids=ids, labels=ids).loss)


def test_a_resumed_run_draws_as_the_run_that_was_left_alone() -> None:
    policy = sbp.make_policy("max-child", leaves="always", ties="random")

    def train(stop: int | None) -> list[Tensor]:
        model = tiny_decoder("llama")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine = sbp.attach(model, [policy], sites="nodes", optimizer=optimizer)
        for step in range(4):
            if step == stop:
                state = engine.state_dict()
                engine.detach()
                engine = sbp.attach(model, [policy], sites="nodes", optimizer=optimizer)
                engine.load_state_dict(state)
            ids = tokens(step)
            engine.backward(model(input_ids=ids, labels=ids).loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        engine.detach()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(None), train(2), strict=True))
