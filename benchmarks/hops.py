"""Count the files and functions of the package that one pass runs through.

    python benchmarks/hops.py                  # one line for each path
    python benchmarks/hops.py --calls linear   # the functions of one path, in the order of their first call

A small llama runs on a CPU. The third pass or step is counted, because the engine reads the autograd graph in the
first, second, fourth, ... pass. Only functions of the package count, without comprehensions and generator expressions.
A hop is a call from a function in one file to a function in another, whatever lies between them.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from unittest.mock import patch

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import sparsebp_cli as sbp  # noqa: E402
from sparsebp_cli.compare import compare_runs, figure  # noqa: E402
from sparsebp_cli.plan import Plan  # noqa: E402
from sparsebp_cli.recipe import load_recipe  # noqa: E402
from sparsebp_cli.run import JournalWriter, RunFolder, State  # noqa: E402
from sparsebp_cli.worker.ending import StopRequest  # noqa: E402
from sparsebp_cli.worker.training import Training  # noqa: E402

PACKAGE = f"{ROOT / 'sparsebp_cli'}/"
TARGET = "model.layers.0.mlp.down_proj"  # the one linear with a policy in the path `linear`
COUNTED = 3  # number of the pass or step
SHORT = ("training.max_steps=4", "training.warmup_steps=1", "training.per_device_train_batch_size=4")


@dataclass
class Calls:
    """The functions that ran, in the order of their first call.

    Args:
        counts: ``folder/file.py:Class.function`` to the number of its calls.
        num_hops: Calls into another file.
    """

    counts: dict[str, int] = field(default_factory=dict)
    num_hops: int = 0

    @property
    def num_calls(self) -> int:
        return sum(self.counts.values())

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(name.partition(":")[0] for name in self.counts))


@contextmanager
def counting(root: str = "") -> Iterator[Calls]:
    """Count the calls of this thread.

    Args:
        root: Only those inside a function of this qualified name, itself included; empty: all.

    Yields:
        The counts, complete at the end of the block.
    """
    calls, generators = Calls(), dict[int, FrameType]()  # holding the frames keeps their ids from being used again

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not _is_ours(frame) or id(frame) in generators:
            return
        if code.co_flags & CO_GENERATOR:  # each time that it goes on is a call event
            generators[id(frame)] = frame
        caller, is_inside = frame.f_back, root in ("", code.co_qualname)
        nearest = ""
        while caller is not None and not (nearest and is_inside):
            if _is_ours(caller):
                nearest = nearest or caller.f_code.co_filename
                is_inside = is_inside or caller.f_code.co_qualname == root
            caller = caller.f_back
        if not is_inside:
            return
        name = f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"
        calls.num_hops += nearest not in ("", code.co_filename) and bool(calls.counts)
        calls.counts[name] = calls.counts.get(name, 0) + 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _is_ours(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")


def count_linear(*, whole: bool = False) -> Calls:
    """Count the backward of one linear with ``topk`` along rows, or with ``whole`` the pass that contains it."""
    model = build_model()
    others = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != TARGET]
    engine = sbp.attach(model, [sbp.make_policy("topk", keep=0.25, along="rows")], exclude=others)
    for _ in range(COUNTED - 1):
        engine.backward(compute_loss(model))
    loss = compute_loss(model)
    with counting("" if whole else "SelectedLinear.backward") as calls:
        engine.backward(loss)
    return calls


def count_tokens() -> Calls:
    """Count the forward of a model that trains a quarter of its tokens, drawn at random."""
    model = build_model()
    engine = sbp.attach(model, [sbp.make_policy("tokens", score="random", keep=0.25, mode="detach")])
    for _ in range(COUNTED - 1):
        engine.backward(compute_loss(model))
    with counting() as calls:
        compute_loss(model)
    return calls


def count_eager() -> Calls:
    """Count a pass that updates every parameter, without a policy."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sbp.attach(model, [], optimizer=optimizer, update="eager")
    for _ in range(COUNTED - 1):
        engine.backward(compute_loss(model))
        optimizer.step()
    loss = compute_loss(model)
    with counting() as calls:
        engine.backward(loss)
    return calls


def count_lossless() -> Calls:
    """Count the forward and backward of a padded batch of four texts under lossless."""
    model = build_model()
    engine = sbp.attach(model, ["lossless"])
    ids = torch.randint(0, 32, (4, 32), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(32) < torch.tensor([32, 20, 12, 8])[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    for _ in range(COUNTED - 1):
        engine.backward(model(**batch).loss)
    with counting() as calls:
        engine.backward(model(**batch).loss)
    return calls


def count_step() -> Calls:
    """Count a dense step of the quickstart in the worker: batch, forward, backward, update, records."""
    with tempfile.TemporaryDirectory() as folder:
        return train("quickstart-dense", Path(folder))


def count_compare() -> Calls:
    """Count the comparison of two runs, those of the quickstart."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder, name) for name in ("quickstart-dense", "quickstart")]
        for run in runs:
            run.mkdir()
            train(run.name, run)
        # A comparison of runs on a busy machine would take another way.
        with patch.multiple(figure, LEAST_SHARE=0.0, MOST_LOAD=math.inf), counting() as calls:
            compare_runs([RunFolder(run) for run in runs])
    return calls


def train(recipe: str, folder: Path) -> Calls:
    """Train a recipe of the folder ``start`` for four steps in this process, and count the calls of one step."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n} and {n} is", "completion": "{2 * n}"}}\n' for n in range(64)))
    changes = (*SHORT, f"dataset.name={rows}", "~dataset.eval_split", "measure.eval_examples=8", "target.device=cpu")
    plan = Plan(recipe=load_recipe(ROOT / f"recipes/start/{recipe}.yaml", changes))
    plan.save(folder)
    with JournalWriter(folder, durable=False) as journal:
        training = Training.build(plan, RunFolder(folder), journal, StopRequest())
        train_step, counted = training._train_step, Calls()  # noqa: SLF001 - a step has no public name

        def count() -> dict[str, float | None]:
            nonlocal counted
            if training.step != COUNTED - 1:
                return train_step()
            with counting() as counted:
                return train_step()

        training._train_step = count  # type: ignore[method-assign]  # noqa: SLF001
        training.run_to_end()
        journal.write("end", status=State.FINISHED, step=training.step, text="")
    return counted


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).train()


def compute_loss(model: LlamaForCausalLM) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


PATHS = {
    "linear": ("the gradient at one linear, topk along rows", count_linear),
    "pass": ("the backward pass that contains it", lambda: count_linear(whole=True)),
    "tokens": ("a forward with tokens chosen at random, detach", count_tokens),
    "lossless": ("forward and backward of a padded batch under lossless", count_lossless),
    "eager": ("a backward pass with update: eager", count_eager),
    "step": ("a dense training step of the worker", count_step),
    "compare": ("a comparison of two runs", count_compare),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", choices=PATHS, help="print the functions of this path")
    options = parser.parse_args(arguments)
    if options.calls:
        for name, number in PATHS[options.calls][1]().counts.items():
            print(f"{number:>5}  {name}")
        return 0
    print(f"{'path':<8}{'files':>7}{'functions':>11}{'calls':>7}{'hops':>6}")
    for name, (text, count) in PATHS.items():
        calls = count()
        print(f"{name:<8}{len(calls.files):>7}{len(calls.counts):>11}{calls.num_calls:>7}{calls.num_hops:>6}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
