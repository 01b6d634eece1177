"""A tokenizer, a text and a recipe small enough that a run takes a second or two."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import RunFolder, create_run

TEXT = "\n".join(f"Line {n}: the quick brown fox {n % 7} jumps over the lazy dog {n * n % 101}." for n in range(400))
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

# Workers are forked from one process that has imported everything: a run starts in a moment.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.worker.warm"])


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``tokenizer/`` and ``text.txt``."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=64
    )
    fast.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def tiny_recipe(tiny_folder: Path) -> Callable[..., Recipe]:
    """Make a recipe of ten steps on a random llama; keyword arguments replace or merge into its sections."""

    def make(**sections: Any) -> Recipe:
        values: dict[str, Any] = {
            "version": 1,
            "name": "tiny",
            "model": {"config": LLAMA, "tokenizer": str(tiny_folder / "tokenizer")},
            "dataset": {"name": str(tiny_folder / "text.txt"), "max_seq_length": 16},
            "training": {"max_steps": 10, "learning_rate": 1e-2, "per_device_train_batch_size": 4},
            "measure": {"eval_every": 5, "eval_examples": 8, "probe_every": None},
            "checkpoint": {"every": 4},
            "target": {"threads": 1, "device": "cpu"},
        }
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
        return Recipe.model_validate(values)

    return make


@pytest.fixture
def prepared() -> Callable[[Recipe], RunFolder]:
    """Make the run's folder with its plan, ready for a worker."""

    def make(recipe: Recipe) -> RunFolder:
        plan = Plan(recipe=recipe)
        run = create_run(plan.run_id)
        plan.save(run.path)
        return run

    return make


def work(run: RunFolder) -> int:
    """Run the worker in a process of its own until it ends.

    Returns:
        Its exit code; negative is the number of the signal that killed it.
    """
    process = start(run)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def start(run: RunFolder) -> Any:
    """Start the worker in a process of its own."""
    process = FORKS.Process(target=_entry, args=(run.plan_file,))
    process.start()
    return process


def _entry(plan_file: Path) -> None:
    import os
    import sys

    from sparsebp_cli.worker.__main__ import main

    log = os.open(plan_file.parent / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(main(plan_file))
