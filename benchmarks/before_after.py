"""Times steps of two checkouts of the package in one process, in turns.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before .          # all ways of running a step, about four minutes
    python benchmarks/before_after.py ../before . --ways nodes --steps 300
    python benchmarks/before_after.py ../before . --ways linears --large --backward --keep 0.1 --steps 30

Two processes differ by several per cent on the same code, by where their memory lies. Here both checkouts share one; a
ratio is of two steps that follow each other, in alternating order, in CPU time of one thread. The model, a llama of 4
layers, d 128, with topk along rows, is small, so that the package's own work is a large part of a step; with
``--large`` it is that of ``llama-23m.yaml``.
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
from torch.utils import flop_counter
from transformers import LlamaConfig, LlamaForCausalLM

SIZE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 64}
LARGE = {"hidden_size": 512, "intermediate_size": 1365, "num_hidden_layers": 6, "num_attention_heads": 8}
LARGE |= {"vocab_size": 4096, "max_position_embeddings": 512}
TOPK = ("topk", {"along": "rows"})
WAYS: dict[str, tuple[tuple[str, dict[str, Any]] | None, dict[str, Any]]] = {
    "dense": (None, {}),
    "linears": (TOPK, {}),
    "nodes": (TOPK, {"sites": "nodes"}),
    "tokens": (("tokens", {"score": "random", "keep": 0.3, "mode": "detach"}), {}),
    "eager": (TOPK, {"update": "eager"}),
    "segments": (TOPK, {"segments": 2}),
}


class Operators:
    """Lets several checkouts register the operators of one name with torch: the first has the name, the others one with
    their number. Only compiled models call them by name, and none is timed here."""

    number = 1  # of the checkout whose modules are imported

    @classmethod
    def separate(cls) -> None:
        """Replace what registers operators and the formulas of their work, once."""
        taken: dict[Any, int] = {}

        def name_of(first: Any) -> Any:
            if not (isinstance(first, str) and first.startswith(("sparsebp::", "fake_gpu::"))):
                return first
            is_first = taken.setdefault(first, cls.number) == cls.number
            return first if is_first else first.replace("::", f"_{cls.number}::")

        def renamed(function: Any) -> Any:
            return lambda first, *args, **kwargs: function(name_of(first), *args, **kwargs)

        def register_once(operators: Any, get_raw: bool = False) -> Any:
            is_first = taken.setdefault(str(operators), cls.number) == cls.number
            return register(operators, get_raw=get_raw) if is_first else lambda formula: formula

        for function in ("define", "impl", "register_fake", "custom_op"):
            setattr(torch.library, function, renamed(getattr(torch.library, function)))
        register, flop_counter.register_flop_formula = flop_counter.register_flop_formula, register_once


class Checkout:
    """One checkout's modules, and a model that it trains."""

    count = 0

    def __init__(self, root: Path, way: str, args: argparse.Namespace) -> None:
        Checkout.count += 1
        Operators.number = self._number = Checkout.count
        policy, options = WAYS[way]
        size, shape = (LARGE, (2, 512)) if args.large else (SIZE, (4, 64))
        sys.path.insert(0, str(root))
        importlib.invalidate_caches()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**size)).train()  # type: ignore[arg-type]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.ids = torch.randint(0, 512, shape, generator=torch.Generator().manual_seed(0))
        package: Any = importlib.import_module("sparsebp_cli")
        if not package.__file__.startswith(f"{root}/"):
            raise SystemExit(f"{package.__file__} was imported instead of the one in {root}")
        keep = {"keep": args.keep} if policy is TOPK else {}
        policies = [] if policy is None else [package.make_policy(policy[0], **policy[1], **keep)]
        self.backward_alone = args.backward
        self.engine = package.attach(self.model, policies, optimizer=self.optimizer, **options)
        for _ in range(4):
            self._step()
        self._modules = _take_modules()
        sys.path.remove(str(root))

    def time(self) -> float:
        """Return the CPU seconds of a step, or of its backward alone."""
        sys.modules.update(self._modules)
        Operators.number = self._number
        seconds = self._step()
        self._modules |= _take_modules()
        return seconds

    def _step(self) -> float:
        begin = time.process_time()
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        if self.backward_alone:
            begin = time.process_time()
        self.engine.backward(loss)
        if self.backward_alone:
            end = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (end if self.backward_alone else time.process_time()) - begin


def _take_modules() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "sparsebp_cli"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of one checkout")
    parser.add_argument("after", type=Path, help="folder of the other")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each checkout")
    parser.add_argument("--keep", type=float, default=0.25, help="share that topk keeps")
    parser.add_argument("--large", action="store_true", help="the model of llama-23m.yaml, with its batch")
    parser.add_argument("--backward", action="store_true", help="time the backward alone")
    args = parser.parse_args()
    Operators.separate()
    torch.set_num_threads(1)
    # An editable installation must not provide the package: the folders do.
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
    print(f"{'way':10}{'before, ms':>12}{'after, ms':>12}{'ratio':>9}  quartiles of the ratio")
    for way in args.ways:
        checkouts = [Checkout(root.resolve(), way, args) for root in (args.before, args.after)]
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(args.steps):
            for index in (0, 1) if number % 2 else (1, 0):
                seconds[index].append(checkouts[index].time())
        low, median, high = statistics.quantiles([b / a for a, b in zip(*seconds, strict=True)], n=4)
        before, after = (1e3 * statistics.median(values) for values in seconds)
        print(f"{way:10}{before:12.2f}{after:12.2f}{median:9.3f}  {low:.3f} to {high:.3f}", flush=True)


if __name__ == "__main__":
    main()
