"""The model and the datasets in the package: ``austen-llama``, ``austen``, ``cmudict`` and ``python-docs``.

With them, a first run needs no network. Recipes find them by entry point (``sparsebp.models``, ``sparsebp.datasets``),
like those of other packages. A dataset is a function ``load() -> {split: [row, ...]}`` that imports no torch. A model
is a function that returns a folder for ``from_pretrained``. Licences: ``data/README.md`` and the file NOTICE.

``austen-llama`` is a llama of 3.7 million parameters, pretrained on five of Jane Austen's novels. Its folder also holds
model card, training log and sha256 of the inputs. ``benchmarks/pretrain.py`` made it.

Source of ``austen``: the texts of the R package janeaustenr (Julia Silge), which come from Project Gutenberg. Both
novels were published in 1817 and are in the public domain. *Northanger Abbey* is the split ``train``. *Persuasion* is
``test``; it was held out when austen-llama was pretrained, so its loss shows what the model forgot in fine-tuning.

Source of ``cmudict``: the CMU Pronouncing Dictionary, copyright Carnegie Mellon University; its licence is stored with
the data. The data are a random sample of the words' first pronunciations (``data/README.md`` describes the sampling).
Four in ten tokens are completion; the prompt is masked. A prompt and its answer share no tokens, so copying does not
help.

Source of ``python-docs``: ``pydoc_data.topics`` of the running Python, copyright Python Software Foundation, PSF
License Version 2. None of it is copied into this package, so **its content depends on the Python version**: a run
records its digest, and runs with different versions are not comparable. About 80 topics, 0.4 million characters. Topics
repeat each other (``compound`` holds all of ``for`` and ``while``), which would put held-out text into the training
split. So each paragraph is kept only where it occurs first, and the held-out topics come before all others.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

DATA = Path(__file__).parent / "data"
ABOUT = {  # licence and content
    "austen-llama": ("Apache-2.0", "llama, 3.7 million parameters, 4 layers, pretrained on five novels by Jane Austen"),
    "austen": ("public domain", "two novels by Jane Austen, by chapter; one was held out in pretraining"),
    "cmudict": ("BSD", "30,000 English words, spelling to phonemes, as prompt and completion"),
    "python-docs": ("PSF-2.0", "80 topics of the running Python's own documentation"),
}
AUSTEN_FOLDER = DATA / "austen"
AUSTEN_BOOKS = {"train": "northangerabbey.txt", "test": "persuasion.txt"}

# "Chapter 1", "CHAPTER XII", "VOLUME I": alone on a line.
_HEADING = re.compile(r"(?im)^(?=(?:chapter|volume)[ \t]+[0-9ivxlc]+\.?[ \t]*$)")


def is_held_out(name: str) -> bool:
    """Return whether a row belongs to the split ``test``, as about one in ten does. The answer is the same on every
    machine and Python version."""
    return hashlib.sha256(name.encode()).digest()[0] < 26  # 26 of 256


def austen_llama() -> Path:
    """Return the folder that ``from_pretrained`` reads: config, safetensors weights and tokenizer."""
    return DATA / "austen-llama"


def chapters(text: str) -> list[str]:
    """Split a novel before each heading, and strip each piece. Text before the first heading is the first piece."""
    return [piece.strip() for piece in _HEADING.split(text) if piece.strip()]


def load_austen() -> dict[str, list[dict[str, str]]]:
    """Return the splits ``train`` and ``test``, each a list of rows with the column ``text``."""
    return {
        split: [{"text": chapter} for chapter in chapters((AUSTEN_FOLDER / book).read_text(encoding="utf-8"))]
        for split, book in AUSTEN_BOOKS.items()
    }


def load_cmudict() -> dict[str, list[dict[str, str]]]:
    """Return the splits ``train`` and ``test``, divided by word and sorted by word, with rows such as ``{"prompt": "a u
    s t e n:", "completion": " AO1 S T AH0 N"}``."""
    splits: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for line in (DATA / "cmudict" / "cmudict-30k.dict").read_text(encoding="utf-8").splitlines():
        word, *phonemes = line.partition(" #")[0].split()
        row = {"prompt": f"{' '.join(word)}:", "completion": " " + " ".join(phonemes)}
        splits["test" if is_held_out(word) else "train"].append(row)
    return splits


def load_python_docs() -> dict[str, list[dict[str, str]]]:
    """Return the splits ``train`` and ``test``, divided by topic and sorted by its name. The column is ``text``."""
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
