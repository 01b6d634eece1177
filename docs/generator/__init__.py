"""One file a generated page. Each has ``page(root)``, which returns the page's whole text."""

import logging

for _name in ("torchao", "torch.utils._pytree"):  # what torchao tells where transformers loads it
    logging.getLogger(_name).setLevel(logging.ERROR)
