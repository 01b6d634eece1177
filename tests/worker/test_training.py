"""What a worker's run is: a plain PyTorch loop, measured."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.run.metric import METRICS
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.data import build_data
from sparsebp_cli.worker.model import build_model, build_tokenizer
from tests.worker.conftest import LLAMA, work

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
QWEN2 = LLAMA | {"model_type": "qwen2"}
NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
TRAINING = {"max_steps": 12, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "warmup_steps": 3, "seed": 7}


def plain_loop(recipe: Recipe) -> dict[str, torch.Tensor]:
    """What anybody would write, without SparseBP's engine, accelerate or checkpoints."""
    training = recipe.training
    torch.manual_seed(training.seed)
    tokenizer = build_tokenizer(recipe.model)
    data = build_data(recipe.dataset, tokenizer)
    torch.manual_seed(training.seed)
    model = build_model(recipe.model, tokenizer, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    schedule = get_scheduler("linear", optimizer, training.warmup_steps, training.max_steps)
    order = BatchOrder(data.train, training.per_device_train_batch_size, training.seed, tokenizer.pad_token_id)
    for step in range(training.max_steps):
        batches = [order[2 * step], order[2 * step + 1]]
        count = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
        for batch in batches:
            model(**batch, num_items_in_batch=count).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def assert_same_weights(run: RunFolder, expected: dict[str, torch.Tensor]) -> None:
    saved = load_file(run.path / "model" / "model.safetensors")
    for name, parameter in expected.items():
        if name in saved:  # a tied head is stored once
            assert torch.equal(saved[name], parameter), name
    assert len(saved) >= len(expected) - 1


@pytest.mark.parametrize("config", [LLAMA, GPT2, QWEN2, NEOX], ids=["llama", "gpt2", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("policy", [{"name": "dense"}, {"name": "topk", "keep": 1.0}], ids=["dense", "keep-1"])
def test_dense_and_keep_1_equal_a_plain_loop_bitwise(tiny_recipe, prepared, config, policy) -> None:
    torch.set_num_threads(1)
    model = {"config": config, "tokenizer": tiny_recipe().model.tokenizer}
    recipe = tiny_recipe(training=TRAINING, policy=[policy])
    recipe = recipe.model_copy(update={"model": recipe.model.model_validate(model)})
    run = prepared(recipe)
    assert work(run) == 0, (run.path / "worker.log").read_text()
    assert_same_weights(run, plain_loop(recipe))


def test_the_same_seed_gives_the_same_numbers_and_another_seed_does_not(tiny_recipe, prepared) -> None:
    policy = [{"name": "random", "keep": 0.5}]
    runs = [prepared(tiny_recipe(policy=policy, training={"seed": seed})) for seed in (3, 3, 4)]
    losses = []
    for run in runs:
        assert work(run) == 0
        losses.append(History.load(run.path).series("train/loss"))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.fixture
def sparse_history(tiny_recipe, prepared) -> History:
    recipe = tiny_recipe(
        policy=[{"name": "topk", "keep": 0.25, "along": "rows"}],
        measure={"probe_every": 4, "warmup_steps": 2},
        dataset={"max_seq_length": 64},
    )
    run = prepared(recipe)
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return History.load(run.path)


def test_a_run_tells_quality_time_memory_work_and_fidelity(sparse_history) -> None:
    logged = set(sparse_history.metrics)
    assert logged == {name for name, metric in METRICS.items() if not metric.when}
    assert list(sparse_history.series("eval/loss")) == [0, 5, 10]
    assert list(sparse_history.series("train/loss")) == list(range(1, 11))
    assert list(sparse_history.series("speed/ceiling")) == [3, 4, 8]
    assert sparse_history.last("train/tokens") == 10 * 4 * 64


def test_the_counted_work_is_that_of_the_kept_rows(sparse_history) -> None:
    """Linears have 2 N D O for dgrad and as much for wgrad; the attention's own backward stays as it is."""
    rows, width, inner, vocabulary, kv = 4 * 64, 32, 64, 300, 16
    linears = 2 * (2 * width * width + 2 * width * kv + 3 * width * inner) + width * vocabulary
    dense_linears = 2 * 2 * rows * linears
    skipped = sparse_history.last("flops/backward_dense") - sparse_history.last("flops/backward_executed")
    assert skipped == pytest.approx(0.75 * dense_linears, rel=1e-6)
    forward, dense = sparse_history.last("flops/forward"), sparse_history.last("flops/backward_dense")
    expected = (forward + dense) / (forward + dense - 0.75 * dense_linears)
    assert sparse_history.last("speed/ceiling") == pytest.approx(expected, rel=1e-6)
    assert sparse_history.last("policy/kept_share") == pytest.approx(0.25)
    assert 0 < sparse_history.last("fidelity/cosine") < 1


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"mixed_precision": "bf16"}},
        {"model": {"dtype": "bfloat16"}},
        {"backward": {"checkpointing": "full"}},
        {"backward": {"execution": "reference"}},
        {"backward": {"exclude": ["lm_head"]}},
        {"model": {"attention": "eager"}},
        {"model": {"lora": {"r": 4}}},
        {"training": {"optim": "sgd", "optim_args": {"momentum": 0.9}, "lr_scheduler_type": "cosine"}},
        {"training": {"optim": "adafactor", "lr_scheduler_type": "constant"}},
        {"training": {"max_grad_norm": None, "gradient_accumulation_steps": 3}},
    ],
    ids=lambda sections: "-".join(str(v) for s in sections.values() for v in s.values())[:40],
)
def test_every_way_of_training_learns_with_a_sparse_policy_and_resumes(tiny_recipe, prepared, sections) -> None:
    merged = {"policy": [{"name": "topk", "keep": 0.5, "along": "columns"}], "measure": {"probe_every": 5}} | sections
    run = prepared(tiny_recipe(**merged))
    assert work(run) == 0, (run.path / "worker.log").read_text()
    history = History.load(run.path)
    assert history.last("train/loss") < history.series("train/loss")[1]
    assert run.state() is State.FINISHED


