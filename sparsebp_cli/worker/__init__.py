"""The worker process: build model and data from a plan, train, measure, and write the event log."""

import logging
import os

# transformers imports torchao if it is installed. torchao then warns about GPU kernels that it could not load, and
# about registering its own pytree nodes. Neither concerns a run.
# bitsandbytes, which peft imports, reports that it fetched no kernel from a hub.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def wait_briefly() -> None:
    """Make torch's threads spin for microseconds at a barrier, then sleep. Values that the user set are kept.

    Call this before any import of torch, because OpenMP reads the setting when torch loads it. Threads that spin for
    long make a step several times slower as soon as another process needs a core. Threads that sleep at once must be
    woken for every operation: on an idle machine, dense steps take 1.2 times as long, packed ones 1.5 times
    (docs/log.md, 2026-11-22).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # for OpenMP libraries other than GNU's
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
