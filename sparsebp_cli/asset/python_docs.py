"""The dataset ``python-docs``: the language reference that ships with Python, one row a help topic.

Source: ``pydoc_data.topics`` of the running Python, copyright Python Software Foundation, PSF License Version 2. None
of it is copied into this package, so **its content depends on the Python version**: a run records its digest, and runs
with different versions are not comparable. About 80 topics, 0.4 million characters.

Topics repeat each other (``compound`` holds all of ``for`` and ``while``), which would put held-out text into the
training split. So each paragraph is kept only where it occurs first, and the held-out topics come before all others.
"""

from __future__ import annotations

from sparsebp_cli.asset.split import is_held_out


def load() -> dict[str, list[dict[str, str]]]:
    """Return the splits ``train`` and ``test`` by topic, in the order of the topics' names; the column is ``text``."""
    from pydoc_data.topics import topics

    splits: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    seen: set[str] = set()
    for name in sorted(topics, key=lambda name: (not is_held_out(name), name)):
        paragraphs = []
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                paragraphs.append(paragraph)
            seen.add(words)
        if paragraphs:
            text = "\n\n".join(paragraphs).strip("\n")
            splits["test" if is_held_out(name) else "train"].append({"text": text})
    return splits
