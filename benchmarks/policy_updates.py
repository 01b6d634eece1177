"""Counts the FLOPs of updates in trl's GRPOTrainer and DPOTrainer: plain, with prefixes of each batch, of each update.

    python benchmarks/policy_updates.py          # minutes; writes benchmarks/results/policy_updates-cpu.json
    python benchmarks/policy_updates.py --tiny   # the same code on short texts

FLOPs by PyTorch's counter of whole updates, with references and old log-probabilities: the mean of the last two of
four. Answers are made up instead of generated. Of five prompts with 8 answers each, two have no advantage. No clock is
read. The distance is that of the trained weights from those of the plain trainer, over what that one moved them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer  # noqa: E402

import sparsebp_cli as sbp  # noqa: E402

MODEL = {"vocab_size": 203, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024}
PROMPT, ANSWER, GROUP = 128, 32, 8
WAYS = ("plain", "share", "update")
OPTIONS = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no"}
OPTIONS |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 5, "max_steps": 4}
OPTIONS |= {"learning_rate": 1e-3, "logging_steps": 1, "gradient_checkpointing": False}
# Options of GRPOConfig; None: DPO. With two iterations, old log-probabilities and those of the reference are computed
# once for two updates.
CASES: dict[str, dict[str, Any] | None] = {
    "GRPO": {"beta": 0.0},
    "GRPO, two iterations, with old log-probabilities": {"beta": 0.0, "num_iterations": 2},
    "GRPO, two iterations, with old log-probabilities and a reference": {"beta": 0.04, "num_iterations": 2},
    "DPO, 8 pairs to a prompt, with its reference": None,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, MODEL["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def make_texts(number: int, size: int, seed: int) -> list[str]:
    """Return random words."""
    drawn = torch.randint(3, MODEL["vocab_size"], (number, size), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{token}" for token in row) for row in drawn.tolist()]


class MadeUp(GRPOTrainer):  # type: ignore[misc] # trl's classes are not typed
    """Answers are random tokens of one length: what the model writes is not what is counted."""

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        size = (len(prompt_ids), self.args.max_completion_length)
        return torch.randint(3, MODEL["vocab_size"], size).tolist(), None


def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Two of five prompts have answers that are all worth the same."""
    return [
        1.0 if prompt.startswith("w3 ") else float(sum(ids) % 97)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def make_grpo(folder: Path, model: nn.Module, options: dict[str, Any], scale: int) -> Any:
    """Return a trainer of groups, of which two in five have no advantage."""
    model.save_pretrained(folder / "model")  # type: ignore[operator] # the reference is loaded by the model's name
    model.config._name_or_path = str(folder / "model")  # type: ignore[union-attr] # noqa: SLF001
    prompts = make_texts(20, PROMPT // scale - 1, 1)
    texts = [("w3 " if number % 5 in {1, 3} else "w4 ") + text for number, text in enumerate(prompts)]
    own = {"num_generations": GROUP, "max_completion_length": ANSWER // scale, "shuffle_dataset": False}
    trainer = MadeUp(
        model,
        reward,
        GRPOConfig(str(folder), **OPTIONS, **own, **options),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=make_tokenizer(),
    )
    if trainer.ref_model is not None:
        trainer.ref_model.config._attn_implementation = "eager"  # noqa: SLF001 - whose products are counted
    return trainer


def make_dpo(folder: Path, model: nn.Module, scale: int) -> Any:
    """Return a trainer of pairs, which it draws at random: of each prompt about half in an update."""
    prompts = [text for text in make_texts(8, PROMPT // scale, 1) for _ in range(8)]
    answers = {"chosen": make_texts(64, ANSWER // scale, 2), "rejected": make_texts(64, ANSWER // scale, 3)}
    options = OPTIONS | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    return DPOTrainer(
        model,
        make_model(),
        DPOConfig(str(folder), **options),
        train_dataset=Dataset.from_dict({"prompt": prompts, **answers}),
        processing_class=make_tokenizer(),
    )


def make_model() -> LlamaForCausalLM:
    """Return the model, with attention whose products are counted."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL, attn_implementation="eager"))


class Updates(TrainerCallback):  # type: ignore[misc] # a class of transformers
    """Counts the last two updates, from the begin of the one to the end of the other."""

    flops = 0

    def on_step_begin(self, *args: Any, **_: Any) -> None:
        if args[1].global_step == 2:
            self._counter = FlopCounterMode(display=False).__enter__()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._counter.__exit__(None, None, None)
        self.flops = int(self._counter.get_total_flops())


def vector(model: nn.Module) -> Tensor:
    """Return all weights."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def measure(make: Callable[[Path, nn.Module], Any], way: str) -> tuple[int, Tensor, Tensor, str]:
    """Return the FLOPs of two updates, the weights before and after all of them, and what was saved of updates."""
    with tempfile.TemporaryDirectory() as folder:
        model, updates = make_model(), Updates()
        trainer, before = make(Path(folder), model), vector(model)
        trainer.remove_callback(PrinterCallback)
        note = ""
        if way != "plain":
            policy = sbp.make_policy("lossless", prefixes=way, verify="never")
            callback = sbp.PolicyCallback(policy, log_flops_every=None).join(trainer)
        trainer.add_callback(updates)
        trainer.train()
        if way == "update":
            note = callback.engine.notes["packing of updates"]  # type: ignore[union-attr] # it has trained
        return updates.flops, before, vector(model), note


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="short texts: a test of this script")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "policy_updates-cpu.json")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    scale, found = 4 if args.tiny else 1, {}
    for name, options in CASES.items():

        def make(folder: Path, model: nn.Module, options: dict[str, Any] | None = options) -> Any:
            if options is None:
                return make_dpo(folder, model, scale)
            return make_grpo(folder, model, options, scale)

        rows: dict[str, dict[str, float]] = {}
        for way in WAYS:
            flops, before, after, note = measure(make, way)
            if way == "plain":
                wanted, moved = after, float((after - before).norm())
            rows[way] = {"flops": flops // 2, "distance": float((after - wanted).norm()) / moved}
            share = rows[way]["flops"] / rows["plain"]["flops"]
            print(f"{name}, {way}: {flops / 2e6:,.0f} MFLOP, {share:.3f}, distance {rows[way]['distance']:.0e}; {note}")
        found[name] = rows
    if not args.tiny:
        about = {name: version(name) for name in ("torch", "transformers", "trl")} | {"model": MODEL}
        args.out.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
