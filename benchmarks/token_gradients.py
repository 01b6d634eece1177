"""How near the gradient of mode detach of tokens is to that of the masked loss, on the pretrained model that ships.

    python benchmarks/token_gradients.py   # seconds; prints a table for docs/results/measurements.md

One step on eight texts of 256 tokens of Python's documentation. A part of the targets is trained; cosine and relative
error are those of the whole gradient to that of mode exact, and of the weights that make keys and values.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import sparsebp_cli as sbp
from sparsebp_cli.policy.token import TokenMode
from sparsebp_cli.source.bundled import austen_llama, load_python_docs

KEYS_VALUES = ("k_proj", "v_proj")


def read_ids(num_texts: int, length: int) -> Tensor:
    """Return the first tokens of texts that are long enough, (num_texts, length)."""
    tokenizer = AutoTokenizer.from_pretrained(austen_llama())
    ids = (tokenizer(row["text"])["input_ids"] for row in load_python_docs()["test"])
    return torch.tensor([found[:length] for found in ids if len(found) >= length][:num_texts])


def gradients(model: PreTrainedModel, ids_BT: Tensor, labels_BT: Tensor, mode: TokenMode) -> dict[str, Tensor]:
    """Return the gradient of each parameter after one step, in float64."""
    model.zero_grad(set_to_none=True)
    with sbp.attach(model, sbp.make_policy("tokens", score="mask", mode=mode)) as engine:
        engine.backward(model(input_ids=ids_BT, labels=labels_BT).loss)
    return {name: p.grad.flatten().double() for name, p in model.named_parameters() if p.grad is not None}


def compare(found: dict[str, Tensor], exact: dict[str, Tensor], parts: tuple[str, ...] = ("",)) -> str:
    """Return cosine and relative error over the parameters whose names contain one of some parts."""
    names = [name for name in exact if any(part in name for part in parts)]
    ours, theirs = (torch.cat([values[name] for name in names]) for values in (found, exact))
    cosine = float(ours @ theirs / (ours.norm() * theirs.norm()))
    return f"{cosine:.4f} / {float((ours - theirs).norm() / theirs.norm()):.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(austen_llama()).train()
    ids_BT = read_ids(given.texts, given.length)
    position_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    drawn_BT = torch.rand(ids_BT.shape, generator=torch.Generator().manual_seed(0))
    trained = {
        "the last half": position_BT > given.length // 2,
        "the last quarter": position_BT > 3 * given.length // 4,
        "half, at random": drawn_BT < 0.5,
    }
    print("| trained | `detach` | its keys and values |")
    print("|---" * 3 + "|")
    for name, trained_BT in trained.items():
        labels_BT = ids_BT.masked_fill(~trained_BT, -100)
        exact = gradients(model, ids_BT, labels_BT, "exact")
        found = gradients(model, ids_BT, labels_BT, "detach")
        print(f"| {name} | {compare(found, exact)} | {compare(found, exact, KEYS_VALUES)} |")


if __name__ == "__main__":
    main()
