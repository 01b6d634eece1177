"""One module a generated page. Each has ``page(root)``, which returns the page's whole text."""

import logging

for _name in ("torchao", "torch.utils._pytree"):  # loggers of torchao's warnings when transformers imports it
    logging.getLogger(_name).setLevel(logging.ERROR)
