"""What a recipe may choose beside its defaults, every one that the table of what goes with what speaks of, and others.

Read by the test that holds the worker against the table, and by the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from sparsebp_cli.policy.composition import list_optimizers
from sparsebp_cli.policy.discovery import find_policy

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Choice:
    """One thing that a recipe chooses.

    Args:
        label: Name on the page.
        group: No two of one group are chosen together.
        sections: Lines of the recipe, by section.
        policy: A policy with its options; empty: none.
        is_heavy: Whether pairs with it are looked at in `make chaos` alone.
    """

    label: str
    group: str
    sections: Sections = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    is_heavy: bool = False


def _backward(**options: Any) -> Sections:
    return {"backward": options}


def _policy(label: str, sections: Sections | None = None, *, is_heavy: bool = False, **options: Any) -> Choice:
    """Return the choice of a policy, with what it needs in other sections; no two of its kind are chosen together."""
    return Choice(label, find_policy(options["name"]).kind, sections or {}, options, is_heavy)


_SMALL = {"apollo": {"rank": 2}, "fira": {"rank": 2}, "galore": {"rank": 2}}
_LIGHT = ("galore",)
_EXACT = {"update": "eager", "eager_clip": "exact"}
CHOICES = (
    _policy("topk (rows)", name="topk", keep=0.5, along="rows"),
    _policy("topk (columns)", is_heavy=True, name="topk", keep=0.5, along="columns"),
    _policy("tokens (exact)", name="tokens", score="random", keep=0.5),
    _policy("tokens (detach)", name="tokens", score="random", keep=0.5, mode="detach"),
    _policy("lossless", name="lossless"),
    _policy("dropbp", name="dropbp", keep=0.5),
    _policy("layerdrop", name="layerdrop", keep=0.5),
    _policy("wta-crs", name="wta-crs", keep=0.5),
    _policy("uniform", name="uniform", keep=0.5, start=0.0, end=1.0, interrupt=0),
    _policy("importance", name="importance", keep=0.5),
    _policy("subnet", name="subnet"),
    _policy(
        "subnet (of frozen), lora",
        {"model": {"lora": {"r": 2}}},
        is_heavy=True,
        name="subnet",
        of="frozen",
        elements=["*.base_layer"],
        by="random",
    ),
    _policy("frozen (freeze)", name="frozen", freeze=["*.layers.0.*"]),
    _policy("frozen (turn)", name="frozen", turn="layers"),
    _policy("max-child at nodes", _backward(sites="nodes"), name="max-child"),
    Choice("sites: nodes", "sites", _backward(sites="nodes")),
    Choice("execution: reference", "execution", _backward(execution="reference")),
    Choice("update: eager", "update", {"backward": {"update": "eager"}, "training": {"max_grad_norm": None}}),
    Choice("eager_clip: exact", "update", _backward(**_EXACT)),
    Choice("segments: 2", "segments", _backward(segments=2)),
    Choice("checkpointing: full", "checkpointing", _backward(checkpointing="full")),
    Choice(
        "optim: lora-fa",
        "optim",
        {"model": {"lora": {"r": 2}}, "training": {"optim": "lora-fa"}},
        {"name": "frozen", "freeze": ["*lora_A*"]},
        is_heavy=True,
    ),
    Choice(
        "optim: compact",
        "optim",
        {"training": {"optim": "compact"}},
        {"name": "compact", "keep": 0.5, "interval": 2},
        is_heavy=True,
    ),
    *(
        Choice(
            f"optim: {name}",
            "optim",
            {"training": {"optim": name, "optim_args": _SMALL.get(name, {})}},
            is_heavy=name not in _LIGHT,
        )
        for name in list_optimizers()
        if name not in ("adamw", "asgd", "adadelta", "rprop", "lora-fa", "compact")
    ),
    Choice("mixed_precision: bf16", "mixed_precision", {"training": {"mixed_precision": "bf16"}}, is_heavy=True),
    Choice(
        "gradient_accumulation_steps: 2",
        "accumulation",
        {"training": {"gradient_accumulation_steps": 2}},
        is_heavy=True,
    ),
    Choice("compile: true", "compile", {"training": {"compile": True}}, is_heavy=True),
    Choice("dtype: bfloat16", "dtype", {"model": {"dtype": "bfloat16"}}),
    Choice("attention: eager", "attention", {"model": {"attention": "eager"}}, is_heavy=True),
    Choice("float8: emulated", "float8", {"model": {"float8": "emulated"}}),
    Choice("lora", "lora", {"model": {"lora": {"r": 2}}}),
    Choice("format: completion", "format", {"dataset": {"format": "completion"}}, is_heavy=True),
    Choice("format: classification", "format", {"dataset": {"format": "classification"}}),
    Choice("processes: 2", "processes", {"target": {"processes": 2}}),
    Choice("sharding: fsdp2", "processes", {"target": {"processes": 2, "sharding": "fsdp2"}}),
)


def find_pairs() -> Iterator[tuple[Choice, Choice]]:
    """Return every two choices that can stand in one recipe."""
    return ((one, two) for one, two in combinations(CHOICES, 2) if one.group != two.group)


def combine(base: Mapping[str, Any], choices: tuple[Choice, ...]) -> dict[str, Any]:
    """Return a recipe with some choices in it.

    Args:
        base: Its other sections.
        choices: The later one wins where two speak of one key.
    """
    recipe: dict[str, Any] = {name: dict(part) if isinstance(part, Mapping) else part for name, part in base.items()}
    for choice in choices:
        for name, part in choice.sections.items():
            recipe[name] = {**recipe.get(name, {}), **part}
    policies = [dict(choice.policy) for choice in choices if choice.policy]
    return recipe | ({"policy": policies} if policies else {})
