"""Assets of the package, so that a first run needs no network: a small pretrained llama, and three datasets.

Recipes find these by entry point (``sparsebp.models``, ``sparsebp.datasets``), like those of other packages. A dataset
is a function ``load() -> {split: [row, ...]}`` that imports no torch. A model is a function that returns a folder for
``from_pretrained``. Sources and licences: ``data/README.md`` and the file NOTICE.
"""
