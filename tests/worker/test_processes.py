"""Two processes train as one does: same losses, same weights, one journal, one way to stop, fail and go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from sparsebp_cli.errors import ChangedError, UnsupportedError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe import refuse_unsupported
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter, RunFolder, State
from tests.worker.conftest import LLAMA, start, work
from tests.worker.ranks import make_run, train_alone, train_on_two

pytestmark = pytest.mark.xdist_group("two processes")  # fixtures of this file take long: one process makes them

# Sums over the batch are added up in another order, and AdamW divides small gradients by their own size. The largest
# differences over the cases below, six steps at a learning rate of 3e-3: 3.6e-7 of losses and gradient norms, 4.5e-5 in
# weights (7 of 512 entries of one matrix; a wrong gradient moves them by 3e-3 a step). Held to:
RELATIVE, ABSOLUTE = 5e-6, 1e-4
ROWS = [{"name": "topk", "keep": 0.25, "along": "rows", "within": "example"}]
DECAY = {"weight_decay": 0.1, "weight_decay_of": "matrices"}  # two groups of parameters
CASES: dict[str, dict[str, Any]] = {
    "dense": {"measure": {"fidelity_every": None}},
    "rows": {"policy": ROWS, "measure": {"probe_every": 4, "fidelity_every": 4}},
    "lora": {"policy": ROWS, "model": {"config": LLAMA, "lora": {"r": 4}}},
    "accumulation": {"policy": ROWS, "training": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, **DECAY}},
    "checkpointing": {"policy": ROWS, "backward": {"checkpointing": "full"}},
    "tied": {"policy": ROWS, "model": {"config": LLAMA | {"tie_word_embeddings": True}}},
    "completion": {"policy": ROWS, "dataset": {"name": "pairs.jsonl", "format": "completion", "max_seq_length": 32}},
    "classification": {"policy": ROWS, "dataset": {"name": "pairs.jsonl", "format": "classification"}},
}
# Drawn on every rank apart, dropout too: this equals no run of one process, but must equal itself after a stop.
DRAWN = {
    "model": {"config": LLAMA | {"attention_dropout": 0.1}},
    "policy": [{"name": "random", "keep": 0.5, "along": "rows"}],
    "training": {"max_steps": 60},
    "checkpoint": {"every": 1000},
    "measure": {"fidelity_every": None},
}
# Ends by its work, where what a rank computes follows from the lengths of its own examples.
LIMITED = {
    "policy": [{"name": "lossless", "verify": "never"}],
    "dataset": {"name": "pairs.jsonl", "format": "completion", "max_seq_length": 32},
    "training": {"max_steps": 100, "max_flops": 1e8},
    "measure": {"probe_every": 50, "fidelity_every": None, "eval_every": 50},
}


@pytest.fixture(scope="module")
def make_recipe(tiny_folder: Path) -> Callable[..., Recipe]:
    """Make a recipe of six steps that sees eight examples a micro-batch on one process, and the same on two."""

    # Answers of very different lengths: two ranks have not as many targets.
    pairs = [{"prompt": f"{n}", "completion": " fox" * (n % 9 + 1), "label": n % 3} for n in range(111)]
    pairs = [pair | {"text": pair["completion"]} for pair in pairs]
    (tiny_folder / "pairs.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs), encoding="utf-8")

    def make(processes: int = 1, sharding: str = "none", **sections: Any) -> Recipe:
        values: dict[str, Any] = {
            "version": 1,
            "name": "tiny",
            "model": {"config": LLAMA, "tokenizer": str(tiny_folder / "tokenizer")},
            "dataset": {"name": "text.txt", "max_seq_length": 16},
            "training": {"max_steps": 6, "learning_rate": 3e-3, "per_device_train_batch_size": 8 // processes},
            # 11 held-out examples: in the last batch of eight, the second of two ranks has one less than the first.
            "measure": {"eval_every": 5, "probe_every": None, "fidelity_every": 4, "warmup_steps": 9},
            "checkpoint": {"every": 4},
            "target": {"threads": 1, "device": "cpu", "processes": processes, "sharding": sharding},
        }
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
        values["dataset"]["name"] = str(tiny_folder / values["dataset"]["name"])
        return Recipe.model_validate(values)

    return make


@pytest.fixture(scope="module")
def trained(make_recipe, tmp_path_factory) -> dict[tuple[str, str], RunFolder]:
    """Every case on one process (``one``), and on two by DDP (``none``) and by FSDP2 (``fsdp2``); DRAWN on two."""
    folder = tmp_path_factory.mktemp("runs")
    made = {(name, "one"): make_run(make_recipe(**case), folder) for name, case in CASES.items()}
    train_alone(list(made.values()))
    two = {(name, "none"): make_run(make_recipe(2, **case), folder) for name, case in CASES.items()}
    two |= {(name, "fsdp2"): make_run(make_recipe(2, "fsdp2", **CASES[name]), folder) for name in CASES}
    two |= {("drawn", way): make_run(make_recipe(2, way, **DRAWN), folder) for way in ("none", "fsdp2")}
    bf16 = {"policy": ROWS, "training": {"mixed_precision": "bf16"}}
    two |= {("bf16", way): make_run(make_recipe(2, way, **bf16), folder) for way in ("none", "fsdp2")}
    two |= {("limited", "none"): make_run(make_recipe(2, **LIMITED), folder)}
    train_on_two(list(two.values()))
    return made | two


def weights_of(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(next((run.path / "model").glob("*.safetensors")))


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in CASES for way in ("none", "fsdp2")])
def test_two_processes_train_as_one_does(trained, name, way) -> None:
    one, two = trained[name, "one"], trained[name, way]
    expected, found = History.load(one.path), History.load(two.path)
    compared = ["train/loss", "train/grad_norm", "eval/loss", "policy/kept_share", "train/tokens"]
    compared += ["eval/accuracy", "eval/macro_f1"] if name == "classification" else []
    compared += ["fidelity/cosine", "fidelity/relative_error"] if "policy" in CASES[name] else []
    for metric in compared:
        assert found.series(metric) == pytest.approx(expected.series(metric), rel=RELATIVE), metric
        assert len(found.series(metric)) > 0
    ours, theirs = weights_of(two), weights_of(one)
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=ABSOLUTE)
    losses, expected_losses = (history.examples[6]["loss"] for history in (found, expected))
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert found.examples[6]["targets"] == expected.examples[6]["targets"]


def test_a_limit_of_work_ends_both_processes_after_the_same_step(trained) -> None:
    """Each alone would reach it at another step, and the other would wait for it."""
    history = History.load(trained["limited", "none"].path)
    flops = list(history.series("flops/step").values())
    assert sum(flops[:-1]) < 1e8 <= sum(flops)
    assert 2 < len(flops) < 100


@pytest.mark.parametrize("way", ["none", "fsdp2"])
def test_a_checkpoint_of_two_processes_holds_what_that_of_one_does(trained, way) -> None:
    one, two = (trained["rows", w].path / "checkpoints" / "step-00000004" for w in ("one", way))
    for file in ("weights.safetensors", "optimizer.safetensors"):
        expected, found = load_file(one / file), load_file(two / file)
        assert set(found) == set(expected)
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=ABSOLUTE)


def test_a_checkpoint_of_two_processes_is_refused_by_one(trained, make_recipe, tmp_path) -> None:
    run = make_run(make_recipe(**CASES["rows"]), tmp_path)
    shutil.copytree(trained["rows", "none"].path / "checkpoints", run.path / "checkpoints")
    with pytest.raises(ChangedError, match=r"target.processes \(2, now 1\)"):
        train_alone([run])


def continue_from(source: RunFolder, recipe: Recipe, folder: Path) -> RunFolder:
    """A run with another number of processes and the checkpoint of a run, whose change its user has allowed."""
    run = make_run(recipe, folder)
    shutil.copytree(source.path / "checkpoints", run.path / "checkpoints")
    with JournalWriter(run.path) as journal:
        journal.write("allow", fields=["target.processes", "training"])
    return run


def test_a_checkpoint_goes_on_with_the_same_examples_on_another_number_of_processes(
    trained, make_recipe, tmp_path
) -> None:
    whole = {"training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}}
    one = {
        way: continue_from(trained["rows", way], make_recipe(**CASES["rows"]), tmp_path) for way in ("none", "fsdp2")
    }
    one["parts"] = continue_from(trained["dense", "none"], make_recipe(**CASES["dense"], **whole), tmp_path)
    two = {
        way: continue_from(trained["rows", "one"], make_recipe(2, way, **CASES["rows"]), tmp_path)
        for way in one
        if way != "parts"
    }
    train_alone(list(one.values()))
    train_on_two(list(two.values()))
    for way, run in [*one.items(), *two.items()]:
        expected = History.load(trained["dense" if way == "parts" else "rows", "one"].path)
        found = History.load(run.path)
        assert list(found.series("train/loss")) == [5, 6]
        for metric in ("train/loss", "train/grad_norm"):
            ours = {step: value for step, value in expected.series(metric).items() if step > 4}
            assert found.series(metric) == pytest.approx(ours, rel=RELATIVE), (way, metric)
        assert found.series("train/tokens")[6] == expected.series("train/tokens")[6]


def test_a_checkpoint_that_cannot_go_on_elsewhere_is_refused_by_name(trained, make_recipe, tmp_path) -> None:
    sections = CASES["rows"] | {"training": {"per_device_train_batch_size": 4}}
    run = continue_from(trained["rows", "none"], make_recipe(**sections), tmp_path)
    with pytest.raises(UnsupportedError, match=r"8 examples per step, but 'target.processes: .*' gives 4"):
        train_alone([run])


def test_the_work_of_a_probe_is_that_of_one_of_two_processes(trained) -> None:
    one, two = (History.load(trained["rows", way].path) for way in ("one", "none"))
    for metric in ("flops/forward", "flops/backward_executed", "flops/backward_dense"):
        assert two.last(metric) == pytest.approx(one.last(metric) / 2, rel=1e-4)  # rotary frequencies know no batch
    for metric in ("proof/executed_share", "proof/claimed_share", "speed/ceiling", "memory/weight_bytes"):
        assert two.last(metric) == pytest.approx(one.last(metric), rel=1e-5)
    assert two.proofs[4]["modules"].keys() == one.proofs[4]["modules"].keys()


def test_sharded_weights_take_half_the_memory_and_no_probe_and_say_so(trained) -> None:
    one, two = (History.load(trained["rows", way].path) for way in ("one", "fsdp2"))
    for metric in ("memory/weight_bytes", "memory/optimizer_bytes"):
        assert two.last(metric) == pytest.approx(one.last(metric) / 2, rel=0.01)
    assert two.last("flops/forward") is None
    assert [text for _, _, text in two.notes if "the run makes no probes" in text]


def test_bfloat16_is_the_same_sharded_or_not(trained) -> None:
    # One process is no yardstick: it rounds other sums to eight bits, and then chooses other rows.
    ddp, sharded = (History.load(trained["bf16", way].path) for way in ("none", "fsdp2"))
    assert sharded.series("train/loss") == pytest.approx(ddp.series("train/loss"), rel=RELATIVE)
    assert sharded.last("train/loss") < sharded.series("train/loss")[1]


def test_ranks_draw_apart_and_the_first_as_one_process_does() -> None:
    from sparsebp_cli.policy import Site, Step

    site = Site("layer", 8, (2, 4))
    draws = [torch.rand(4, generator=step.generator(site)) for step in (Step(3), Step(3, rank=0), Step(3, rank=1))]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_a_group_of_runs_has_one_number_of_processes(make_recipe) -> None:
    groups = [Plan(recipe=make_recipe(n, training={"per_device_train_batch_size": 4})).group for n in (1, 2)]
    assert groups[0] != groups[1]


@pytest.mark.parametrize(
    ("sharding", "sections", "text"),
    [
        (
            "none",
            {"policy": [{"name": "max-child"}], "backward": {"sites": "nodes"}},
            "'max-child' works in one",
        ),
        ("none", {"policy": ROWS, "backward": {"sites": "nodes"}}, "backward.sites: nodes works in one process"),
        ("none", {"policy": ROWS, "backward": {"update": "eager"}}, "backward.update: eager works in one process"),
        (
            "none",
            {"policy": [{"name": "frozen", "turn": "layers"}]},
            "with a set of trained parameters that changes works in one",
        ),
        ("fsdp2", {"training": {"optim": "adafactor"}}, "training.optim: adafactor is not supported"),
        ("fsdp2", {"training": {"optim": "adagrad"}}, "training.optim: adagrad is not supported"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_by_name(make_recipe, sharding, sections, text) -> None:
    with pytest.raises(UnsupportedError, match=text):
        refuse_unsupported(make_recipe(2, sharding, **sections))


def test_a_refused_recipe_ends_before_any_process_starts(make_recipe, prepared) -> None:
    run = prepared(make_recipe(2, policy=[{"name": "max-child"}], backward={"sites": "nodes"}))
    assert work(run) == 2
    assert "target.processes: 2" in History.load(run.path).ends[-1]["text"]
    assert not (run.path / "checkpoints").exists()


def ranks_of(process: Any) -> list[psutil.Process]:
    """The ranks that a worker started, by their number."""
    children = psutil.Process(process.pid).children()
    return sorted((c for c in children if "RANK" in c.environ()), key=lambda c: int(c.environ()["RANK"]))


def wait_for_steps(run: RunFolder, process: Any, steps: int) -> None:
    while len(History.load(run.path).series("train/loss")) < steps:
        assert process.is_alive(), (process.exitcode, (run.path / "worker.log").read_text())
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("way", "number", "code"),
    [pytest.param("none", signal.SIGTERM, 143, marks=pytest.mark.long), ("fsdp2", signal.SIGINT, 130)],
)
def test_a_stopped_run_of_two_processes_goes_on_to_the_same_bits(
    trained, make_recipe, prepared, way, number, code
) -> None:
    run, straight = prepared(make_recipe(2, way, **DRAWN)), trained["drawn", way]
    process = start(run)
    wait_for_steps(run, process, 3)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.kill(process.pid, number)
    process.join()
    log = (run.path / "worker.log").read_text()
    assert (process.exitcode, log) == (code, "")
    assert run.state() is State.INTERRUPTED
    assert not any(rank.is_running() for rank in ranks)
    assert len(list((run.path / "checkpoints").glob("step-*"))) == 1
    assert work(run) == 0, (run.path / "worker.log").read_text()
    assert run.state() is State.FINISHED
    ours, theirs = History.load(run.path), History.load(straight.path)
    assert [attempt for attempt, _ in ours.warm] == [1, 2]
    for metric in ("train/loss", "eval/loss", "train/grad_norm"):
        assert ours.series(metric) == theirs.series(metric)
    for key, tensor in weights_of(straight).items():
        assert torch.equal(weights_of(run)[key], tensor), key


@pytest.mark.parametrize("way", ["none", "fsdp2"])
def test_two_processes_train_as_one_does_on_the_device_that_a_recipe_has_by_default(
    trained, make_recipe, prepared, monkeypatch, way
) -> None:
    """``device: auto`` without a GPU: accelerate joined no ranks there, and each trained a model of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = prepared(make_recipe(2, way, **CASES["dense"], target={"device": "auto"}))
    assert work(run) == 0, (run.path / "worker.log").read_text()
    found, expected = History.load(run.path), History.load(trained["dense", "one"].path)
    for metric in ("train/loss", "eval/loss", "train/grad_norm"):
        assert found.series(metric) == pytest.approx(expected.series(metric), rel=RELATIVE), metric


