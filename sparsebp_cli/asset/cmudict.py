"""The dataset ``cmudict``: English spelling to phonemes, 30,000 words.

Source: the CMU Pronouncing Dictionary, copyright Carnegie Mellon University; its licence is stored with the data. The
data are a random sample of the words' first pronunciations (``data/README.md`` describes the sampling). Four in ten
tokens are completion; the prompt is masked. A prompt and its answer share no tokens, so copying does not help.
"""

from __future__ import annotations

from pathlib import Path

from sparsebp_cli.asset.split import is_held_out

FILE = Path(__file__).parent / "data" / "cmudict" / "cmudict-30k.dict"


def load() -> dict[str, list[dict[str, str]]]:
    """Return the splits ``train`` and ``test``, divided by word, with the columns of format ``completion``.

    Returns:
        Rows such as ``{"prompt": "a u s t e n:", "completion": " AO1 S T AH0 N"}``, in the order of the words.
    """
    splits: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        word, *phonemes = line.partition(" #")[0].split()
        row = {"prompt": f"{' '.join(word)}:", "completion": " " + " ".join(phonemes)}
        splits["test" if is_held_out(word) else "train"].append(row)
    return splits
