"""Times whole training steps of every policy beside dense ones: time, ceiling, realised share of it, bytes kept.

    python benchmarks/policies.py          # a long time; writes benchmarks/results/policies-cpu.json
    python benchmarks/policies.py --tiny   # the same code in seconds; it measures nothing

The steps, their order and the ratios are those of `benchmarks/dropbp.py`. *ceiling* is one over the share of the FLOPs
of forward and backward that is left; *realised* is what whole steps save over what these FLOPs would save. A policy
that spares the optimizer parameters can realise more. The batch has two texts of full length, and every token of them
is trained, so `lossless` has next to nothing to leave out: its row is what attaching costs.
"""

from __future__ import annotations

from typing import Any

from dropbp import CHECKPOINTING, Ways, main

BEGIN: dict[str, Any] = {"start": 0.0, "end": 1.0, "interrupt": 0}
NODES: dict[str, Any] = {"attach": {"sites": "nodes"}}
HEAD: dict[str, Any] = {"attach": {"exclude": ["lm_head"]}}

WAYS: Ways = {
    "dense": {},
    CHECKPOINTING: {},
    "dense, engine": {"name": "dense"},
    "crs 0.25": {"name": "crs", "keep": 0.25, **HEAD},
    "crs 0.25 uniform": {"name": "crs", "keep": 0.25, "by": "uniform", **HEAD},
    "dropbp 0.5": {"name": "dropbp", "keep": 0.5},
    "frozen, BAdam": {
        "name": "frozen",
        "turn": "layers",
        "freeze": ["*embed_tokens*", "*lm_head*", "model.norm*"],
        "optimizer_state": "drop",
        "every": 5,
    },
    "compact 0.25": {"name": "compact"},
    "dither": {"name": "dither", **HEAD},
    "frozen, LISA": {"name": "frozen", "turn": "layers", "order": "independent", "at_once": 2, "every": 5},
    "gact 4 bits": {"name": "gact", "bits": 4},
    "grades": {"name": "grades", "threshold": 0.0},
    "importance 1/3": {"name": "importance", "threshold": 0.0},
    "layerdrop 0.8": {"name": "layerdrop"},
    "lossless": {"name": "lossless"},
    "max-child": {"name": "max-child", **NODES},
    "mvue 2:4": {"name": "mvue", **HEAD},
    "random 0.25": {"name": "random", "keep": 0.25, **HEAD},
    "random-child": {"name": "random-child", **NODES},
    "selective-backprop": {"name": "selective-backprop", "keep": 0.5, **BEGIN},
    "sketch 0.2": {"name": "sketch", "keep": 0.2},
    "subnet 0.1 rows": {"name": "subnet", "by": "random"},
    "tokens 0.25 detach": {"name": "tokens", "score": "random", "keep": 0.25, "mode": "detach"},
    "topk 0.25": {"name": "topk", "keep": 0.25, **HEAD},
    "uniform 0.5": {"name": "uniform", "keep": 0.5, **BEGIN},
    "vcas, before control": {"name": "vcas", **HEAD},
    "velora 32": {"name": "velora", "where": ["*v_proj", "*down_proj"]},
    "wta-crs 0.3": {"name": "wta-crs", "keep": 0.3},
}
LEFT_OUT = {
    "rho": "a step is that of uniform, and half of that of a reference, whose losses may be cached",
}

if __name__ == "__main__":
    main("policies", WAYS, __doc__)
