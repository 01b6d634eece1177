"""The worker process: builds model and data from a plan, trains, measures and writes the journal."""

import logging
import os

# transformers imports torchao where it is installed. torchao then warns about GPU kernels that it could not load, and
# about registering its own pytree nodes; neither concerns a run.
# bitsandbytes, which peft imports, says that it fetched no kernel from a hub.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def wait_briefly() -> None:
    """Let torch's threads spin for microseconds at a barrier, then sleep; values that the user set are kept.

    OpenMP reads this when torch loads it, so call it before any import of torch. Threads that spin for long make a step
    several times slower as soon as another process needs a core. Threads that sleep at once are woken for every
    operation: on a quiet machine dense steps take 1.2 times as long, packed ones 1.5 times (docs/log.md, 2026-11-22).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # what other libraries than GNU's read
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
