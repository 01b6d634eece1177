"""The worker process: builds model and data from a plan, trains, measures and writes the journal."""

import logging

# transformers imports torchao where it is installed. torchao then warns about GPU kernels that it could not load, and
# about registering its own pytree nodes; neither concerns a run.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
