"""Rebuild the model ``austen-llama``: ``python benchmarks/pretrain.py FOLDER [--texts TEXTS]``.

This trains a byte-level BPE of 2,048 tokens on the novels and on the Python documentation without its held-out topics,
because the model is fine-tuned on that: without it a token would hold 2.3 of its characters, with it 2.9. Then it
trains a llama of 3.7 million parameters on the novels alone. One novel, *Persuasion*, is held out of both. The folder
receives everything that ``from_pretrained`` reads, and ``training.json``: command, versions, sha256 of every input,
loss curve.

The size was chosen by timing (2 CPU cores, fp32, 2,048 tokens a step): the model is wide and shallow enough that matrix
products dominate the step, so a backward that multiplies fewer rows is visibly faster.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparsebp_cli.run import durable
from sparsebp_cli.source import bundled

HELD_OUT = "persuasion.txt"
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
VOCABULARY = 2048
LENGTH = 256  # T
BATCH = 8  # B
PEAK_RATE, FINAL_SHARE, WARMUP_STEPS = 2e-3, 0.05, 50
QUICK_BLOCKS = 32  # of the held-out novel: for the curve, and for the test that compares with the card

log: logging.Logger = logging.getLogger("pretrain")


def main(arguments: list[str] | None = None) -> None:
    """Train tokenizer and model, and write the folder. ``arguments`` of the command line; None: the process's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument(
        "--texts", type=Path, default=bundled.AUSTEN_FOLDER, help=f"folder of *.txt; {HELD_OUT} is held out"
    )
    parser.add_argument("--steps", type=int, default=1600, help=f"optimizer steps of {BATCH} x {LENGTH} tokens")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data order")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    books = {file.name: file.read_text(encoding="utf-8") for file in sorted(options.texts.glob("*.txt"))}
    if HELD_OUT not in books or len(books) < 2:
        parser.error(f"--texts {options.texts}: needs {HELD_OUT} and at least one other *.txt, got {', '.join(books)}")
    held_out = books.pop(HELD_OUT)
    docs = [topics[name].strip() for name in sorted(topics) if not bundled.is_held_out(name)]
    tokenizer = train_tokenizer([*books.values(), *docs])
    train_BT = pack(tokenizer, books.values())
    held_out_BT = pack(tokenizer, [held_out])
    log.info("%d training and %d held-out blocks of %d tokens", len(train_BT), len(held_out_BT), LENGTH)

    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(make_config())
    curve = train(model, train_BT, held_out_BT, options.steps, options.seed)
    save(model, tokenizer, options.folder)
    saved = LlamaForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    record = {
        "command": f"python -m sparsebp_tools.asset.pretrain {options.folder.name} --texts {options.texts.name} "
        f"--steps {options.steps} --seed {options.seed}",
        "versions": versions(),
        "inputs_sha256": {name: sha256(text.encode()) for name, text in {**books, HELD_OUT: held_out}.items()}
        | {"pydoc_data.topics, those of the training split": sha256(json.dumps(docs).encode())},
        "parameters": sum(parameter.numel() for parameter in saved.parameters()),
        "training_tokens_in_data": train_BT.numel(),
        "training_tokens_seen": options.steps * BATCH * LENGTH,
        "held_out_loss": {
            "unit": "nats a token, of the saved weights read as float32",
            "all_blocks": round(evaluate(saved, held_out_BT), 4),
            f"first_{QUICK_BLOCKS}_blocks": round(evaluate(saved, held_out_BT[:QUICK_BLOCKS]), 4),
        },
        "curve": curve,
    }
    durable.write_file(options.folder / "training.json", json.dumps(record, indent=1) + "\n")
    log.info("held-out loss %s", record["held_out_loss"])


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, which can encode any text. It has beginning, end and padding tokens, and adds none of
    them by itself."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=list(SPECIAL.values()), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **SPECIAL)


def pack(tokenizer: PreTrainedTokenizerFast, books: Iterable[str]) -> Tensor:
    """Turn novels into blocks of LENGTH tokens: chapter, end token, chapter, end token; the last part is dropped."""
    stream: list[int] = []
    for book in books:
        for chapter in bundled.chapters(book):
            stream += [*tokenizer.encode(chapter, add_special_tokens=False), tokenizer.eos_token_id]
    whole = len(stream) // LENGTH * LENGTH
    return torch.from_numpy(np.array(stream[:whole], dtype=np.int64)).view(-1, LENGTH)


def make_config() -> LlamaConfig:
    """Return the model's shape: embeddings are tied to the head, because they are a sixth of all weights."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        hidden_size=320,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=5,
    )


def train(
    model: LlamaForCausalLM, train_BT: Tensor, held_out_BT: Tensor, steps: int, seed: int
) -> list[dict[str, object]]:
    """Pretrain with AdamW and a cosine schedule in fp32. Return the loss curve: every 100 steps the mean training loss
    since the last point, and the held-out loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_share(step, steps))
    curve: list[dict[str, object]] = []
    losses: list[float] = []
    start = time.perf_counter()
    for step, batch_BT in zip(range(1, steps + 1), batches(train_BT, seed), strict=False):
        loss = model(input_ids=batch_BT, labels=batch_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps:
            held_out = evaluate(model, held_out_BT[:QUICK_BLOCKS])
            curve.append({"step": step, "train": round(float(np.mean(losses)), 4), "held_out": round(held_out, 4)})
            log.info("%s %.0f s", curve[-1], time.perf_counter() - start)
            losses.clear()
    return curve


def batches(train_BT: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield batches endlessly, in a new order every epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(train_BT), generator=generator)
        for start in range(0, len(order) - BATCH + 1, BATCH):
            yield train_BT[order[start : start + BATCH]]


def rate_share(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: a linear rise, then half a cosine down to FINAL_SHARE."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    cosine = 0.5 + 0.5 * math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return FINAL_SHARE + (1 - FINAL_SHARE) * cosine


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, blocks_BT: Tensor) -> float:
    """Return the mean loss over blocks, in nats a token."""
    model.train(mode=False)
    total = 0.0
    for block_BT in torch.split(blocks_BT, BATCH):
        total += float(model(input_ids=block_BT, labels=block_BT).loss) * len(block_BT)
    model.train()
    return total / len(blocks_BT)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder. Weights are stored as float16, which is half the size of float32 and has three more bits of
    precision than bfloat16."""
    module: torch.nn.Module = model
    module.half()
    model.save_pretrained(folder)
    config = folder / "config.json"
    values = json.loads(config.read_bytes()) | {"dtype": "float32"}  # the dtype that from_pretrained's "auto" loads
    durable.write_file(config, json.dumps(values, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder)


def versions() -> dict[str, str]:
    """Return the versions and settings that the weights depend on, apart from the inputs."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "threads": str(torch.get_num_threads()),
    }


def sha256(content: bytes) -> str:
    """Return the sha256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    main()
