"""``gpu.py --fake``: what every form and way executes on a GPU, counted without one, and a model of its time.

Counted: operations (each at least one kernel), bytes, FLOPs and waits, at the real sizes, on fake tensors, which hold
no memory. Modelled: seconds, by :mod:`fake_gpu.roofline`. Measured: nothing.

Shape letters: N rows, D input width, O output width.
"""

from __future__ import annotations

import json
import logging
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from fake_gpu.device import fake_cuda
from fake_gpu.roofline import BANDWIDTH, BLOCK, IS_SLOW, LAUNCH, Cost, metered
from measured import SIZES
from steps import LAYERS, Way, list_ways, make_step, prepare
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparsebp_cli.backward.linear.function import LinearLayout, Needs, run_kernel
from sparsebp_cli.policy import Blocks, GradientSelector, Site, Step, kernel, make_policy
from sparsebp_cli.policy.kernel import operation
from sparsebp_tools.forecast.fake.attention import attend

NUM_ROWS = 8192
FORMS: list[tuple[str, dict[str, Any]]] = [
    *((f"rows {keep}", {"along": "rows", "keep": keep}) for keep in (0.5, 0.25, 0.1)),
    *((f"columns {keep}", {"along": "columns", "keep": keep}) for keep in (0.5, 0.25, 0.1)),
    *((f"blocks of {side}, 0.25", {"along": "blocks", "keep": 0.25, "block": (side, side)}) for side in (32, 128, 256)),
    ("2:4", {"along": "2:4", "keep": 0.5}),
    ("elements 0.25", {"along": "elements", "keep": 0.25}),
]
WAYS = ("CPU's forms", "no Triton", "Triton, fast", "Triton, slow")


@contextmanager
def choose_way(way: str) -> Iterator[None]:
    """Run a block as CUDA did with the forms that CPUs use, as it does without Triton, or as it does with it."""
    on_gpu = (lambda tensor: tensor.is_cuda) if way != WAYS[0] else (lambda _: False)
    IS_SLOW[0] = way == WAYS[3]
    with (
        patch.object(kernel, "is_on_gpu", on_gpu),
        patch.object(kernel, "find_on", lambda *_: operation if way in WAYS[2:] else None),
    ):
        yield


