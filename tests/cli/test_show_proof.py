"""What `show` tells of a run's proof and fidelity."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.cli.proof import gather
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import JournalWriter, RunFolder, create_run

from .conftest import Cli, Write

COLUMNS = [
    "forward_flops",
    "recomputed_flops",
    "backward_flops",
    "dense_backward_flops",
    "saved_bytes",
    "dense_saved_bytes",
    "rows",
    "dense_rows",
    "claimed_share",
    "kept_share",
]
PROOF = {
    "columns": COLUMNS,
    "modules": {
        "model.layers.0.mlp": [1e6, 0, 5e5, 2e6, 800, 1000, 16, 64, 0.25, 0.25],
        "model.layers.1.mlp": [1e6, 0, 1.5e6, 2e6, 1000, 1000, 48, 64, 0.25, 0.75],
        "lm_head": [4e6, 0, 8e6, 8e6, 0, 0, 64, 64, None, None],
        "": [0, 0, 0, 0, 4000, 4000, None, None, None, None],
        "model.norm": [0, 0, 0, 0, 0, 0, None, None, None, None],
    },
}
LAYERS = {
    "model.layers.0": {"kept_share": 0.25, "cosine": 0.5, "relative_error": 0.9, "sign_agreement": 0.8},
    "model.layers.1": {"kept_share": 0.75, "cosine": None, "relative_error": None, "sign_agreement": None},
}
METRICS = {
    "proof/claimed_share": 0.25,
    "proof/executed_share": 0.5,
    "proof/excess_share": 0.25,
    "fidelity/cosine": 0.5,
    "fidelity/relative_error": 0.9,
    "fidelity/sign_agreement": 0.8,
    "fidelity/bias": 0.3,
    "fidelity/bias_standard_error": 0.25,
    "fidelity/variance": 0.125,
}


@pytest.fixture
def make_run(home_folder: Path) -> Callable[..., RunFolder]:
    def make(*, measured: bool = True) -> RunFolder:
        recipe = {"version": 1, "name": "sparse", "model": {"name": "m"}, "dataset": {"name": "d"}}
        plan = Plan(recipe=Recipe.model_validate(recipe))
        run = create_run(plan.run_id)
        plan.save(run.path)
        with JournalWriter(run.path, durable=False) as journal:
            journal.write("attempt", from_step=0, environment={})
            journal.write("metrics", step=0, values={"eval/loss": 6.0})
            for step in (50, 100) if measured else ():
                journal.write("layers", step=step, values=LAYERS)
                journal.write("metrics", step=step, values=METRICS | {"eval/loss": 3.0})
                if step == 50:
                    journal.write("proof", step=step, values=PROOF)
            journal.write("end", status="finished", step=100, text="")
        return run

    return make


def test_modules_of_all_layers_are_put_together() -> None:
    found = {modules.name: modules for modules in gather(PROOF)}
    assert list(found) == ["lm_head", "*.mlp", "(model and loss)"]  # what did nothing is left out
    mlp = found["*.mlp"]
    assert len(mlp.rows) == 2
    assert mlp.share("backward_flops", "dense_backward_flops") == 0.5
    assert mlp.share("rows", "dense_rows") == 0.5
    assert mlp.share("saved_bytes", "dense_saved_bytes") == 0.9
    assert mlp.mean("kept_share") == 0.5
    assert found["lm_head"].mean("kept_share") is None
    assert found["lm_head"].share("saved_bytes", "dense_saved_bytes") is None


def test_people_are_shown_the_proof(make_run, call: Cli) -> None:
    done = call("show", make_run().run_id, "--all")
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if not line.startswith("folder: ")]  # a path is not broken
    assert max(map(len, lines)) <= 100
    words = " ".join(done.stdout.split())
    assert "FLOPs and bytes of one backward pass, counted at step 50" in words
    assert "*.mlp 2.00 M 50 % 50 % 1.80 k 90 % 50 %" in words
    assert "again" not in words  # nothing was computed again
    assert (
        "counted 50 % of the dense FLOPs at the policy's sites, estimated 25 %; the policy skipped "
        "less than its estimate" in words
    )
    assert "same sign 0.8000, bias 0.3000 (0.2500 expected by chance), variance 0.1250" in words


def test_programs_are_given_every_module_and_layer(make_run, call: Cli) -> None:
    shown = json.loads(call("show", make_run().run_id, "-o", "json").stdout)
    assert shown["proofs"]["50"]["model.layers.1.mlp"]["rows"] == 48
    assert shown["layers"]["100"] == LAYERS


def write_priced(recipe: Path, shares: list[float], probed: list[float], *changes: str) -> RunFolder:
    """Write a run whose steps, and probes, cost these shares of dense's passes of 1e9 FLOPs; updates take 1e8."""
    plan = Plan(recipe=load_recipe(recipe, [*changes, f"training.max_steps={len(shares)}"]))
    run = create_run(plan.run_id)
    plan.save(run.path)
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=0, environment={"python": "3", "packages": {}})
        for step, share in enumerate(shares, 1):
            values = {"flops/step": share * 1e9 + 1e8, "flops/step_dense": 1.1e9}
            journal.write("metrics", step=step, values=values | {"flops/update": 1e8, "flops/update_dense": 1e8})
        for step, share in enumerate(probed, 1):
            names = ("flops/forward", "flops/backward_executed", "flops/forward_dense", "flops/backward_dense")
            values = dict(zip(names, (share * 3e8, share * 7e8, 3e8, 7e8), strict=True))
            journal.write("metrics", step=step, values=values)
        journal.write("end", status="finished", step=len(shares), text="")
    return run


def test_the_summary_has_the_cost_of_all_steps_whatever_probes_fell_on(cli: Cli, write_recipe: Write) -> None:
    def show(shares: list[float], probed: list[float], *changes: str) -> str:
        run = write_priced(write_recipe(), shares, probed, *changes)
        return " ".join(cli("show", run.run_id, "--all").stdout.split())

    alternating = show([0.25, 1.0] * 4, [1.0] * 8)
    assert "cost 5.80 GFLOP for 8 steps, updates included, 0.66 times dense training on the same batches" in alternating
    even = show([0.5] * 8, [0.5, 0.52] * 4)
    assert "cost 4.80 GFLOP for 8 steps, updates included, 0.55 times dense training on the same batches" in even
    dense = show([1.0] * 8, [1.0] * 8, "policy=dense")
    assert "cost 8.80 GFLOP for 8 steps, updates included" in dense
    assert "times dense training on the same batches" not in dense
