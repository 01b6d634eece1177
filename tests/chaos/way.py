"""Ways to train in which a run is interrupted: every policy of this package, and what else has state of its own."""

from __future__ import annotations

from typing import Any

from tests.guess import guess_required, sites_of
from tests.plugin import find_ours
from tests.worker.conftest import LLAMA

Sections = dict[str, Any]


def _policy(name: str, **options: Any) -> Sections:
    return {"policy": [{"name": name, **options}]}


_NODES = {"backward": {"sites": "nodes"}}
_NO_DROPOUT = {"model": {"config": LLAMA}}  # what is refused with these policies
_TURNS = {"freeze": ["model.embed_tokens", "model.norm"], "turn": "layers", "every": 3}
_LORA = {"lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}}

_NAMED: dict[str, Sections] = {
    "dense": _policy("dense"),
    "dense accumulated": _policy("dense") | {"training": {"gradient_accumulation_steps": 2, "max_steps": 40}},
    "topk rows": _policy("topk", keep=0.3, along="rows"),
    "topk rows by example": _policy("topk", keep=0.3, along="rows", within="example"),
    "topk columns": _policy("topk", keep=0.3, along="columns"),
    "topk rows, by a schedule": _policy("topk", along="rows", keep={"from": 1.0, "to": 0.2, "by": "cosine"}),
    "topk elements": _policy("topk", keep=0.3, along="elements"),
    "topk blocks": _policy("topk", keep=0.5, along="blocks", block=[4, 8]),
    "topk 2:4": _policy("topk", keep=0.5, along="2:4"),
    "random rows, weighted": _policy("random", keep=0.5, along="rows", weighted=True),
    "random columns": _policy("random", keep=0.5, along="columns"),
    "random 2:4, weighted": _policy("random", keep=0.5, along="2:4", weighted=True),
    "tokens by loss, detached": _policy("tokens", score="loss", keep=0.4, mode="detach"),
    "tokens by gradient": _policy("tokens", score="gradient_norm", keep=0.4),
    "tokens at random, exact": _policy("tokens", score="random", keep=0.4, mode="exact"),
    "selective-backprop": _policy("selective-backprop", keep=0.5, start=0.2, end=0.9, history=64),
    "uniform": _policy("uniform", keep=0.5, start=0.0, end=1.0),
    "importance": _policy("importance", keep=0.5, threshold=1.0, every=3),
    "rho": _policy("rho", keep=0.5, reference="tiny"),  # the test has a model of the recipe's kind for it
    "crs": _policy("crs", keep=0.5, products="both"),
    "mvue": _policy("mvue", products="both"),
    "vcas": _policy("vcas", every=3, tolerance=0.5, row_tolerance=0.5),
    "dropbp": _policy("dropbp", keep=0.5),
    "dropbp by sensitivity": _policy("dropbp", keep=0.5, sensitivity_at=0.3),
    "layerdrop": _policy("layerdrop", keep=0.6),
    "wta-crs": _policy("wta-crs", keep=0.5),
    "gact": _policy("gact", bits=4),
    "sketch": _policy("sketch", keep=0.5),
    "compact": _policy("compact", keep=0.5),
    "compact with its optimizer": _policy("compact", keep=0.5, interval=3) | {"training": {"optim": "compact"}},
    "velora": _policy("velora", group=4),
    "lossless": _policy("lossless") | _NO_DROPOUT,
    "frozen": _policy("frozen", freeze=["*.layers.0.*"]),
    "frozen in turn, at random": _policy("frozen", order="random", **_TURNS),
    "frozen in turn, independent, state dropped": _policy(
        "frozen", order="independent", optimizer_state="drop", **_TURNS
    ),
    "grades": _policy("grades", threshold=0.95, relative=True, grace=0.2),
    "subnet": _policy("subnet", keep=0.3, batches=2),
    "max-child": _policy("max-child", leaves="always", ties="random") | _NODES,
    "random-child": _policy("random-child", leaves="always") | _NODES,
    "stride": _policy("stride", every=3),
    "two policies": {
        "policy": [{"name": "uniform", "keep": 0.5, "start": 0.0, "end": 1.0}, {"name": "topk", "keep": 0.5}]
    },
    "segments": _policy("dense") | {"backward": {"segments": 2}},
    "eager apollo-mini": _policy("dense")
    | {
        "backward": {"update": "eager", "eager_clip": "previous"},
        "training": {"optim": "apollo-mini", "max_steps": 40},
    },
    "adapters": _policy("random", keep=0.5, along="rows") | {"model": _LORA},
    "lora-fa": _policy("frozen", freeze=["*lora_A*"]) | {"model": _LORA, "training": {"optim": "lora-fa"}},
}


def _with_others(ways: dict[str, Sections]) -> dict[str, Sections]:
    """Add each policy of this package that no way names, with the options that it requires."""
    named = {entry["name"] for given in ways.values() for entry in given.get("policy", ())}
    others = {name: found for name, found in find_ours().items() if name not in named}
    return ways | {
        name: _policy(name, **guess_required(found.policy_class)) | (_NODES if sites_of(found) == "nodes" else {})
        for name, found in others.items()
    }


WAYS = _with_others(_NAMED)
