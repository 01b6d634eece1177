"""Find what in a batch mixes its examples, which variant does not, and which modules mix by definition.

Shape letters: T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_audit.report.isolation import BatchJudgement
from sparsebp_cli.backward.isolation.examples import LENGTHS, Examples
from sparsebp_cli.backward.observe.internals import is_batch_norm

# Words in class names of modules that run along positions without a mask.
RECURRENT: tuple[str, ...] = (
    "conv",
    "mamba",
    "ssm",
    "delta",
    "recurren",
    "rglru",
    "linearattention",
    "lightning",
    "rwkv",
    "gru",
)
RECURRENT += ("lstm", "mixer", "kda", "hyena")
PADDED = "train the model on padded rows, one example in each"


@dataclass(frozen=True)
class MendVariant:
    """Other arguments for the same batch."""

    cause: str
    mend: str
    inputs: dict[str, Any]


def find_purpose(model: nn.Module, name: str) -> str:
    """Return, in a few words, what mixes examples by definition at a module; empty if nothing does."""
    modules = dict(model.named_modules())
    if name in modules and is_batch_norm(modules[name]):
        return f"{name}, which normalises by the statistics of the whole batch ({type(modules[name]).__name__})"
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        owner = ".".join(parts[:length])
        module = modules.get(owner)
        limit = next((n for n in vars(module or model) if "capacity" in n), None) if module is not None else None
        below = [m for m in module.modules() if any("capacity" in n for n in vars(m))] if module is not None else []
        if limit or (below and length == len(parts)):
            return f"{owner}, whose experts take a limited number of tokens of the batch"
    return ""


def find_cause(
    found: BatchJudgement,
    model: nn.Module,
    examples: Examples,
    mends: Callable[[dict[str, Any]], bool],
    reads_detached: Callable[[], bool],
) -> BatchJudgement:
    """Return a judgement with the cause and mend of the first variant that isolates the examples.

    ``reads_detached`` returns whether an example's outputs change with the tokens of others. Only a demonstrated cause
    is named.
    """
    for variant in _variants(model, examples):
        if mends(variant.inputs):
            return replace(found, cause=variant.cause, mend=variant.mend, is_mend_tried=True)
    cause, mend = _guess(found, examples)
    if not cause and reads_detached():
        cause = f"{found.module_class or 'the model'} reads other examples through values without a gradient"
    return replace(found, cause=cause, mend=mend)


def _variants(model: nn.Module, examples: Examples) -> Iterator[MendVariant]:
    inputs, several = examples.inputs, examples.several
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    config = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    is_cached = inputs.get("use_cache") or (inputs.get("use_cache") is None and getattr(config, "use_cache", False))
    if several:
        without = {name: value for name, value in inputs.items() if name != "attention_mask"}
        has_ones = isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all())
        ones = "the batch has an attention_mask of ones, but transformers detects several examples in a row only if "
        ones += "the batch has no mask"
        cache = "the key/value cache is on, but transformers detects several examples in a row only if it is off"
        off = "set model.config.use_cache = False, or pass use_cache=False"
        if has_ones:
            yield MendVariant(ones, "leave attention_mask out of packed batches", without)
        if is_cached:
            yield MendVariant(cache, off, inputs | {"use_cache": False})
        if has_ones and is_cached:
            yield MendVariant(
                f"{ones}; {cache}", f"leave attention_mask out, and {off}", without | {"use_cache": False}
            )
        if positions is None:
            numbers = _count(examples)
            yield MendVariant(
                f"{examples.told_by} says where examples begin, but the model does not read it on this device",
                "pass position_ids that restart with each example as well",
                without | {"position_ids": numbers, "use_cache": False},
            )
        blocks = _block_mask(examples, _dtype(model), is_causal=_is_causal(model))
        is_own = isinstance(mask, Tensor) and mask.dim() == 4
        yield MendVariant(
            "the 4-D attention mask of the batch lets an example read others in its row"
            if is_own
            else "the model builds its attention mask without position_ids, so examples of a row read each other",
            f"pass a 4-D attention mask that hides other examples, or {PADDED}",
            inputs | {"attention_mask": blocks, "use_cache": False},
        )
        return
    real_BT = torch.zeros(examples.size, dtype=torch.long)
    for example in examples.found:
        real_BT[example.row, example.columns] = 1
    if bool(real_BT.all()):
        return
    device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
    real_BT = real_BT.to(device)
    counted = (real_BT.cumsum(1) - 1).clamp(min=0)
    if mask is None:
        yield MendVariant(
            "the model reads padding as tokens: the batch has no attention_mask",
            "pass attention_mask, with 0 at padding",
            inputs | {"attention_mask": real_BT},
        )
    yield MendVariant(
        "padding stands before the tokens, and position numbers count it",
        "pass position_ids that do not count padding: (attention_mask.cumsum(1) - 1).clamp(min=0)",
        inputs | {"attention_mask": real_BT, "position_ids": counted},
    )


def _guess(found: BatchJudgement, examples: Examples) -> tuple[str, str]:
    """Return cause and mend from the first module and the measured gradient, if no variant mends the batch."""
    words = f"{found.module_class} {found.module.rsplit('.', 1)[-1]}".lower()
    is_read = found.leak > found.leak_limit
    if examples.several and is_read and any(word in words for word in RECURRENT):
        return (
            f"{found.module_class} carries values from one example of a row into the next",
            f"{PADDED}, or put {LENGTHS[0]} or seq_idx into the batch and use CUDA kernels that read it "
            "(causal-conv1d, and mamba-ssm or flash-linear-attention)",
        )
    if examples.several and "position" in words:
        return "the model counts positions through the whole row, whatever position_ids say", PADDED
    if is_read:
        place = "reads across the examples of a row, whatever position_ids say" if examples.several else ""
        return f"{found.module_class} {place or 'reads other rows of the batch'}", PADDED if examples.several else ""
    return "", ""  # name only demonstrated causes


def _count(examples: Examples) -> Tensor:
    device = next(value.device for value in examples.inputs.values() if isinstance(value, Tensor))
    number_BT = torch.zeros(examples.size, dtype=torch.long)
    for example in examples.found:
        number_BT[example.row, example.columns] = torch.arange(len(example.columns))
    return number_BT.to(device)


def _block_mask(examples: Examples, dtype: torch.dtype, *, is_causal: bool) -> Tensor:
    """Return an additive mask (B, 1, T, T) with which each example attends only to itself."""
    rows, width = examples.size
    number_BT = torch.full((rows, width), -1)
    for number, example in enumerate(examples.found):
        number_BT[example.row, example.columns] = number
    reads_BTT = number_BT[:, :, None] == number_BT[:, None, :]
    if is_causal:
        reads_BTT &= torch.ones(width, width, dtype=torch.bool).tril()
    # A row that may attend to nothing gives NaN, so padding attends to itself.
    reads_BTT |= torch.eye(width, dtype=torch.bool)
    device = next(value.device for value in examples.inputs.values() if isinstance(value, Tensor))
    mask = torch.zeros(reads_BTT.shape, dtype=dtype).masked_fill(~reads_BTT, torch.finfo(dtype).min)
    return mask[:, None].to(device)


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _is_causal(model: nn.Module) -> bool:
    return any(getattr(module, "is_causal", False) is True for module in model.modules())
