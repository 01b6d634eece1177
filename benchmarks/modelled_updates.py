"""Predicts the rows of ``headline.py`` without a GPU: what each way executes, counted, and a model of its time.

    python benchmarks/modelled_updates.py   # ten minutes; writes benchmarks/results/gpu-headline-modelled.json

Ways such as `lossless` read tokens and labels, so integers are real here. Large tensors of numbers are not: an
operation on one returns zeros that take no memory, and its cost is counted from its shapes. Counted in models of two
and of four layers, extended to all. Seconds are of :mod:`fake_gpu.roofline`; what the host does, and how long it waits,
is left out.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import headline
import numpy
import torch
from fake_gpu.roofline import FREE, Cost, Meter, count_bytes, count_flops, estimate
from headline import Case, Update, make_pass
from measured import SIZES
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from sparsebp_cli.backward.kind.packing import layout, varlen
from sparsebp_cli.policy import kernel
from sparsebp_tools.forecast.fake.attention import attend

LARGE = 50_000  # elements of a tensor of numbers that is not computed
LAYERS = 2, 4  # of the models that are counted


class Skipping(Meter):
    """Costs every operation, and computes those of integers and of small tensors alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run or skip one operation, and count it."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if name in FREE:
            return func(*args, **kwargs)
        found = self._skip(func, name, args, kwargs, given)
        made = [value for value in tree_leaves(found) if isinstance(value, Tensor)]
        num_bytes, flops = count_bytes(name, given, made), count_flops(name, given, made)
        self.cost.add(name, num_bytes, flops, estimate(name, num_bytes, flops, given, made))
        return found

    def _skip(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        if not any(_is_large(tensor) for tensor in given) and not name.startswith(("attend", "zeros", "ones", "full")):
            return func(*args, **kwargs)
        if name.endswith("_"):  # in place
            return args[0]
        if name.startswith("_flash"):
            return _make_flash(name, args)
        as_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        try:
            shapes = func(*as_meta[0], **as_meta[1] | ({"device": "meta"} if "device" in kwargs else {}))
        except NotImplementedError:  # the shape depends on integers, such as a mask's
            return func(*args, **kwargs)
        if not all(value.is_floating_point() for value in tree_leaves(shapes) if isinstance(value, Tensor)):
            return func(*args, **kwargs)
        return tree_map_only(Tensor, _make_zeros, shapes)


def _make_flash(name: str, args: Any) -> tuple[Tensor, ...]:
    """Return results of the flash kernel, which does not run on a CPU."""
    if name.endswith("backward"):
        return tuple(_make_zeros(tensor) for tensor in args[1:4])
    return _make_zeros(args[0]), torch.zeros(args[0].shape[1], len(args[0])), *(torch.zeros(0),) * 3


def _is_large(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() >= LARGE


def _make_zeros(like: Tensor) -> Tensor:
    """Return zeros of a shape and layout, of which no page is touched: NumPy asks for memory that is zero already."""
    held = torch.from_numpy(numpy.zeros(max(like.element_size(), like.untyped_storage().size()), dtype=numpy.uint8))
    return held.view(like.dtype).as_strided(like.shape, like.stride())


def cost_of_update(case: Case, size: str, num_layers: int) -> Cost:
    """Return what forward and backward of an update cost in a model with fewer layers."""
    sizes = (headline.SIZES_OF_LORA if case.update.rank and size != "tiny" else SIZES[size]) | {
        "num_hidden_layers": num_layers
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(headline, "SIZES_OF_LORA", sizes))
        stack.enter_context(patch.dict(SIZES, {size: sizes}))
        stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", attend))
        stack.enter_context(patch.object(layout, "has_kernel", lambda _: not kernel.is_disabled()))
        stack.enter_context(patch.object(varlen, "is_right", lambda *_: True))  # of a kernel that runs on GPUs only
        meter = stack.enter_context(Skipping())
        model = headline.make_model(size, case.update, torch.device("cpu"), torch.bfloat16)
        run = make_pass(model, case, stack)
        run()  # the engine looks at the model in the first pass
        meter.cost = Cost()
        run()
        return meter.cost


def predict(size: str = "1b") -> list[dict[str, Any]]:
    """Return a row for each update and way under PyTorch's attention."""
    rows = []
    scale = 16 if size == "tiny" else 1
    for update in headline.make_updates(SIZES[size]["vocab_size"], scale):
        found = [_predict_one(update, case, size) for case in headline.list_cases(update, torch.device("cpu"))]
        rows += [row | {"of_padded": round(row["milliseconds"] / found[0]["milliseconds"], 3)} for row in found]
    return rows


def _predict_one(update: Update, case: Case, size: str) -> dict[str, Any]:
    few, many = LAYERS
    layers = headline.SIZES_OF_LORA["num_hidden_layers"] if update.rank else SIZES[size]["num_hidden_layers"]
    small, large = cost_of_update(case, size, few), cost_of_update(case, size, many)
    times = (layers - few) // (many - few)
    whole = small.extended(large, times)
    row = {"row": case.key, "milliseconds": round(1000 * whole.seconds, 1), "operations": whole.operations}
    return row | {"gigabytes": round(whole.bytes / 1e9, 2), "teraflops": round(whole.flops / 1e12, 4)}


def print_updates(rows: list[dict[str, Any]]) -> None:
    """Print counts and modelled times of whole updates."""
    print("\nwhole updates, forward and backward; milliseconds are modelled, the rest is counted")
    print(f"{'':<48}{'ms':>8}{'of padded':>11}{'kernels':>9}{'GB':>9}{'TFLOP':>8}")
    for row in rows:
        print(
            f"{row['row']:<48}{row['milliseconds']:>8.1f}{row['of_padded']:>11.2f}{row['operations']:>9}"
            f"{row['gigabytes']:>9.1f}{row['teraflops']:>8.2f}"
        )


def main() -> None:
    """Predict, print and write."""
    out = Path(__file__).parent / "results" / "gpu-headline-modelled.json"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, help="file of the result")
    out = parser.parse_args().out
    rows = predict()
    record = {"format": 1, "measured": False, "device": "a model of an H100", "torch": torch.__version__, "rows": rows}
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print_updates(rows)


if __name__ == "__main__":
    main()