def cost_of_form(options: dict[str, Any] | None, width: int, num_outputs: int) -> tuple[Cost, Cost]:
    """Return what choosing costs in the backward of one linear, and what the products with their gathers cost."""
    grad_NO = torch.empty(NUM_ROWS, num_outputs, dtype=torch.bfloat16, device="cuda")
    x_ND = torch.empty(NUM_ROWS, width, dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(num_outputs, width, dtype=torch.bfloat16, device="cuda")
    needs, selection = Needs(dgrad=True, wgrad=True, bias=False), None
    with metered() as choosing:
        if options is not None:
            policy = make_policy("topk", **options)
            assert isinstance(policy, GradientSelector)
            selection = policy.select(grad_NO, Site("linear", num_outputs, (4, NUM_ROWS // 4)), Step(0))
    BLOCK[:] = selection.block_shape if isinstance(selection, Blocks) else (32, 32)
    with metered() as multiplying:
        found = None if selection is None else run_kernel(LinearLayout(), grad_NO, x_ND, weight, selection, needs)
        if found is None:
            masked_NO = grad_NO if selection is None else selection.apply(grad_NO)
            masked_NO.mm(weight), masked_NO.t().mm(x_ND)
    return choosing, multiplying


def cost_of_ideal(keep: float, width: int, num_outputs: int) -> float:
    """Return the seconds of dense products with a share of the rows: choosing and gathering are free."""
    kept = max(1, round(keep * NUM_ROWS))
    grad, x = (torch.empty(kept, size, dtype=torch.bfloat16, device="cuda") for size in (num_outputs, width))
    weight = torch.empty(num_outputs, width, dtype=torch.bfloat16, device="cuda")
    with metered() as cost:
        grad.mm(weight), grad.t().mm(x)
    return cost.seconds


def make_table() -> list[dict[str, Any]]:
    """Return a row for each form and model: modelled times over the dense backward of a layer's linears."""
    found = []
    dense = {}
    for model, linears in LAYERS.items():
        costs = [(number, cost_of_form(None, width, outputs)[1]) for _, number, width, outputs in linears]
        dense[model] = sum(number * cost.seconds for number, cost in costs)
        for label, options in FORMS:
            keep = options["keep"] if options["along"] != "2:4" else 0.5
            row: dict[str, Any] = {"model": model, "form": label}
            row["ideal"] = sum(n * cost_of_ideal(keep, width, out) for _, n, width, out in linears) / dense[model]
            for way in WAYS:
                with choose_way(way):
                    made = [(n, *cost_of_form(options, width, out)) for _, n, width, out in linears]
                row[way] = _summarise(made, dense[model])
            found.append(row)
    return found


def make_sweep() -> list[dict[str, Any]]:
    """Return the same of rows for each linear, with Triton and without: which linears are better left out."""
    found = []
    for model, linears in LAYERS.items():
        for name, _, width, outputs in linears:
            dense = cost_of_form(None, width, outputs)[1].seconds
            for keep in (0.5, 0.25, 0.1):
                row: dict[str, Any] = {"model": model, "linear": name, "D": width, "O": outputs, "keep": keep}
                for way in WAYS[1:]:
                    with choose_way(way):
                        parts = cost_of_form({"along": "rows", "keep": keep}, width, outputs)
                    row[way] = round(sum(part.seconds for part in parts) / dense, 3)
                found.append(row)
    return found


def _summarise(made: list[tuple[int, Cost, Cost]], dense: float) -> dict[str, float]:
    return {
        "ratio": round(sum(n * (choosing.seconds + rest.seconds) for n, choosing, rest in made) / dense, 3),
        "choosing": round(sum(n * choosing.seconds for n, choosing, _ in made) / dense, 3),
        "products": round(sum(n * rest.product_seconds for n, _, rest in made) / dense, 3),
        "operations": sum(n * (choosing.operations + rest.operations) for n, choosing, rest in made),
        "gigabytes": round(sum(n * (choosing.bytes + rest.bytes) for n, choosing, rest in made) / 1e9, 2),
        "teraflops": round(sum(n * (choosing.flops + rest.flops) for n, choosing, rest in made) / 1e12, 3),
    }


def make_model(num_layers: int) -> nn.Module:
    """Return a llama of 1B's sizes on the fake device, with fewer layers."""
    with torch.device("meta"):
        config = LlamaConfig(**SIZES["1b"] | {"num_hidden_layers": num_layers}, max_position_embeddings=2048)  # type: ignore[arg-type]
        model = LlamaForCausalLM(config).train()
    for module in model.modules():
        for key, parameter in module._parameters.items():  # noqa: SLF001 - a parameter changes its device here
            if parameter is not None:
                made = torch.empty(parameter.shape, device="cuda", dtype=torch.bfloat16)
                module._parameters[key] = nn.Parameter(made)  # noqa: SLF001
        for key, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")  # noqa: SLF001
    return model


def cost_of_step(way: Way, num_layers: int) -> tuple[Cost, int]:
    """Return what one step costs, AdamW as one pass over all that is trained, and how often the host waits in it."""
    with fake_cuda() as waits, ExitStack() as stack:
        stack.enter_context(choose_way(WAYS[1] if not way.triton else WAYS[2]))
        stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", attend))
        model = make_model(num_layers)
        prepare(model, way)
        ids = torch.empty(4, NUM_ROWS // 4, dtype=torch.long, device="cuda")
        step = make_step(model, way, {"input_ids": ids, "labels": ids}, stack, updates=False)
        BLOCK[:] = (128, 128)
        step()  # the first may prepare
        waits.clear()
        with metered() as cost:
            step()
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        if not way.updates_eagerly:
            cost.add("AdamW", 14 * trained, 0.0, max(LAUNCH, 14 * trained / BANDWIDTH))
    return cost, sum(waits.values())


def make_steps() -> list[dict[str, Any]]:
    """Return a row for each way to train a step: counted in models of two and of four layers, extended to 16."""
    rows: list[dict[str, Any]] = []
    for way in list_ways():
        if way.policies and way.policies[0]["name"] == "tokens":
            rows.append({"label": way.label, "note": "the host reads labels, and a fake tensor holds none"})
            continue
        try:
            (small, _), (large, waits) = cost_of_step(way, 2), cost_of_step(way, 4)
        except Exception as error:  # what the fake device cannot do
            rows.append({"label": way.label, "note": f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"})
            continue
        whole = small.extended(large, 7)
        row = {"label": way.label, "milliseconds": round(1000 * whole.seconds, 1), "waits_of_4_layers": waits}
        row |= {"operations": whole.operations, "gigabytes": round(whole.bytes / 1e9, 1)}
        rows.append(row | {"teraflops": round(whole.flops / 1e12, 2)})
    return rows


def main(args: Namespace) -> int:
    """Print the tables and write them."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with fake_cuda():
        table, sweep = make_table(), make_sweep()
    print("modelled, not measured: H100, bfloat16, 8,192 rows; time over the dense backward of one layer's linears")
    print(
        f"{'':<6}{'form':<20}{'ideal':>7}" + "".join(f"{way:>14}" for way in WAYS) + f"{'choosing':>10}{'kernels':>9}"
    )
    for row in table:
        ratios = "".join(f"{row[way]['ratio']:>14.2f}" for way in WAYS)
        last = row[WAYS[2]]
        counted = f"{last['choosing']:>10.2f}{last['operations']:>9}"
        print(f"{row['model']:<6}{row['form']:<20}{row['ideal']:>7.2f}{ratios}{counted}")
    print("\nmodelled: rows, linear by linear, over its dense backward")
    print(f"{'':<44}" + "".join(f"{way:>14}" for way in WAYS[1:]))
    for row in sweep:
        print(
            f"{row['model']:<6}{row['linear']:<10}{row['D']:>7} to {row['O']:<7}keep {row['keep']:<6g}"
            + "".join(f"{row[way]:>14.2f}" for way in WAYS[1:])
        )
    steps = [] if args.size == "tiny" else make_steps()
    if steps:
        print_steps(steps)
    result = {"format": 1, "measured": False, "model": __doc__, "forms": table, "linears": sweep, "steps": steps}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def print_steps(rows: list[dict[str, Any]]) -> None:
    """Print counts and modelled times of steps."""
    print("\n1B, 4 x 2,048 tokens, a step with AdamW; milliseconds and speed-up are modelled, the rest is counted")
    print(f"{'':<32}{'ms':>9}{'speed-up':>10}{'kernels':>9}{'GB':>8}{'TFLOP':>8}{'waits':>7}")
    for row in rows:
        if "note" in row:
            print(f"{row['label']:<32} not on the fake device: {row['note']}")
            continue
        print(
            f"{row['label']:<32}{row['milliseconds']:>9.1f}{rows[0]['milliseconds'] / row['milliseconds']:>9.2f}x"
            f"{row['operations']:>9}{row['gigabytes']:>8.1f}{row['teraflops']:>8.1f}{row['waits_of_4_layers']:>7}"
        )
