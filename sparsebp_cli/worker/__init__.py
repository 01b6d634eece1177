"""The process on the machine: builds model and data from a plan, trains, measures, writes the journal."""

import logging

# transformers loads torchao where it is installed, which then tells what of a GPU it could not load, and of its own
# registrations.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
