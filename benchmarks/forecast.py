"""Compares what ``sparsebp validate --memory`` says with the measured peak of a run, setting by setting, on a CPU.

    python benchmarks/forecast.py                   # all settings; writes benchmarks/results/forecast.json
    python benchmarks/forecast.py --only gpt2       # those whose name has this word; the others keep their rows

Each forecast and each run is a process of its own. Measured is the most live bytes in the two steps that a run watches,
every allocation by the profiler of PyTorch, and beside it the most memory that the process held outside of
measurements, which the libraries and their buffers are a part of.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkout import use_checkout

PRELOADED = [
    "sparsebp_cli.worker.training",
    "sparsebp_cli.worker.build",
    "sparsebp_tools.forecast.measure",
    "sparsebp_cli.policies.topk",
    "peft",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "bert")),
]
RESULTS = Path(__file__).resolve().parent / "results" / "forecast.json"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 512, "vocab_size": 8192}
BERT = {
    "model_type": "bert",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 30522,
}
CAUSAL = {"tokenizer": "austen-llama"}
TEXT = {"name": "austen", "max_seq_length": 128}
BASE: dict[str, Any] = {
    "version": 1,
    "model": {"config": LLAMA, **CAUSAL},
    "dataset": TEXT,
    "training": {"max_steps": 3, "per_device_train_batch_size": 8},
    "measure": {"probe_every": 100, "fidelity_every": None, "warmup_steps": 2, "eval_every": 100, "eval_examples": 4},
    "checkpoint": {"every": 100},
    "target": {"kind": "local", "device": "cpu", "threads": 1},
}
FEW = {**TEXT, "max_examples": 300}  # of letters a text has many
SPELLING = {"name": "cmudict", "format": "completion", "max_seq_length": 64, "max_examples": 4000}
QLORA = {  # weights are quantised where they are loaded, so the model has some
    "config": None,
    "tokenizer": None,
    "name": "austen-llama",
    "quantization": {"type": "nf4"},
    "lora": {"r": 8, "target_modules": "all-linear"},
}
# Each with what it changes of BASE.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, bfloat16": {"model": {"dtype": "bfloat16"}},
    "llama, autocast": {"training": {"mixed_precision": "bf16"}},
    "llama, SGD": {"training": {"optim": "sgd"}},
    "llama, accumulation": {"training": {"gradient_accumulation_steps": 4}},
    "llama, full checkpointing": {"backward": {"checkpointing": "full"}},
    "llama, 2 segments": {"backward": {"segments": 2}},
    "llama, eager": {"backward": {"update": "eager", "eager_clip": "exact"}},
    "llama, attention eager": {"model": {"attention": "eager"}},
    "llama, LoRA": {"model": {"lora": {"r": 8}}},
    "llama, LoRA, full checkpointing": {"model": {"lora": {"r": 8}}, "backward": {"checkpointing": "full"}},
    "austen-llama, LoRA, full checkpointing": {
        "model": {key: value for key, value in QLORA.items() if key != "quantization"},
        "backward": {"checkpointing": "full"},
    },
    "austen-llama, QLoRA": {"model": QLORA},
    "austen-llama, QLoRA in bfloat16": {"model": {**QLORA, "dtype": "bfloat16"}},
    "austen-llama, QLoRA, full checkpointing": {"model": QLORA, "backward": {"checkpointing": "full"}},
    "austen-llama, QLoRA, topk rows 0.1": {
        "model": QLORA,
        "policy": {"name": "topk", "keep": 0.1, "along": "rows"},
    },
    "austen-llama, QLoRA, completion, lossless": {
        "model": QLORA,
        "dataset": SPELLING,
        "policy": {"name": "lossless", "verify": "never"},
    },
    "llama, topk rows 0.1": {"policy": {"name": "topk", "keep": 0.1, "along": "rows"}},
    "llama, topk columns 0.25": {"policy": {"name": "topk", "keep": 0.25, "along": "columns"}},
    "llama, frozen lower half": {
        "policy": {"name": "frozen", "train": ["*layers.2.*", "*layers.3.*", "*norm*", "*lm_head*"]}
    },
    "llama, sift 0.05": {"policy": {"name": "subnet", "keep": 0.05, "elements": ["model.layers.*"]}},
    "llama, tokens at random 0.25": {"policy": {"name": "tokens", "keep": 0.25, "score": "random"}},
    "llama, completion": {"dataset": SPELLING},
    # Its second step, which is watched, is longer than the first and so compares itself with the plain one.
    "llama, completion, lossless": {"dataset": SPELLING, "policy": {"name": "lossless"}},
    "llama, completion, lossless, never compared": {
        "dataset": SPELLING,
        "policy": {"name": "lossless", "verify": "never"},
    },
    "llama, completion, tokens at random 0.25": {
        "dataset": SPELLING,
        "policy": {"name": "tokens", "keep": 0.25, "score": "random"},
    },
    "llama, completion, tokens by loss 0.25": {
        "dataset": SPELLING,
        "policy": {"name": "tokens", "keep": 0.25, "score": "loss"},
    },
    "llama, completion, examples by loss": {
        "dataset": SPELLING,
        "policy": {"name": "selective-backprop", "keep": 0.5, "start": 0.0, "end": 1.0, "interrupt": 0},
    },
    "gpt2": {"model": {"config": GPT2}},
    "gpt2, eager": {"model": {"config": GPT2}, "backward": {"update": "eager", "eager_clip": "parameter"}},
    "gpt2, dropout 0, topk columns 0.1": {
        "model": {"config": GPT2, "dropout": 0.0},
        "policy": {"name": "topk", "keep": 0.1, "along": "columns"},
    },
    "bert, gaps": {"model": {"config": BERT, "tokenizer": "letters"}, "dataset": FEW},
    "bert, full checkpointing": {
        "model": {"config": BERT, "tokenizer": "letters"},
        "dataset": FEW,
        "backward": {"checkpointing": "full"},
    },
}


def main() -> int:
    """Measure, print and write the table; 1 if a setting is off by more than a tenth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name has this word")
    parser.add_argument("--backwards", action="store_true", help="the last setting first")
    args = parser.parse_args()
    use_checkout()
    from sparsebp_cli.worker import wait_briefly

    wait_briefly()  # as a worker does, before torch is imported
    rows: list[dict[str, Any]] = []
    print(f"{'':<36}{'forecast':>11}{'measured':>11}{'off by':>9}   {'process':>9}{'measured':>11}{'off by':>9}")
    for name, changes in reversed(SETTINGS.items()) if args.backwards else SETTINGS.items():
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"setting": name, **measure(lay_over(BASE, changes), Path(folder))})
        print(show(rows[-1]), flush=True)
        write(rows)
    errors = sorted(abs(row["error"]) for row in rows)
    print(f"{len(rows)} settings: off by {median(errors):.2%} at the median, {errors[-1]:.2%} at most")
    return 1 if errors[-1] > 0.1 else 0