def test_checkpointing_activations_changes_no_gradient(tiny_recipe, prepared) -> None:
    policy = [{"name": "topk", "keep": 0.5}]
    runs = [prepared(tiny_recipe(policy=policy, backward={"checkpointing": way})) for way in ("none", "full")]
    assert [work(run) for run in runs] == [0, 0]
    weights = [(run.path / "model" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]


def test_the_trained_model_loads_in_transformers_with_its_tokenizer(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe())
    assert work(run) == 0
    model = AutoModelForCausalLM.from_pretrained(run.path / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.path / "model")
    ids = tokenizer("the quick brown", return_tensors="pt", return_token_type_ids=False)
    assert model(**ids).logits.shape[-1] == len(tokenizer)


def test_a_diverging_run_stops_before_the_update_and_says_where(tiny_recipe, prepared) -> None:
    training = {"optim": "sgd", "learning_rate": 1e30, "max_grad_norm": None, "max_steps": 50}
    run = prepared(tiny_recipe(training=training, checkpoint={"every": 1}))
    assert work(run) == 3  # diverged
    history = History.load(run.path)
    assert run.state() is State.FAILED
    assert "step" in history.ends[-1]["text"]
    assert "nothing was updated" in history.ends[-1]["text"]
    newest = load_file(max((run.path / "checkpoints").glob("step-*")) / "weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in newest.values())


def test_the_worker_imports_no_mlflow_and_starts_by_its_command(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe(training={"max_steps": 1}))
    code = "import sys, runpy; sys.argv[1:] = [sys.argv[1]]\n"
    code += "try: runpy.run_module('sparsebp_cli.worker', run_name='__main__')\n"
    code += "except SystemExit as e: print('exit', e.code, 'mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(run.plan_file)], check=False, capture_output=True, text=True)
    assert "exit 0 False" in done.stdout, done.stdout + done.stderr
