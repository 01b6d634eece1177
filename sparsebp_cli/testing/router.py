"""Conformance suite of routers. Each broken promise is an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from sparsebp_cli.policy import Edge, EdgeRouter, Step
from sparsebp_cli.testing.promise import equal, name_of, require, through_json, train_network
from sparsebp_cli.testing.suite import check_draws, check_repeatable


def check_router(policy: EdgeRouter) -> None:
    """Check a router against every promise of the contract."""
    _check_numbers(policy)
    _check_repeatable(policy)
    _check_draws(policy)
    _check_exact(policy)
    _check_engines(policy)
    _check_resume(policy)


def _check_numbers(policy: EdgeRouter) -> None:
    for edges in _nodes():
        chosen = policy.route(edges, Step(0))
        good = isinstance(chosen, Sequence) and all(type(i) is int and 0 <= i < len(edges) for i in chosen)
        text = f"must return numbers in [0, {len(edges)}), each at most once, got {chosen!r}"
        require(good and len(set(chosen)) == len(chosen), f"{name_of(policy)}: route {text}")


def _check_repeatable(policy: EdgeRouter) -> None:
    for edges in _nodes():
        check_repeatable(policy, _route, edges, Step(3, seed=1))


def _check_draws(policy: EdgeRouter) -> None:
    asked = [(partial(_route, policy, edges), Step(0)) for edges in _nodes()]
    check_draws(policy, asked, ("index", "micro_batch", "call", "seed"))


def _check_exact(policy: EdgeRouter) -> None:
    dense = not policy.exact or equal(_train(policy), train_network(None))
    require(dense, f"{name_of(policy)}: declares exact, but trains differently from dense")
    honest = policy.exact or not policy.unbiased
    require(honest, f"{name_of(policy)}: declares unbiased, but a router is always biased")


def _check_engines(policy: EdgeRouter) -> None:
    same = equal(_train(policy), _train(policy, execution="reference"))
    require(same, f"{name_of(policy)}: fast execution trains differently from reference execution")


def _check_resume(policy: EdgeRouter) -> None:
    one, two, three = (through_json(policy) for _ in range(3))
    straight, resumed = _train(one, num_steps=6), _train(two, num_steps=6, stop=4, resume_with=three)
    text = f"{name_of(policy)}: decides differently in a resumed run: it keeps hidden state"
    require(equal(straight, resumed), text)


def _route(policy: EdgeRouter, edges: Sequence[Edge], step: Step) -> list[int]:
    return sorted(policy.route(edges, step))


def _train(
    policy: EdgeRouter,
    *,
    num_steps: int = 3,
    stop: int | None = None,
    resume_with: EdgeRouter | None = None,
    execution: Literal["fast", "reference"] = "fast",
) -> list[Tensor]:
    return train_network(
        policy, num_steps=num_steps, stop=stop, resume_with=resume_with, execution=execution, sites="nodes"
    )


def _nodes() -> Iterator[list[Edge]]:
    """Yield the edges of common nodes: a linear, a residual sum, a norm, a node with one child, only zero gradients."""
    generator = torch.Generator().manual_seed(0)

    def edge(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Edge:
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return Edge(gradient, name.endswith("weight"), name)

    for dtype in (torch.float32, torch.bfloat16):
        yield [edge("inner", 4, 6, dtype=dtype), edge("linear.weight", 5, 6, dtype=dtype)]
        same = edge("residual", 4, 6, dtype=dtype)
        yield [same, Edge(same.gradient, False, "branch"), Edge(same.gradient, False, "other branch")]
        yield [edge("scalar", dtype=dtype), edge("norm.weight", 6, dtype=dtype), edge("norm", 4, 6, dtype=dtype)]
        yield [edge("alone", 4, 6, dtype=dtype)]
        yield [edge("only.weight", 5, 6, dtype=dtype)]
        yield [Edge(torch.zeros(4, 6, dtype=dtype), False, name) for name in ("zero", "nothing")]
