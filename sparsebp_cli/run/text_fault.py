"""Faults of texts as they are trained, by kind: what each is, with its cure, and whether most rows may have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict


class TextFault(TypedDict):
    """A kind of fault in the texts of a split."""

    kind: str  # a key of KINDS
    number: int  # rows, prompts or turns that have it
    of: int  # how many were looked at
    first: str  # file and line of the first of them
    shown: str  # what it is about: the end of a prompt, a token, keys of messages


class TextCheck(TypedDict):
    """What a look at the texts of a split found."""

    rows: int
    affected: int  # rows with a fault of any kind
    prompts: int
    turns: int  # that are trained
    faults: list[TextFault]


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    sentence: str
    cure: str
    where_most: Literal["refused", "warning", "info"] = "refused"  # what follows where most rows have it


MOST = 0.5  # of the rows: above it a model is trained on other text than its user's
TOKEN_BORDER = "let prompts, or the template's generation prompt, end where a token ends, such as at one line break"
NO_BLANK = "take the blank from its end, or from that of the template's generation prompt, and begin the answer with it"
KINDS = {
    "prompt": Kind(
        "prompts have other tokens when a model is asked than in training (first: {first}, which ends in {shown!r})",
        TOKEN_BORDER,
    ),
    "end": Kind(
        "trained turns do not end with an end token (first: {first}, which ends in {shown!r}), so a model does not "
        "learn to stop",
        "let the template write a special token such as eos_token behind each message of the assistant, and inside "
        "{{% generation %}} where it has such marks",
    ),
    "no_end": Kind(
        "completions do not end with an end token (first: {first})",
        "give the tokenizer an eos_token",
        where_most="warning",
    ),
    "doubled": Kind(
        "rows begin or end with {shown} twice (first: {first})",
        "take it out of the data: the tokenizer or the template adds one",
    ),
    "control": Kind(
        "rows have control tokens in their own messages, such as {shown} (first: {first})",
        "take them out: the template writes those that it needs",
    ),
    # Where no template adds any, they may be meant: data that were written by a template before.
    "control_in_text": Kind(
        "rows have control tokens in their text, such as {shown} (first: {first})",
        "take them out, unless they are meant as tokens",
        where_most="info",
    ),
    "lost": Kind(
        "rows have trained text that the chat template does not write, in {shown} (first: {first})",
        "give dataset.chat_template a template that writes it, or take it out of the data",
    ),
    "escaped": Kind(
        "rows have text that the chat template writes escaped or as Python does, in {shown} (first: {first})",
        "give content as text, and a template that writes texts as they are and objects with tojson",
    ),
    "unread": Kind(
        "rows have parts that the chat template does not write, in {shown} (first: {first})",
        "check whether the model should read them",
        where_most="warning",
    ),
    "null": Kind(
        "rows have null values in {shown} (first: {first})",
        "leave out keys without a value: tools that convert tables fill them in",
        where_most="warning",
    ),
}


def describe_fault(fault: TextFault) -> str:
    """Return one sentence on a fault, with the cure."""
    kind, shown = KINDS[fault["kind"]], fault["shown"]
    cure = NO_BLANK if fault["kind"] == "prompt" and shown.endswith((" ", "\t")) else kind.cure
    sentence = kind.sentence.format(first=fault["first"], shown=shown)
    return f"{fault['number']} of {fault['of']} {sentence}: {cure.format()}"


def judge_fault(fault: TextFault) -> Literal["refused", "warning", "info"]:
    """Return what follows from a fault: most rows may not have it, or it is meant then."""
    return KINDS[fault["kind"]].where_most if fault["number"] > MOST * fault["of"] else "warning"
