"""Write conversations as text by a chat template, and find the characters that are trained.

If a template marks parts with ``{% generation %}``, these are the assistant's. Otherwise the parts follow from
prefixes: the first messages alone, with the header of the next turn, must be the beginning of the whole conversation.
The text after it, up to the end of the turn, is the assistant's. Some templates write earlier turns differently once
later ones follow, for example without their reasoning. They have no such prefixes and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparsebp_cli.errors import DataError
from sparsebp_cli.source.conversation import ASSISTANT, Conversation, Trained
from sparsebp_cli.worker.chat_template import ChatRequest, RenderedChat, marks_generation, render_chats

Span = tuple[int, int, float]  # first character, end (exclusive), and the weight of their tokens

WAYS_OUT = (
    "give dataset.chat_template a template that marks assistant turns with {% generation %}, or set train_on: last"
)


@dataclass(frozen=True)
class ChatText:
    """A conversation as the model reads it."""

    text: str
    spans: Sequence[Span]  # in order, without overlap; text outside is not trained


def write_chats(
    conversations: Sequence[Conversation], template: str, tokens: Mapping[str, object], train_on: Trained
) -> list[ChatText]:
    """Write conversations with a template. Raise DataError, naming the row, if the template refuses one, or its trained
    characters cannot be determined."""
    marked = marks_generation(template)
    writers = [_choose_writer(one, train_on, marked=marked) for one in conversations]
    requests = [list(writer.requests()) for writer in writers]
    answers = iter(render_chats(template, tokens, [each for some in requests for each in some]))
    return [writer.read([next(answers) for _ in some]) for writer, some in zip(writers, requests, strict=True)]


@dataclass(frozen=True)
class _Writer:
    """Writes one conversation. This base class trains all of it."""

    conversation: Conversation
    train_on: Trained

    def requests(self) -> Iterator[ChatRequest]:
        """Yield the conversations to render, the whole conversation first."""
        yield ChatRequest(self.conversation.messages, self.conversation.tools)

    def read(self, rendered: Sequence[RenderedChat]) -> ChatText:
        """Return the text and its spans."""
        text = self.check(rendered[0])
        return ChatText(text, [(0, len(text), 1.0)])

    def check(self, rendered: RenderedChat) -> str:
        """Return the text. Raise DataError if the template refused the messages."""
        if rendered.error:
            raise DataError(f"{self.conversation.place}: the chat template refuses the messages: {rendered.error}")
        return rendered.text


class _MarkedWriter(_Writer):
    """Trains the parts that the template marks."""

    def read(self, rendered: Sequence[RenderedChat]) -> ChatText:
        text, spans, one = self.check(rendered[0]), rendered[0].spans, self.conversation
        turns = [number for number, message in enumerate(one.messages) if message["role"] == ASSISTANT]
        if self.train_on == "assistant" and all(one.weights[number] == 1.0 for number in turns):
            return ChatText(text, [(begin, end, 1.0) for begin, end in spans])
        if len(spans) != len(turns):
            raise DataError(
                f"{one.place}: the chat template marks {len(spans)} parts with {{% generation %}} for {len(turns)} "
                "messages of the assistant: for message weights or 'train_on: last', it must mark one part per message"
            )
        chosen = [
            (begin, end, one.weights[number])
            for number, (begin, end) in zip(turns, spans, strict=True)
            if one.is_trained(number, self.train_on)
        ]
        return ChatText(text, chosen)


class _PrefixWriter(_Writer):
    """Trains the text between the prefixes before and after each message."""

    def requests(self) -> Iterator[ChatRequest]:
        yield from super().requests()
        one = self.conversation
        for number in self._numbers():
            role = one.messages[number]["role"]
            yield ChatRequest(one.messages[:number], one.tools, generation_prompt=role == ASSISTANT)
            yield ChatRequest(one.messages[: number + 1], one.tools)

    def _numbers(self) -> list[int]:
        one = self.conversation
        return [number for number in range(len(one.messages)) if one.is_trained(number, self.train_on)]

    def read(self, rendered: Sequence[RenderedChat]) -> ChatText:
        text, one, spans = self.check(rendered[0]), self.conversation, list[Span]()
        for place, number in enumerate(self._numbers()):
            before, after = rendered[1 + 2 * place], rendered[2 + 2 * place]
            begin = self._find(text, before, number, after=False) if number else 0
            # A template may refuse an empty conversation: use this prefix only if it exists and fits.
            if number == 0 and not before.error and text.startswith(before.text) and self._is_reply(0):
                begin = len(before.text)
            end = self._find(text, after, number, after=True)
            spans.append((begin, end, one.weights[number]))
        return ChatText(text, spans)

    def _is_reply(self, number: int) -> bool:
        return self.conversation.messages[number]["role"] == ASSISTANT

    def _find(self, text: str, prefix: RenderedChat, number: int, *, after: bool) -> int:
        count = number + 1 if after else number
        if count == len(self.conversation.messages):
            return len(text)
        some = "message" if count == 1 else f"{count} messages"
        if prefix.error:
            raise self._inconsistent(number, f"it cannot render the first {some} alone ({prefix.error})")
        if not text.startswith(prefix.text):
            raise self._inconsistent(number, f"its text of all messages does not begin with that of the first {some}")
        return len(prefix.text)

    def _inconsistent(self, number: int, reason: str) -> DataError:
        place = f"{self.conversation.place}, message {number}"
        return DataError(f"{place}: the chat template does not show which text to train: {reason}; {WAYS_OUT}")


def _choose_writer(one: Conversation, train_on: Trained, *, marked: bool) -> _Writer:
    if one.num_given and all(weight == 1.0 for weight in one.weights[one.num_given :]):
        return _PromptWriter(one, train_on)
    if train_on == "all" and all(weight == 1.0 for weight in one.weights):
        return _Writer(one, train_on)
    return (
        _MarkedWriter(one, train_on)
        if marked and train_on != "all" and not one.num_given
        else _PrefixWriter(one, train_on)
    )


class _PromptWriter(_PrefixWriter):
    """Trains everything after a prompt, as TRL does for a prompt and a completion of messages."""

    def requests(self) -> Iterator[ChatRequest]:
        one = self.conversation
        yield ChatRequest(one.messages, one.tools)
        yield ChatRequest(one.messages[: one.num_given], one.tools, generation_prompt=True)

    def read(self, rendered: Sequence[RenderedChat]) -> ChatText:
        text, one = self.check(rendered[0]), self.conversation
        begin = self._find(text, rendered[1], one.num_given, after=False)
        return ChatText(text, [(begin, len(text), 1.0)])


def mark_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> np.ndarray:
    """Return the weight of each token as float64, 0 outside all spans. A token belongs to the first span that it
    overlaps, as in transformers' ``return_assistant_tokens_mask``."""
    border_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    weight_T = np.zeros(len(border_T2))
    for begin, end, weight in reversed(spans):
        weight_T[(border_T2[:, 0] < end) & (border_T2[:, 1] > begin)] = weight
    return weight_T
