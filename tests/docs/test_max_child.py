"""The numbers of the page on the largest child that do not depend on a training run are what comes out."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import yaml
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from tests.docs.block import ROOT
from tests.graph import count_nodes

PAGE = (ROOT / "docs" / "results" / "measurements.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| (\d+) of (\d+) \| (yes|no) \|$", PAGE, re.MULTILINE)


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4)
    )


def _ids() -> Tensor:
    return torch.randint(0, 1000, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_how_far_each_variant_comes_is_what_the_table_says(model: LlamaForCausalLM, row: tuple[str, ...]) -> None:
    options = {} if row[0].startswith("(none") else yaml.safe_load(f"{{{row[0]}}}")
    with sbp.attach(model, [sbp.make_policy("max-child", lookahead=True, **options)], sites="nodes") as engine:
        loss = model(input_ids=_ids(), labels=_ids()).loss
        num_nodes = count_nodes(loss)
        engine.backward(loss)
        route = engine.report().route
    assert route is not None
    assert (route.num_nodes, len(list(model.parameters()))) == (num_nodes, 21)
    assert num_nodes in (176, 174)  # the page has the first; PyTorch 2.11 needs two fewer
    if num_nodes == 176:
        assert route.num_nodes_reached == int(row[1])
    assert (len(route.parameters), route.num_misses, route.num_judged) == tuple(map(int, row[2:5]))
    assert route.num_largest_reached == (row[5] == "yes")


def test_the_table_has_every_norm_and_every_tie() -> None:
    assert len(ROWS) == 9


def test_cutting_at_nodes_is_not_masking_at_the_end(model: LlamaForCausalLM) -> None:
    def gradients(backward: Callable[[Tensor], object]) -> Tensor:
        backward(model(input_ids=_ids(), labels=_ids()).loss)
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        model.zero_grad()
        return found

    def mask(grad: Tensor) -> Tensor:
        index = grad.abs().topk(max(1, round(0.1 * grad.numel()))).indices
        return torch.zeros(grad.numel()).index_copy_(0, index, grad[index])

    dense = gradients(Tensor.backward)
    masked = torch.cat([mask(part) for part in dense.split([p.numel() for p in model.parameters()])])
    with sbp.attach(model, [sbp.make_policy("topk", keep=0.1, along="elements")], sites="nodes") as engine:
        cut = gradients(engine.backward)
    common = float(((masked != 0) & (cut != 0)).sum() / (masked != 0).sum())
    for name, grad, share in (("masked at the end", masked, 1.0), ("cut at every node", cut, common)):
        cosine = float(torch.nn.functional.cosine_similarity(grad.double(), dense.double(), dim=0))
        assert f"| {name} | {cosine:.2f} | {share:.0%} |".replace("%", " %") in PAGE
