"""Compare training texts with the rows from which they were made, and prompts at inference with both.

A template, tokenizer or file converter may lose, escape, double or invent text, and training continues. So each text is
searched for what its row contains; ``run/text_fault.py`` lists the faults.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import DatasetSection
from sparsebp_cli.run.text_fault import TextCheck, TextFault, describe_fault, judge_fault
from sparsebp_cli.source.column import Rows
from sparsebp_cli.source.conversation import Conversation, read_talks
from sparsebp_cli.worker.encoding import EncodedSplit, Written
from sparsebp_cli.worker.prompt_parity import compare_prompts
from sparsebp_cli.worker.written_message import find_values, find_written, squeeze

NUM_SHOWN = 12  # characters shown of an end


def check_texts(
    rows: Rows,
    found: EncodedSplit,
    section: DatasetSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    refuses: bool = True,
) -> TextCheck:
    """Return the faults of a split's texts. With ``refuses``, raise DataError if most rows have a fault that makes them
    other texts than the user's."""
    tally, tokens, written = _Tally(), _ControlTokens.of(tokenizer), found.written
    num_prompts, unlike = compare_prompts(rows, found.examples, section, tokenizer)
    for prompt in unlike:
        tally.add("prompt", prompt.row.place, prompt.text[-NUM_SHOWN:])
    has_turns = section.format in ("chat", "completion")
    conversations = read_talks([rows[one.row] for one in written], section)
    for number, one in enumerate(written):
        place = rows[one.row].place
        if tokens.is_doubled(one):
            tally.add("doubled", place, "an end or beginning of sequence")
        for tail in one.tails if has_turns else ():
            if not tokens.ends(tail):
                tally.add("end" if conversations is not None else "no_end", place, tokens.decode(tail)[-NUM_SHOWN:])
        if conversations is None:
            tally.add_all("control_in_text", place, tokens.find([one.text], is_whole=True))
        else:
            _check_conversation(tally, conversations[number], one.text, tokens, section)
    num_turns = sum(len(one.tails) for one in written) if has_turns else 0
    looked = {"prompt": num_prompts, "end": num_turns, "no_end": num_turns}
    faults = [tally.describe(kind, looked.get(kind, len(written))) for kind in tally.places]
    for fault in faults:
        if refuses and judge_fault(fault) == "refused":
            raise DataError(f"dataset {section.name}: {describe_fault(fault)}")
    affected = len({place for places in tally.places.values() for place in places})
    return {"rows": len(written), "affected": affected, "prompts": num_prompts, "turns": num_turns, "faults": faults}


def _check_conversation(
    tally: _Tally, one: Conversation, text: str, tokens: _ControlTokens, section: DatasetSection
) -> None:
    own = [each.text for message in one.messages for each in find_values(message)]
    tally.add_all("control", one.place, tokens.find(own))
    solid = squeeze(text)
    for number, message in enumerate(one.messages):
        is_trained = one.is_trained(number, section.train_on)
        for kind, key in find_written(message, solid, is_trained=is_trained):
            tally.add(kind, one.place, key)
    for tool in one.tools or ():
        given = tool.get("function", tool) if isinstance(tool, dict) else {}
        name = given.get("name") if isinstance(given, dict) else None
        if isinstance(name, str) and name not in text:
            tally.add("unread", one.place, "tools")


@dataclass
class _Tally:
    """The faults found, by kind."""

    places: dict[str, list[str]] = field(default_factory=dict)  # one for each row, prompt or turn
    shown: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, place: str, shown: str) -> None:
        places = self.places.setdefault(kind, [])
        if kind in ("prompt", "end", "no_end") or places[-1:] != [place]:  # other kinds count once for each row
            places.append(place)
        about = self.shown.setdefault(kind, [])
        if shown not in about:
            about.append(shown)

    def add_all(self, kind: str, place: str, shown: Sequence[str]) -> None:
        for one in shown:
            self.add(kind, place, one)

    def describe(self, kind: str, of: int) -> TextFault:
        shown = self.shown[kind]
        about = shown[0] if kind in ("prompt", "end", "no_end") else ", ".join(shown[:3])
        return {"kind": kind, "number": len(self.places[kind]), "of": of, "first": self.places[kind][0], "shown": about}


@dataclass(frozen=True)
class _ControlTokens:
    """The special tokens of a tokenizer, as ids and as text."""

    tokenizer: PreTrainedTokenizerBase
    names: dict[int, str]
    ending: frozenset[int]
    pattern: re.Pattern[str] | None  # None: the tokenizer reads none from text

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> _ControlTokens:
        names = dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))
        names |= {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        end = {tokenizer.eos_token_id, tokenizer.sep_token_id}
        others = {"bos_token_id", "cls_token_id", "pad_token_id", "unk_token_id", "mask_token_id"}
        ending = names.keys() - ({getattr(tokenizer, name) for name in others} - end)
        longest_first = sorted(filter(None, names.values()), key=len, reverse=True)
        is_read = longest_first and not getattr(tokenizer, "split_special_tokens", False)
        pattern = re.compile("|".join(map(re.escape, longest_first))) if is_read else None
        return cls(tokenizer, names, frozenset(ending), pattern)

    def find(self, texts: Sequence[str], *, is_whole: bool = False) -> list[str]:
        """Return the control tokens in texts. In whole texts, users choose tokens at start and end: not reported."""
        if self.pattern is None:
            return []
        found = list[str]()
        for text in texts:
            for match in self.pattern.finditer(text):
                is_around = not text[: match.start()].strip() or not text[match.end() :].strip()
                if not (is_whole and is_around):
                    found.append(match.group())
        return list(dict.fromkeys(found))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def ends(self, tail: Sequence[int]) -> bool:
        """Return whether the last token that is not white space ends a turn."""
        last = next(self._solid(reversed(tail)), None)
        return last in self.ending

    def is_doubled(self, one: Written) -> bool:
        """Return whether a row has two beginnings of sequence, or two consecutive ends."""
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if begin is not None and list(one.head) == [begin, begin]:
            return True
        for tail in one.tails:
            if list(tail).count(end) > 1:
                solid = list(self._solid(tail))
                if any(pair == (end, end) for pair in itertools.pairwise(solid)):
                    return True
        return False

    def _solid(self, ids: Sequence[int] | Iterator[int]) -> Iterator[int]:
        return (number for number in ids if number in self.names or self.decode([number]).strip())
