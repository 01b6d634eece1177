"""Times whole training steps of every policy beside dense ones: time, ceiling, realised share of it, bytes kept.

    python benchmarks/policies.py          # a long time; writes benchmarks/results/policies-cpu.json
    python benchmarks/policies.py --tiny   # the same code in seconds; it measures nothing

The steps, their order and the ratios are those of `benchmarks/dropbp.py`. *ceiling* is one over the share of the FLOPs
of forward and backward that is left; *realised* is what whole steps save over what these FLOPs would save. A policy
that spares the optimizer parameters can realise more. The batch has two texts of full length, and every token of them
is trained, so `lossless` has next to nothing to leave out: its row is what attaching costs.
"""

from __future__ import annotations

import sys
from typing import Any

from dropbp import CHECKPOINTING, ROOT, Ways, main

sys.path.append(str(ROOT))  # of the tests, which know what policies there are

from tests.guess import guess_required, sites_of
from tests.plugin import find_ours

BEGIN: dict[str, Any] = {"start": 0.0, "end": 1.0, "interrupt": 0}
HEAD: dict[str, Any] = {"attach": {"exclude": ["lm_head"]}}

# Policies at the numbers of their publications, or in several forms.
NAMED: Ways = {
    "dense": {},
    CHECKPOINTING: {},
    "dense, engine": {"name": "dense"},
    "crs 0.25": {"name": "crs", "keep": 0.25, **HEAD},
    "crs 0.25 uniform": {"name": "crs", "keep": 0.25, "by": "uniform", **HEAD},
    "frozen, BAdam": {
        "name": "frozen",
        "turn": "layers",
        "freeze": ["*embed_tokens*", "*lm_head*", "model.norm*"],
        "optimizer_state": "drop",
        "every": 5,
    },
    "frozen, LISA": {"name": "frozen", "turn": "layers", "order": "independent", "at_once": 2, "every": 5},
    "grades": {"name": "grades", "threshold": 0.0},
    "importance 1/3": {"name": "importance", "threshold": 0.0},
    "random 0.25": {"name": "random", "keep": 0.25, **HEAD},
    "selective-backprop": {"name": "selective-backprop", "keep": 0.5, **BEGIN},
    "sketch 0.2": {"name": "sketch", "keep": 0.2},
    "subnet 0.1 rows": {"name": "subnet", "by": "random"},
    "tokens 0.25 detach": {"name": "tokens", "score": "random", "keep": 0.25, "mode": "detach"},
    "topk 0.25": {"name": "topk", "keep": 0.25, **HEAD},
    "uniform 0.5": {"name": "uniform", "keep": 0.5, **BEGIN},
    "velora 32": {"name": "velora", "where": ["*v_proj", "*down_proj"]},
    "wta-crs 0.3": {"name": "wta-crs", "keep": 0.3},
}
LEFT_OUT = {
    "rho": "a step is that of uniform, and half of that of a reference, whose losses may be cached",
}


def _make_ways() -> Ways:
    """Return the ways above, and one of each other policy of the package, with the options that it requires."""
    named = LEFT_OUT.keys() | {way["name"] for way in NAMED.values() if way}
    ways = dict(NAMED)
    for name, found in find_ours().items():
        if name not in named:
            options = guess_required(found.policy_class)
            at_sites = {"EdgeRouter": {"attach": {"sites": sites_of(found)}}, "GradientSelector": HEAD}
            label = " ".join([name, *map(str, options.values())])
            ways[label] = {"name": name, **options, **at_sites.get(found.kind, {})}
    return ways


WAYS = _make_ways()

if __name__ == "__main__":
    main("policies", WAYS, __doc__)