def write(rows: list[dict[str, Any]]) -> None:
    """Put rows into the results, beside those of other settings."""
    import torch
    import transformers

    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    by_name = {row["setting"]: row for row in (*kept, *rows)}
    facts = {"torch": torch.__version__, "transformers": transformers.__version__}
    content = {"format": 1, "unit": "MB", "command": "python benchmarks/forecast.py", "versions": facts}
    content["rows"] = [by_name[name] for name in SETTINGS if name in by_name]
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def lay_over(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return one recipe laid over another, section by section; a config is whole."""
    return under | {
        key: under.get(key, {}) | value if isinstance(value, dict) and key != "policy" else value
        for key, value in over.items()
    }


def measure(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Forecast a recipe and run it, each in a process of its own; return both, in MB."""
    from sparsebp_cli.plan import make_plan
    from sparsebp_cli.recipe import load_recipe

    make_tokenizer(folder)
    file = folder / "setting.yaml"
    file.write_text(json.dumps(content), encoding="utf-8")
    plan_file = make_plan(load_recipe(file), file).save(folder)
    total, (peak, resident, before) = apart(forecast_plan, plan_file), apart(run_plan, plan_file)
    return {
        "forecast": round(total / 1e6, 1),
        "measured": round(peak / 1e6, 1),
        "error": round(total / peak - 1, 4),
        "process_forecast": round((before + total) / 1e6),
        "process_measured": round(resident / 1e6),
        "process_error": round((before + total) / resident - 1, 3),
    }


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer of letters, for models that need one with a mask."""
    from transformers import BertTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz.,;!?'\"-"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    BertTokenizer(vocab={token: number for number, token in enumerate(tokens)}).save_pretrained(folder / "letters")


def apart(work: Callable[[Path], Any], plan_file: Path) -> Any:
    """Return what a function returns in a process of its own, whose imports were made before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, plan_file).result()


def forecast_plan(plan_file: Path) -> int:
    """Return the peak that is forecast of a plan, in bytes."""
    from sparsebp_cli.plan import Plan
    from sparsebp_tools.forecast.measure import forecast
    from sparsebp_tools.forecast.record import ForecastRequest

    request = ForecastRequest(plan=Plan.load(plan_file), gpu=False, flops_per_second=1.0, remedies=False)
    return forecast(request, lambda *_: None).policy.largest_bytes


def run_plan(plan_file: Path) -> tuple[int, int, int]:
    """Train a plan. Return the most live bytes of its watched steps, the most that the process held outside of
    measurements, and what it held before model and data were loaded."""
    import psutil

    from sparsebp_cli.plan import Plan
    from sparsebp_cli.run import History, JournalWriter, RunFolder, metric
    from sparsebp_cli.worker.ending import StopRequest
    from sparsebp_cli.worker.training import Training

    before = psutil.Process().memory_info().rss
    run = RunFolder(plan_file.parent)
    with JournalWriter(run.path, durable=False) as journal:
        training = Training.build(Plan.load(plan_file), run, journal, StopRequest())
        if training.engine.trials_are_due():  # part of what is forecast; a run itself watches later steps alone
            due = training.step_peak.due
            training.step_peak.due = lambda step: step == 1 or due(step)
        training.run_to_end()
    history = History.load(run.path)
    peak = max(history.series(metric.STEP_PEAK_BYTES.name).values())
    return int(peak), int(max(history.series(metric.PEAK_RESIDENT_BYTES.name).values())), before


def show(row: dict[str, Any]) -> str:
    """Return a line of the table, in MB."""
    return (
        f"{row['setting']:<36}{row['forecast']:>11.1f}{row['measured']:>11.1f}{row['error']:>+9.2%}   "
        f"{row['process_forecast']:>9}{row['process_measured']:>11}{row['process_error']:>+9.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
