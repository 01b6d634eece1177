"""The dataset ``python-docs``: the language reference that is inside every Python, one row a help topic.

Source: ``pydoc_data.topics`` of the running Python, copyright Python Software Foundation, PSF License Version 2. None
of it is copied into this package, so **its content depends on the Python version**: a run records its digest, and runs
made by different versions are not comparable. About 80 topics, 0.5 million characters.
"""

from __future__ import annotations

from sparsebp_cli.asset.split import is_held_out


def load() -> dict[str, list[dict[str, str]]]:
    """Return the splits ``train`` and ``test`` by topic, in the order of the topics' names; the column is ``text``."""
    from pydoc_data.topics import topics

    splits: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for name in sorted(topics):
        splits["test" if is_held_out(name) else "train"].append({"text": topics[name].strip()})
    return splits
