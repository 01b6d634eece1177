"""A claim to skip is held against what was executed: a lie is found, an honest policy is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import PassCount, Proof, count_flops, saved_bytes
from sparsebp_cli.backward.core.allowance import round_up
from sparsebp_cli.backward.observe.module_trace import ModuleTrace
from sparsebp_cli.backward.proof.proof import COLUMNS
from sparsebp_cli.policy import Blocks, Columns, Elements, Policy, Rows, Selection, Site, Step
from sparsebp_cli.policy.choice import choose_rows
from sparsebp_cli.testing import check_policy
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.selector import Promises

from .conftest import tiny_model, tokens


def _prove(model: nn.Module, policy: Policy, shape: tuple[int, int] = (2, 16), **options: Any) -> Proof:
    ids = tokens(0, *shape)

    def count(backward: Any) -> PassCount:
        with ModuleTrace(model) as trace, count_flops(trace) as flops:
            with saved_bytes(model.parameters(), trace) as saved:
                loss = model(input_ids=ids, labels=ids).loss
            backward(loss)
        return PassCount(flops, saved)

    with sbp.attach(model, [policy], **options) as engine:
        with engine.disabled():
            dense = count(torch.Tensor.backward)
        with engine.probing():
            return Proof.of(model, dense, count(engine.backward), engine.report())


class GivesUp(Promises):
    """Keeps a quarter of the rows, and everything of gradients that it finds too large to choose from."""

    keep: float = Field(0.25, gt=0.0, le=1.0, description="Share that is kept, in (0, 1].")

    @property
    def budget(self) -> float:
        return self.keep

    @property
    def selection(self) -> type[Selection] | None:
        return Rows

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        if self.keep == 1.0 or self._is_too_large(grad_NO, site):
            return None
        return choose_rows(grad_NO.square().sum(1), self.keep)

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    def _is_too_large(self, grad_NO: Tensor, site: Site) -> bool:
        return grad_NO.shape[0] > 256


class GivesUpAtTheHead(GivesUp):
    """Lies at one site only."""

    def _is_too_large(self, grad_NO: Tensor, site: Site) -> bool:
        return site.name == "lm_head"


def test_a_lie_that_the_conformance_suite_cannot_see_is_found_in_the_run() -> None:
    check_policy(GivesUp)
    honest = _prove(tiny_model("llama"), GivesUp())
    assert honest.find_overclaim() is None
    assert honest.executed_share == honest.claimed_share == honest.rows_share == 0.25
    lying = _prove(tiny_model("llama"), GivesUp(), shape=(8, 64))
    found = lying.find_overclaim()
    assert found is not None
    assert (found.claimed_share, found.executed_share, len(found.sites)) == (0.25, 1.0, 15)
    assert lying.excess_share == 0.75
    assert lying.rows_share == 1.0


def test_a_lie_at_one_site_is_found_there() -> None:
    proof = _prove(tiny_model("llama"), GivesUpAtTheHead())
    found = proof.find_overclaim()
    assert found is not None
    assert found.sites == ("lm_head",)
    assert 0.25 < found.executed_share < 0.5


HONEST: list[dict[str, Any]] = [
    {"name": "topk", "keep": keep, "along": along} for keep in (0.01, 0.3, 0.5) for along in ("rows", "columns")
] + [
    {"name": "topk", "keep": 0.3, "along": "rows", "within": "example"},
    {"name": "topk", "keep": 0.3, "along": "blocks", "block": (5, 7)},
    {"name": "topk", "keep": 0.005, "along": "elements"},
    {"name": "topk", "keep": 0.3, "along": "elements"},
    {"name": "topk", "keep": 0.5, "along": "2:4"},
    {"name": "topk", "keep": 0.3, "along": "elements", "within": "row"},
    {"name": "random", "keep": 0.3, "along": "columns"},
    {"name": "dense"},
]


def _policy(options: dict[str, Any]) -> Policy:
    return sbp.make_policy(options["name"], **{k: v for k, v in options.items() if k != "name"})


@pytest.mark.parametrize("options", HONEST, ids=lambda options: "-".join(str(v) for v in options.values()))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_rounding_is_no_lie(options: dict[str, Any], family: str, checkpointing: bool) -> None:
    """Seven positions and widths of 32 and 48: no share of them is a whole number of rows, columns or blocks."""
    model = tiny_model(family)
    if checkpointing:
        checkpoint_activations(model)
    proof = _prove(model, _policy(options), shape=(3, 7))
    assert proof.find_overclaim() is None
    assert proof.excess_share == 0.0


def test_sites_of_nodes_claim_nothing() -> None:
    proof = _prove(tiny_model("llama"), sbp.make_policy("topk", keep=0.25), sites="nodes")
    assert (proof.claimed_share, proof.executed_share, proof.excess_share) == (None, None, None)
    assert proof.find_overclaim() is None
    assert proof.rows_share == 1.0
    names = {name for name, _ in tiny_model("llama").named_modules()}
    table = proof.table()
    assert set(table) <= names
    kept = COLUMNS.index("kept_share")
    assert 0.2 < table["model.layers.0.mlp.down_proj"][kept] < 0.3


def test_the_table_adds_up() -> None:
    proof = _prove(tiny_model("gpt2"), sbp.make_policy("topk", keep=0.25))
    table = {name: dict(zip(COLUMNS, row, strict=True)) for name, row in proof.table().items()}
    sums = {column: sum(row[column] or 0.0 for row in table.values()) for column in COLUMNS}
    assert sums["forward_flops"] == proof.policy.flops.forward.total()
    assert sums["backward_flops"] + sums["recomputed_flops"] == proof.policy.backward_flops.total()
    assert sums["dense_backward_flops"] == proof.dense.backward_flops.total()
    assert sums["saved_bytes"] == proof.policy.saved.total
    assert sums["dense_saved_bytes"] == proof.dense.saved.total
    assert proof.rows_share == sums["rows"] / sums["dense_rows"] == 0.25
    assert {row["kept_share"] for row in table.values()} == {None, 0.25}


@pytest.mark.parametrize(
    ("selection", "budget", "expected"),
    [
        (None, 0.3, 0.3),
        (Rows(torch.arange(3)), 0.3, 0.3),
        (Rows(torch.arange(4)), 0.35, 0.4),  # 3.5 of 10 rows
        (Rows(torch.arange(5)), 0.35, 0.45),  # one more than any rounding makes of it
        (Rows(torch.arange(6), num_examples=2), 0.41, 0.6),  # 2.05 of 5 rows of each example, rounded up
        (Rows(torch.arange(10)), 0.2, 0.3),
        (Columns(torch.arange(1)), 0.01, 1 / 8),
        (Columns(torch.arange(8)), 0.5, 0.5 + 1 / 8),
        (Elements(torch.arange(24)), 0.3, 0.3),
        (Elements(torch.arange(30)), 0.3, 30 / 80),  # 2.4 of 8 in each row, rounded up
        (Elements(torch.arange(80)), 0.3, 0.3 + 1 / 8),
        (Blocks(torch.arange(2), (4, 4)), 0.4, 0.4),
        (Blocks(torch.arange(3), (4, 4)), 0.4, 0.6),  # 2.4 of 6 blocks that reach over the edge: 96 entries for 80
        (Blocks(torch.arange(6), (4, 4)), 0.4, 0.68),
    ],
)
def test_what_a_count_may_exceed_its_budget_by_is_one_unit(
    selection: Selection | None, budget: float, expected: float
) -> None:
    assert round_up(budget, selection, torch.zeros(10, 8)) == pytest.approx(expected)
