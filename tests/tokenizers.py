"""Tokenizers of many classes from small vocabularies: word pieces, byte level, scored and merged pieces, bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import transformers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

WORDS = ("the", "film", "is", "good", "bad", "very", "plot", "boring")
LETTERS = "abcdefghijklmnopqrstuvwxyz.,!?"
MERGES = [("t", "h"), ("th", "e"), ("g", "o"), ("o", "d"), ("go", "od")]
MERGED = ("th", "the", "go", "od", "good")
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
END = ("<|endoftext|>",)


def number(tokens: Iterable[str]) -> dict[str, int]:
    return {token: place for place, token in enumerate(dict.fromkeys(tokens))}


def word_pieces(*special: str) -> dict[str, int]:
    return number([*special, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)])


def byte_level(*special: str) -> dict[str, int]:
    return number([*special, *sorted(ByteLevel.alphabet()), *MERGED])


def pieces(*special: str) -> dict[str, int]:
    return number([*special, "▁", *LETTERS, *MERGED, *(f"<0x{byte:02X}>" for byte in range(256))])


def scored(*special: str) -> list[tuple[str, float]]:
    words = [(f"▁{word}", -3.0) for word in WORDS] + [(word, -3.5) for word in WORDS]
    return [(token, 0.0) for token in special] + [("▁", -2.0), *words, *((letter, -6.0) for letter in LETTERS)]


def make(kind: str, **options: object) -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = getattr(transformers, f"{kind}Tokenizer")(**options)
    return made


# Encoders, and models that read and write: their tokenizers surround a text.
ENCODERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "Bert": lambda: make("Bert", vocab=word_pieces(*BERT)),
    "MPNet": lambda: make("MPNet", vocab=word_pieces("<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>")),
    "Funnel": lambda: make("Funnel", vocab=word_pieces("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<s>", "</s>")),
    "Roberta": lambda: make("Roberta", vocab=byte_level(*ROBERTA), merges=MERGES),
    "Deberta": lambda: make("Deberta", vocab=byte_level(*BERT), merges=MERGES),
    "Albert": lambda: make("Albert", vocab=scored("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")),
    "DebertaV2": lambda: make("DebertaV2", vocab=scored(*BERT), unk_token="[UNK]"),
    "XLMRoberta": lambda: make("XLMRoberta", vocab=scored(*ROBERTA)),
    "XLNet": lambda: make(
        "XLNet", vocab=scored("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
    ),
    "T5": lambda: make("T5", vocab=scored("<pad>", "</s>", "<unk>"), extra_ids=0),
    "ByT5": lambda: make("ByT5"),
    "Canine": lambda: make("Canine"),
}
DECODERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "GPT2": lambda: make("GPT2", vocab=byte_level(*END), merges=MERGES),
    "GPTNeoX": lambda: make("GPTNeoX", vocab=byte_level(*END), merges=MERGES),
    "Qwen2": lambda: make("Qwen2", vocab=byte_level(*END), merges=MERGES),
    "Llama": lambda: make("Llama", vocab=pieces("<unk>", "<s>", "</s>"), merges=MERGES, add_bos_token=True),
    "Llama without BOS": lambda: make("Llama", vocab=pieces("<unk>", "<s>", "</s>"), merges=MERGES),
    "Gemma": lambda: make("Gemma", vocab=pieces("<pad>", "<eos>", "<bos>", "<unk>"), merges=MERGES, add_bos_token=True),
}


def build(name: str, padding_side: str = "right") -> PreTrainedTokenizerBase:
    """A tokenizer that can pad, as a model's does when it is trained."""
    tokenizer = (ENCODERS | DECODERS)[name]()
    tokenizer.padding_side = padding_side
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
