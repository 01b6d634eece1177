"""A policy that claims to skip and does not is named in the comparison, by what its runs counted."""

from __future__ import annotations

from typing import Any

from sparsebp_cli.compare import compare_runs

from .conftest import MakeRun

TOPK = [{"name": "topk", "keep": 0.1, "along": "rows"}]


def _proof(claimed: float, executed: float, excess: float) -> dict[str, float]:
    return {"proof/claimed_share": claimed, "proof/executed_share": executed, "proof/excess_share": excess}


def _warnings(make_run: MakeRun, **policy: Any) -> list[str]:
    runs = [make_run("dense", 0), make_run("sparse", 0, policy=TOPK, exact=False, **policy)]
    return [line for line in compare_runs(runs).warnings if "estimates" in line]


def test_a_claim_that_was_not_kept_is_told_with_both_shares(make_run: MakeRun) -> None:
    lines = _warnings(make_run, executed=1.0, claimed=0.1, metrics=_proof(0.1, 1.0, 0.9))
    assert lines == ["sparse: estimates 10.0% of the dense backward FLOPs at its sites, but 100.0% were counted"]


def test_an_excess_that_no_tolerance_would_see_is_told(make_run: MakeRun) -> None:
    lines = _warnings(make_run, executed=0.101, claimed=0.1, metrics=_proof(0.1, 0.102, 0.001))
    assert lines == ["sparse: estimates 10.0% of the dense backward FLOPs at its sites, but 10.2% were counted"]


def test_a_claim_that_was_kept_but_for_rounding_is_left_alone(make_run: MakeRun) -> None:
    assert not _warnings(make_run, executed=0.12, claimed=0.1, metrics=_proof(0.1, 0.12, 0.0))


def test_the_reference_engine_is_named_as_the_reason(make_run: MakeRun) -> None:
    lines = _warnings(make_run, metrics=_proof(0.1, 1.0, 0.9), backward={"execution": "reference"})
    assert lines[0].endswith(
        "were counted; this is expected, because backward.execution: reference computes every product"
    )


def test_a_run_without_a_proof_is_held_against_its_ceiling(make_run: MakeRun) -> None:
    assert _warnings(make_run, executed=1.0, claimed=0.1) == [
        "sparse: estimates 10% of the dense backward FLOPs, but skips nothing (counted)"
    ]
