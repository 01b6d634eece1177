"""Define the kinds of faults in training texts: what each is, its cure, and whether most rows may have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict


class TextFault(TypedDict):
    """A kind of fault in the texts of a split."""

    kind: str  # a key of KINDS
    number: int  # number of rows, prompts or turns with the fault
    of: int  # number that was checked
    first: str  # file and line of the first one
    shown: str  # the example shown: the end of a prompt, a token, keys of messages


class TextCheck(TypedDict):
    """The result of checking a split's texts."""

    rows: int
    affected: int  # rows with a fault of any kind
    prompts: int
    turns: int  # trained turns
    faults: list[TextFault]


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault."""

    sentence: str
    cure: str
    where_most: Literal["refused", "warning", "info"] = "refused"  # the consequence if most rows have it


MOST = 0.5  # fraction of the rows; above it, training uses other text than the user intends
TOKEN_BORDER = (
    "end the prompts, or the chat template's generation prompt, at the end of a token, such as after one line break"
)
NO_BLANK = (
    "move the blank at the end of the prompt (or of the chat template's generation prompt) to the answer's beginning"
)
KINDS = {
    "prompt": FaultKind(
        "prompts are tokenised differently in generation than in training (first: {first}, which ends in {shown!r})",
        TOKEN_BORDER,
    ),
    "end": FaultKind(
        "trained turns do not end with an end token (first: {first}, which ends in {shown!r}), so a model does not "
        "learn to stop",
        "let the chat template write a special token such as eos_token after each message of the assistant, inside "
        "{{% generation %}} if the template uses this tag",
    ),
    "no_end": FaultKind(
        "completions do not end with an end token (first: {first})",
        "give the tokenizer an eos_token",
        where_most="warning",
    ),
    "doubled": FaultKind(
        "rows begin or end with {shown} twice (first: {first})",
        "remove this token from the data: the tokenizer or the chat template adds it",
    ),
    "control": FaultKind(
        "rows have control tokens in their own messages, such as {shown} (first: {first})",
        "remove them: the chat template writes the control tokens that it needs",
    ),
    # If no template adds control tokens, they may be intended: a template may have written the data.
    "control_in_text": FaultKind(
        "rows have control tokens in their text, such as {shown} (first: {first})",
        "remove them, unless the model should read them as control tokens",
        where_most="info",
    ),
    "lost": FaultKind(
        "rows have trained text that the chat template does not write, in {shown} (first: {first})",
        "give dataset.chat_template a template that writes this text, or remove the text from the data",
    ),
    "escaped": FaultKind(
        "rows have text that the chat template escapes or writes in Python syntax, in {shown} (first: {first})",
        "give content as text, and use a chat template that writes text unchanged and objects with tojson",
    ),
    "unread": FaultKind(
        "rows have parts that the chat template does not write, in {shown} (first: {first})",
        "check whether the model should read these parts",
        where_most="warning",
    ),
    "null": FaultKind(
        "rows have null values in {shown} (first: {first})",
        "leave out keys without a value: tools that convert tables add them",
        where_most="warning",
    ),
}


def describe_fault(fault: TextFault) -> str:
    """Return one sentence about a fault, with its cure."""
    kind, shown = KINDS[fault["kind"]], fault["shown"]
    cure = NO_BLANK if fault["kind"] == "prompt" and shown.endswith((" ", "\t")) else kind.cure
    sentence = kind.sentence.format(first=fault["first"], shown=shown)
    return f"{fault['number']} of {fault['of']} {sentence}: {cure.format()}"


def judge_fault(fault: TextFault) -> Literal["refused", "warning", "info"]:
    """Return the consequence of a fault. If most rows have it, this depends on the kind; otherwise it is a warning."""
    return KINDS[fault["kind"]].where_most if fault["number"] > MOST * fault["of"] else "warning"
