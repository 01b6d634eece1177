"""What is measured beside training: it is true, it is small, and it leaves no trace."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
import torch

from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.run.metric import METRICS
from sparsebp_cli.worker.stopwatch import Stopwatch, read_load
from tests.worker.conftest import LLAMA, work

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}
DROPPING_LLAMA = LLAMA | {"attention_dropout": 0.2}
OFTEN = {"probe_every": 1, "fidelity_every": 1, "fidelity_draws": 3}
OFTEN |= {"eval_every": 1, "eval_examples": 8}
NEVER = {"probe_every": None, "fidelity_every": None, "eval_every": 1, "eval_examples": 8}


def _finished(run: RunFolder) -> History:
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return History.load(run.path)


@pytest.mark.always("vcas-llama")
@pytest.mark.parametrize("config", [DROPPING_LLAMA, pytest.param(GPT2, marks=pytest.mark.long)], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    "policy",
    [
        {"name": "topk", "keep": 0.25, "along": "rows"},
        {"name": "random", "keep": 0.5},
        {"name": "topk", "keep": 0.25, "along": "elements"},
        {"name": "vcas", "every": 2},
    ],
    ids=["topk", "random", "topk-elements", "vcas"],
)
def test_measuring_changes_no_weight_and_no_number(tiny_recipe, prepared, config, policy) -> None:
    _compare_with_and_without(tiny_recipe, prepared, config, policy, {})


@pytest.mark.always("max-child")
@pytest.mark.parametrize(
    ("config", "policy", "backward"),
    [
        pytest.param(
            *(DROPPING_LLAMA, {"name": "topk", "keep": 0.25}, {"sites": "nodes"}),
            marks=pytest.mark.long,
        ),
        (GPT2, {"name": "max-child", "leaves": "always", "ties": "random", "lookahead": True}, {"sites": "nodes"}),
        (GPT2, {"name": "topk", "keep": 0.5}, {"checkpointing": "full"}),
        (DROPPING_LLAMA, {"name": "random", "keep": 0.5}, {"execution": "reference"}),
    ],
    ids=["nodes", "max-child", "checkpointing", "reference"],
)
def test_measuring_changes_nothing_at_any_site(tiny_recipe, prepared, config, policy, backward) -> None:
    _compare_with_and_without(tiny_recipe, prepared, config, policy, backward)


def _compare_with_and_without(tiny_recipe, prepared, config, policy, backward) -> None:
    """Two micro-batches a step: the counters of the policy's state are those of training alone."""
    training = {"max_steps": 6, "gradient_accumulation_steps": 2}
    sections = {"model": {"config": config}, "policy": [policy], "training": training, "backward": backward}
    often, never = (prepared(tiny_recipe(**sections, measure=measure)) for measure in (OFTEN, NEVER))
    measured, plain = _finished(often), _finished(never)
    files = [run.path / "model" / "model.safetensors" for run in (often, never)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(plain.metrics) > 8
    for name in plain.metrics:
        if not METRICS[name].timing:
            assert measured.series(name) == plain.series(name), name
    every_step = set(range(1, 7))
    assert set(measured.series("fidelity/cosine")) == set(measured.series("speed/speedup")) == every_step
    assert measured.layers.keys() == measured.metrics["fidelity/cosine"].keys()


@pytest.fixture
def measured(tiny_recipe, prepared) -> Any:
    def run(policy: dict[str, Any], **sections: Any) -> tuple[RunFolder, History]:
        measure = {"probe_every": 4, "fidelity_every": 3, "warmup_steps": 1} | sections.pop("measure", {})
        folder = prepared(tiny_recipe(policy=[policy], measure=measure, **sections))
        return folder, _finished(folder)

    return run


def test_fidelity_and_probe_come_each_at_its_own_steps(measured) -> None:
    _, history = measured({"name": "topk", "keep": 0.25})
    assert list(history.series("speed/ceiling")) == [2, 4, 8]
    assert list(history.series("fidelity/cosine")) == [2, 3, 6, 9]
    assert sorted(history.layers) == [2, 3, 4, 6, 8, 9]
    probed_only, compared = history.layers[4], history.layers[3]
    assert {figures["cosine"] for figures in probed_only.values()} == {None}
    parts = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    assert list(compared) == parts
    for part in ("model.layers.0", "model.layers.1", "lm_head"):
        assert compared[part]["kept_share"] == probed_only[part]["kept_share"] == 0.25
        assert 0 < compared[part]["cosine"] < 1
        assert 0 < compared[part]["sign_agreement"] < 1
        assert compared[part]["relative_error"] > 0
    assert compared["model.norm"]["kept_share"] is None


def test_fidelity_is_the_same_with_the_probe_and_without(measured) -> None:
    """With a probe the gradients are those of its timed passes."""
    _, both = measured({"name": "random", "keep": 0.5}, measure={"probe_every": 3, "fidelity_draws": 3})
    _, alone = measured({"name": "random", "keep": 0.5}, measure={"probe_every": None, "fidelity_draws": 3})
    for name in ("cosine", "relative_error", "sign_agreement", "bias", "bias_standard_error", "variance"):
        assert both.series(f"fidelity/{name}") == alone.series(f"fidelity/{name}"), name
        assert list(alone.series(f"fidelity/{name}")) == [2, 3, 6, 9]
    assert both.layers[6] == alone.layers[6]
    assert not alone.proofs
    assert not set(alone.metrics) & {"speed/ceiling", "proof/executed_share", "flops/forward"}


def test_a_policy_that_draws_nothing_has_no_bias_and_costs_no_further_draws(measured) -> None:
    _, history = measured({"name": "topk", "keep": 0.25}, measure={"fidelity_draws": 5})
    assert history.last("fidelity/cosine") > 0
    assert not set(history.metrics) & {"fidelity/bias", "fidelity/bias_standard_error", "fidelity/variance"}


def test_the_proof_tells_work_and_storage_of_every_module(measured) -> None:
    _, history = measured({"name": "topk", "keep": 0.25, "along": "rows"})
    assert list(history.proofs) == [2]  # later ones are the same
    proof = history.proofs[2]
    table = {name: dict(zip(proof["columns"], row, strict=True)) for name, row in proof["modules"].items()}
    rows, width, inner = 4 * 16, 32, 64
    down = table["model.layers.1.mlp.down_proj"]
    assert down == {
        "forward_flops": 2 * rows * width * inner,
        "recomputed_flops": 0,
        "backward_flops": 2 * 2 * rows // 4 * width * inner,
        "dense_backward_flops": 2 * 2 * rows * width * inner,
        "saved_bytes": 4 * rows * inner,
        "dense_saved_bytes": 4 * rows * inner,
        "rows": 2 * rows // 4,
        "dense_rows": 2 * rows,
        "claimed_share": 0.25,
        "kept_share": 0.25,
    }
    for metric, column in (("flops/forward", "forward_flops"), ("memory/saved_for_backward_bytes", "saved_bytes")):
        assert history.last(metric) == sum(row[column] for row in table.values())
    executed = sum(row["backward_flops"] + row["recomputed_flops"] for row in table.values())
    assert history.last("flops/backward_executed") == executed
    assert history.last("proof/rows_share") == history.last("proof/executed_share") == 0.25
    assert history.last("proof/claimed_share") == 0.25
    assert history.last("proof/excess_share") == 0
    assert "overclaim" not in history.facts


def test_checkpointing_shows_as_recomputed_work(measured) -> None:
    _, history = measured({"name": "topk", "keep": 0.5}, backward={"checkpointing": "full"})
    proof = history.proofs[2]
    table = {name: dict(zip(proof["columns"], row, strict=True)) for name, row in proof["modules"].items()}
    query = table["model.layers.0.self_attn.q_proj"]
    assert query["recomputed_flops"] == query["forward_flops"] > 0
    assert query["backward_flops"] == query["dense_backward_flops"] / 2
    assert history.last("proof/excess_share") == 0
    assert 0.5 <= history.last("proof/executed_share") < 0.6


def test_the_claim_of_a_site_without_a_kernel_is_called_out_once(measured) -> None:
    """In bfloat16 on a CPU nothing multiplies single entries: they are masked, and all is multiplied."""
    _, history = measured(
        {"name": "topk", "keep": 0.004, "along": "elements"}, model={"dtype": "bfloat16"}, measure={"probe_every": 2}
    )
    warnings = [text for _, level, text in history.notes if level == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "the policy estimates 0.4% of the dense backward FLOPs at its sites, but 100.0% were counted "
        "(step 2, at 15 of 15 sites, most at "
    )
    fact = history.facts["overclaim"]
    assert (fact["step"], fact["num_sites"], fact["executed_share"], fact["by_choice"]) == (2, 15, 1.0, False)
    assert fact["claimed_share"] == pytest.approx(0.004)
    assert history.last("proof/excess_share") > 0.9


def test_what_the_engine_notes_is_in_the_journal_once(measured) -> None:
    _, history = measured({"name": "topk", "keep": 0.5, "layers": [0]}, model={"config": GPT2}, measure=NEVER)
    notes = [text for _, level, text in history.notes if level == "info"]
    assert notes == ["layers 0 to 1 are those of transformer.h"]


def test_the_reference_engine_is_no_lie(measured) -> None:
    _, history = measured({"name": "topk", "keep": 0.25}, backward={"execution": "reference"})
    levels = [(level, text) for _, level, text in history.notes if "the policy estimates" in text]
    assert [level for level, _ in levels] == ["info"]
    assert levels[0][1].endswith("this is expected, because backward.execution: reference computes every product")
    assert history.facts["overclaim"]["by_choice"] is True


def test_a_policy_that_is_asked_nowhere_is_named(measured) -> None:
    """Only the adapters are trained, and they are left out; no gradient needs to go through anything else."""
    _, history = measured(
        {"name": "topk", "keep": 0.3},
        model={"lora": {"r": 4, "target_modules": ["q_proj"]}},
        backward={"exclude": ["*q_proj*", "*layers.1.*", "*o_proj", "*mlp*", "*lm_head"]},
    )
    warnings = [text for _, level, text in history.notes if level == "warning"]
    assert warnings == ["no gradient reached any of the policy's 2 sites, so the policy had no effect"]


@pytest.mark.always("topk-0.3-columns", "random-0.3-[1]")
@pytest.mark.parametrize(
    "policy",
    [
        {"name": "dense"},
        {"name": "topk", "keep": 0.3, "along": "rows"},
        {"name": "topk", "keep": 0.3, "along": "columns"},
        {"name": "topk", "keep": 0.3, "along": "elements"},
        {"name": "topk", "keep": 0.01, "along": "columns"},
        {"name": "random", "keep": 0.3, "layers": [1]},
        {"name": "topk", "keep": {"from": 1.0, "to": 0.3, "over": 0.8}},
    ],
    ids=lambda policy: "-".join(str(value) for value in policy.values()),
)
def test_an_honest_policy_is_not_called_out(measured, policy) -> None:
    _, history = measured(policy, measure={"probe_every": 2, "fidelity_every": None})
    assert history.last("proof/excess_share") == 0
    assert not [text for _, level, text in history.notes if level == "warning"]
    assert "overclaim" not in history.facts


def test_the_journal_of_a_large_model_stays_small(measured) -> None:
    """Bytes a module: thirty-two layers of eleven modules, every 50 of 10,000 steps, are some megabytes."""
    folder, history = measured({"name": "topk", "keep": 0.3}, model={"config": LLAMA | {"num_hidden_layers": 8}})
    lines = [json.loads(line) for line in (folder.path / "journal.jsonl").read_text().splitlines()]
    size = {kind: [len(json.dumps(line)) for line in lines if line["kind"] == kind] for kind in ("layers", "proof")}
    assert len(size["proof"]) == 1
    assert size["proof"][0] < 150 * len(history.proofs[2]["modules"])
    assert max(size["layers"]) < 160 * len(history.layers[2])


def test_a_run_says_what_a_step_cost_the_processor_and_how_busy_the_machine_was(measured) -> None:
    _, history = measured({"name": "dense"}, training={"max_steps": 4}, measure={"probe_every": None})
    for name in ("time/step_cpu_seconds", "host/load"):
        assert METRICS[name].timing
        assert set(history.series(name)) == {1, 2, 3, 4}
    assert min(history.series("time/step_cpu_seconds").values()) > 0


def test_seconds_of_the_processor_are_those_of_all_threads_and_not_those_that_pass(monkeypatch) -> None:
    monkeypatch.setattr(time, "thread_time", lambda: pytest.fail("one thread"))
    monkeypatch.setattr(time, "process_time", iter((4.0, 7.0)).__next__)
    assert Stopwatch(torch.device("cpu")).read()["step_cpu"] == 3.0


def test_the_load_is_that_of_one_minute_over_the_number_of_cpus(monkeypatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (6.0, 1.0, 1.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert read_load() == 1.5