def test_adapters_over_a_quantised_base_train_as_on_one_process(make_recipe, tmp_path) -> None:
    model = {
        "name": "austen-llama",
        "tokenizer": None,
        "config": None,
        "lora": {"r": 4},
        "quantization": {"type": "nf4"},
    }
    shared: dict[str, Any] = {"model": model, "policy": ROWS, "training": {"max_steps": 2}}
    one, two = (make_run(make_recipe(number, **shared), tmp_path) for number in (1, 2))
    train_alone([one])
    train_on_two([two])
    found, expected = History.load(two.path), History.load(one.path)
    for metric in ("train/loss", "eval/loss", "train/grad_norm"):
        assert found.series(metric) == pytest.approx(expected.series(metric), rel=RELATIVE), metric


def test_gradients_that_are_not_summed_end_the_run(make_recipe, tmp_path) -> None:
    """The mistake itself, since nothing else shows it: the loss of two models is as finite as that of one."""
    run = make_run(make_recipe(2), tmp_path)
    with pytest.raises(AssertionError, match=r"have different gradients at step 1 .*, so they were not summed"):
        train_on_two([run], is_summed=False)


def test_a_rank_that_dies_ends_the_run_with_its_name(make_recipe, prepared) -> None:
    run = prepared(make_recipe(2, training={"max_steps": 10_000}))
    process = start(run)
    wait_for_steps(run, process, 2)
    ranks = ranks_of(process)
    ranks[1].kill()
    process.join()
    assert process.exitcode == 1
    assert run.state() is State.FAILED
    assert History.load(run.path).ends == [
        History.load(run.path).ends[0] | {"status": "failed", "text": "rank 1 of 2 was killed by SIGKILL"}
    ]
    assert not any(rank.is_running() for rank in ranks)


def test_ranks_end_with_the_worker_that_started_them(make_recipe, prepared) -> None:
    run = prepared(make_recipe(2, "fsdp2", training={"max_steps": 10_000}))
    process = start(run)
    wait_for_steps(run, process, 2)
    ranks = ranks_of(process)
    bound = {place.laddr.port for rank in ranks for place in rank.net_connections() if place.status == "LISTEN"}
    chosen = int(ranks[0].environ()["MASTER_PORT"])  # was free; another program may take it
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert (len(ranks), alive) == (2, [])
    assert chosen not in bound
    assert run.state() is State.INTERRUPTED
    files = {file.name for file in run.path.iterdir()}
    assert files == {"plan.json", "journal.jsonl", "checkpoints", "worker.log", "worker.lock", "rank.lock"}
