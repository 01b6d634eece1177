"""Times whole training steps that save less of inputs, beside dense ones and ones with checkpointing.

    python benchmarks/saved.py          # some minutes on two cores; writes benchmarks/results/saved-cpu.json
    python benchmarks/saved.py --tiny   # the same code in seconds; it measures nothing

The steps, their order and the ratios are those of `benchmarks/dropbp.py`. FLOPs with checkpointing include the repeated
forward. Bytes kept are those that a forward saves for its backward.
"""

from __future__ import annotations

from dropbp import CHECKPOINTING, Ways, main

WAYS: Ways = {
    "dense": {},
    CHECKPOINTING: {},
    "wta-crs 0.3": {"name": "wta-crs", "keep": 0.3},
    "wta-crs 0.1": {"name": "wta-crs", "keep": 0.1},
    "gact 8 bits": {"name": "gact", "bits": 8},
    "gact 4 bits": {"name": "gact", "bits": 4},
    "sketch 0.2": {"name": "sketch", "keep": 0.2},
}

if __name__ == "__main__":
    main("saved", WAYS, __doc__)
