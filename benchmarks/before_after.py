"""Times steps of two checkouts of the package in one process, in turns.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before .          # all ways of running a step, about four minutes
    python benchmarks/before_after.py ../before . --ways branches --steps 300

Two processes differ by several per cent on the same code, by where their memory lies. Here both checkouts share one; a
ratio is of two steps that follow each other, in alternating order, in CPU time of one thread. The model, a llama of 4
layers, d 128, with topk along rows, keep 0.25, is small, so that the package's own work is a large part of a step.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 64}
TOPK = ("topk", {"keep": 0.25, "along": "rows"})
WAYS: dict[str, tuple[tuple[str, dict[str, Any]] | None, dict[str, Any]]] = {
    "dense": (None, {}),
    "linears": (TOPK, {}),
    "branches": (TOPK, {"sites": "branches"}),
    "nodes": (TOPK, {"sites": "nodes"}),
    "tokens": (("tokens", {"score": "random", "keep": 0.3, "mode": "detach"}), {}),
    "eager": (TOPK, {"update": "eager"}),
    "segments": (TOPK, {"segments": 2}),
}


class Checkout:
    """One checkout's modules, and a model that it trains."""

    def __init__(self, root: Path, way: str) -> None:
        policy, options = WAYS[way]
        sys.path.insert(0, str(root))
        importlib.invalidate_caches()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**SIZE)).train()  # type: ignore[arg-type]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.ids = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(0))
        package: Any = importlib.import_module("sparsebp_cli")
        if not package.__file__.startswith(f"{root}/"):
            raise SystemExit(f"{package.__file__} was imported instead of the one in {root}")
        policies = [] if policy is None else [package.make_policy(policy[0], **policy[1])]
        self.is_eager = options.get("update") == "eager"
        self.engine = package.attach(self.model, policies, optimizer=self.optimizer, **options)
        for _ in range(4):
            self._step()
        self._modules = _take_modules()
        sys.path.remove(str(root))

    def time(self) -> float:
        """Return the CPU seconds of a step."""
        sys.modules.update(self._modules)
        start = time.process_time()
        self._step()
        seconds = time.process_time() - start
        self._modules |= _take_modules()
        return seconds

    def _step(self) -> None:
        self.engine.backward(self.model(input_ids=self.ids, labels=self.ids).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _take_modules() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "sparsebp_cli"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of one checkout")
    parser.add_argument("after", type=Path, help="folder of the other")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each checkout")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # An editable installation must not provide the package: the folders do.
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
    print(f"{'way':10}{'before, ms':>12}{'after, ms':>12}{'ratio':>9}  quartiles of the ratio")
    for way in args.ways:
        checkouts = [Checkout(root.resolve(), way) for root in (args.before, args.after)]
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(args.steps):
            for index in (0, 1) if number % 2 else (1, 0):
                seconds[index].append(checkouts[index].time())
        low, median, high = statistics.quantiles([b / a for a, b in zip(*seconds, strict=True)], n=4)
        before, after = (1e3 * statistics.median(values) for values in seconds)
        print(f"{way:10}{before:12.2f}{after:12.2f}{median:9.3f}  {low:.3f} to {high:.3f}", flush=True)


if __name__ == "__main__":
    main()
