"""A saver of inputs works beside a gradient selector that has other linears: each decides as alone, by autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import GradientSelector, InformedSelector, Policy, Seen, Site, Split, Stateful, Step
from sparsebp_cli.policy.discovery import make_policies
from sparsebp_shelf.saver import InputSaver
from tests.backward.families import tiny_decoder
from tests.saver import saving_by_hand

ATTENTION, MLP = ["*self_attn*"], ["*mlp*"]
PAIRS = [
    ({"name": "crs", "keep": 0.25}, {"name": "sketch", "keep": 0.25}),
    ({"name": "topk", "keep": 0.25, "along": "rows"}, {"name": "velora", "group": 8}),
    ({"name": "random", "keep": 0.5, "along": "columns"}, {"name": "wta-crs", "keep": 0.5}),
    ({"name": "crs", "keep": 0.25}, {"name": "gact", "bits": 4, "group": 16}),
    ({"name": "topk", "keep": 0.25, "along": "elements"}, {"name": "compact", "keep": 0.5}),
    ({"name": "dither", "scale": 1.0}, {"name": "wta-crs", "keep": 0.3, "by": "uniform"}),
]


def make_policy(entry: dict[str, Any]) -> Policy:
    return make_policies(entry)[0]


def _loss(model: Any) -> Tensor:
    ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def _selecting_by_hand(model: nn.Module, policy: GradientSelector, part: str) -> Iterator[None]:
    """Cut the gradients of linears by hooks of torch: a linear is the sum of a term with the gradient of its input, and
    one of value zero with that of its weight.
    """

    def install(name: str, module: nn.Linear) -> None:
        def forward(x: Tensor) -> Tensor:
            chosen: list[Any] = []

            def cut(product: int, grad: Tensor) -> Tensor:
                grad_NO = grad.reshape(-1, grad.shape[-1])
                if not chosen:
                    chosen.append(_ask(policy, name, module, x.detach(), grad, grad_NO))
                part = (chosen[0].dgrad, chosen[0].wgrad)[product] if isinstance(chosen[0], Split) else chosen[0]
                return grad if part is None else part.apply(grad_NO).view_as(grad)

            terms = linear(x, module.weight.detach()), linear(x.detach(), module.weight)
            for product, term in enumerate(terms):
                term.register_hook(partial(cut, product))
            return terms[0] + (terms[1] - terms[1].detach())

        module.forward = forward  # type: ignore[method-assign]

    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and part in n]
    for name, module in modules:
        install(name, module)
    try:
        yield
    finally:
        for _, module in modules:
            del module.forward


def _ask(policy: GradientSelector, name: str, module: nn.Linear, x: Tensor, grad: Tensor, grad_NO: Tensor) -> Any:
    site, step = Site(name, grad.shape[-1], tuple(grad.shape[:-1]), int(name.split(".")[2])), Step(0, seed=1)
    if not isinstance(policy, InformedSelector):
        return policy.select(grad_NO, site, step)
    norms = {"input_norm": x.reshape(len(grad_NO), -1).norm(dim=1), "weight_norm": module.weight.detach().norm(dim=1)}
    readings: Any = {name: norms[name] for name in policy.reads}
    return policy.choose(Seen(grad_NO, readings=readings), site, step)


@pytest.mark.parametrize("swapped", [False, True], ids=["selects in attention", "selects in MLPs"])
@pytest.mark.parametrize(("selector", "saver"), PAIRS, ids=lambda policy: str(policy["name"]))
def test_each_decides_as_autograd_by_hand_does(selector: Any, saver: Any, swapped: bool) -> None:
    places = (MLP, ATTENTION) if swapped else (ATTENTION, MLP)
    selecting = make_policy({**selector, "where": places[0]})
    saving = make_policy({**saver, "where": places[1]})
    assert isinstance(selecting, GradientSelector)
    assert isinstance(saving, InputSaver)
    model = tiny_decoder("llama", vocab_size=64)
    with sbp.attach(model, [selecting, saving], seed=1) as engine:
        engine.backward(_loss(model))
        report = engine.report()
    ours, plain = _gradients(model), tiny_decoder("llama", vocab_size=64)
    sites = [Site(name, 0, ()) for name, module in plain.named_modules() if isinstance(module, nn.Linear)]
    state = saving.init(sites) if isinstance(saving, Stateful) else {}
    with (
        _selecting_by_hand(plain, selecting, places[0][0].strip("*")),
        saving_by_hand(plain, saving, Step(0, seed=1, state=state)),
    ):
        _loss(plain).backward()
    for name, gradient in _gradients(plain).items():
        torch.testing.assert_close(ours[name], gradient, rtol=2e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    claimed = {site.name: site.claimed_flops / site.dense_flops for site in report.sites if site.dense_flops}
    assert {name for name, share in claimed.items() if share == 1.0} >= {"lm_head"}


def test_one_linear_for_both_is_refused_by_name() -> None:
    model = tiny_decoder("llama", vocab_size=64)
    with pytest.raises(UsageError, match=r"TopK and Sketch cannot both act at 'model.layers.0.mlp.gate_proj'"):
        sbp.attach(
            model,
            [
                {"name": "topk", "keep": 0.5, "along": "rows", "where": MLP},
                {"name": "sketch", "keep": 0.5, "where": ["*layers.0*"]},
            ],
        )
    with pytest.raises(UnsupportedError, match="or give each its own layers by where or layers"):
        sbp.attach(model, [{"name": "crs", "keep": 0.5, "where": MLP}, {"name": "sketch", "keep": 0.5}])
