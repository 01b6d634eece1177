"""The axes on which a training that ``lossless`` must not change can differ, and a draw that balances their pairs.

The first value of an axis is the plainest: a failure is shrunk towards it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

Case = dict[str, str]

FACTS = Path(__file__).parents[2] / "docs" / "reference" / "architectures.json"
# With short chunks, short windows, and rotary embeddings that depend on the largest position; see subject.py.
CHANGED = ("chunks", "windows", "windows of gemma", "long rotary", "dynamic rotary", "tied head")
PACKED = sorted(
    kind for kind, refused in json.loads(FACTS.read_text(encoding="utf-8"))["lossless"].items() if not refused
)

AXES: dict[str, tuple[str, ...]] = {
    "architecture": ("LlamaForCausalLM", *(name for name in PACKED if name != "LlamaForCausalLM"), *CHANGED),
    "adapter": ("none", "frozen", "lora", "lora with dropout", "dora", "prompt", "nf4"),
    "wrapper": ("none", "checkpointing", "reentrant", "autocast", "bfloat16", "float64", "scaler", "two ranks"),
    "entry": ("attach", "PolicyTrainer", "callback", "SFT", "DPO", "GRPO", "recipe"),
    "policy": ("default", "never", "always", "tiles", "whole", "labels: false", "separate"),
    "beside": ("none", "tokens", "frozen"),
    "loss": (
        *("model", "items", "logits", "given labels", "token weights", "example weights", "smoothing", "z-loss"),
        *("distillation", "margin of targets", "margin everywhere", "variance everywhere", "hinge everywhere"),
        *("entropy everywhere", "clipped ratio", "scored ratio", "hidden states", "several outputs", "last token"),
        *(
            "attentions",
            "mean pooling",
            "max pooling",
            "shift_labels",
            "logits_to_keep",
            "inputs_embeds",
            "tuple",
            "two forwards",
        ),
    ),
    "labels": ("ids", "others", "completion", "scattered", "one column", "an unlabelled row", "shifted", "padding too"),
    "padding": ("none", "right", "left", "both", "holes", "an empty row"),
    "positions": ("none", "counted", "columns", "shifted", "jumping", "restarting", "shuffled"),
    "prefixes": ("none", "shared", "nested", "copies"),
    "size": ("small", "one token", "one row", "long"),
    "accumulation": ("one", "two", "three", "update"),
    "order": ("alike", "plain first", "drawn"),
}
BATCH = ("loss", "labels", "padding", "positions", "prefixes", "size", "order")
IN_TRAINERS = {"model", "logits", "smoothing"}  # what a Trainer's options can say
CANDIDATES = 6
# How much likelier than another value of its axis one is. What is ordinary is drawn more often than what is refused, or
# takes seconds; every two values still meet, since the draw prefers pairs that met least.
LIKELY: dict[str, dict[str, float]] = {
    "adapter": {"none": 8, "lora": 3, "nf4": 0.3, "prompt": 0.5},
    "wrapper": {"none": 16, "checkpointing": 3, "reentrant": 0.5, "float64": 0.5, "two ranks": 0.3},
    "entry": {"attach": 60, "PolicyTrainer": 4, "callback": 4},
    "policy": {"default": 6},
    "beside": {"none": 8},
    "loss": {"model": 12, "items": 3, "logits": 3, "given labels": 3, "token weights": 3, "example weights": 2}
    | dict.fromkeys(("margin everywhere", "variance everywhere", "hinge everywhere", "entropy everywhere"), 0.4)
    | dict.fromkeys(("hidden states", "several outputs", "shift_labels"), 0.5)
    | {"attentions": 0.1},
    "labels": {"ids": 4, "completion": 3, "padding too": 0.5},
    "padding": {"none": 3, "right": 5, "left": 3, "holes": 0.5},
    "positions": {"none": 6, "restarting": 0.5, "shuffled": 0.5},
    "size": {"small": 8, "one token": 0.2},
    "accumulation": {"one": 6},
    "order": {"alike": 3},
}
OWN_BATCHES = ("SFT", "DPO", "GRPO", "recipe")
WITHOUT_LABELS = ("variance everywhere", "last token", "distillation")
SHIFTED_BY_PROMPTS = {"model", "items", "tuple", "inputs_embeds", "two forwards"}


def is_possible(case: Case) -> bool:
    """Return whether a case can be made; what it then means to ``lossless`` is not asked."""
    return not any(rule(case) for rule in IMPOSSIBLE)


IMPOSSIBLE: tuple[Callable[[Case], bool], ...] = (
    lambda c: c["entry"] in OWN_BATCHES and any(c[axis] != AXES[axis][0] for axis in (*BATCH, "beside")),
    lambda c: c["entry"] in OWN_BATCHES and c["adapter"] in ("prompt", "nf4", "frozen"),
    lambda c: c["entry"] != "attach" and c["wrapper"] not in ("none", "checkpointing"),
    lambda c: c["entry"] != "attach" and c["loss"] not in IN_TRAINERS,
    lambda c: c["entry"] == "recipe" and (c["adapter"], c["wrapper"]) != ("none", "none"),
    lambda c: c["accumulation"] == "update" and c["policy"] == "separate",  # both are values of one option
    lambda c: c["wrapper"] == "two ranks" and (c["accumulation"], c["beside"]) != ("one", "none"),
    # The model is loaded quantised, in float32.
    lambda c: c["adapter"] == "nf4" and c["wrapper"] in ("autocast", "bfloat16", "float64", "two ranks"),
    # Positions of a soft prompt move the outputs.
    lambda c: c["adapter"] == "prompt" and (c["loss"] not in SHIFTED_BY_PROMPTS or c["positions"] != "none"),
    lambda c: c["size"] == "one token" and (c["loss"] not in WITHOUT_LABELS or c["padding"] != "none"),
    lambda c: c["beside"] == "tokens" and c["loss"] not in ("model", "items"),
    # Scores of tokens come from a forward of their own, which draws other masks.
    lambda c: c["beside"] == "tokens" and c["adapter"] == "lora with dropout",
    # The layer that this policy freezes trains nothing then.
    lambda c: c["beside"] == "frozen" and c["adapter"] == "frozen",
    # A mask says that a row is one text.
    lambda c: c["padding"] != "none" and c["positions"] == "restarting",
)


class Draw:
    """Draws cases so that every two values of two axes meet, those that met least first."""

    def __init__(self, seed: int, only: dict[str, tuple[str, ...]] | None = None) -> None:
        self._random = random.Random(seed)
        self._axes = AXES | (only or {})
        self.pairs: Counter[tuple[str, str, str, str]] = Counter()

    def next(self) -> Case:
        """Return the possible case, of some, whose pairs were drawn least."""
        best = min((self._one() for _ in range(CANDIDATES)), key=self._cost)
        self.pairs.update(pairs_of(best))
        return best

    def _one(self) -> Case:
        while True:
            case = {}
            for axis, values in self._axes.items():
                weights = [LIKELY.get(axis, {}).get(value, 1.0) for value in values]
                case[axis] = self._random.choices(values, weights)[0]
            if case["entry"] in OWN_BATCHES:
                case |= {axis: AXES[axis][0] for axis in (*BATCH, "beside")}
            if is_possible(case):
                return case

    def _cost(self, case: Case) -> float:
        return -sum(0.5 ** min(self.pairs[pair], 40) for pair in pairs_of(case))


def pairs_of(case: Case) -> list[tuple[str, str, str, str]]:
    """Return every two axes of a case with their values."""
    return [(a, case[a], b, case[b]) for a, b in combinations(case, 2)]
