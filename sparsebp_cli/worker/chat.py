"""Conversations as text by a chat template, and which characters of it are trained.

What the template marks with ``{% generation %}`` is what an assistant writes. A template without such marks says it by
its prefixes: the first messages alone, with the header of the next turn, must be the beginning of the whole
conversation; then what follows, up to the end of the turn, is the assistant's. A template that writes earlier turns in
another way once later ones follow, such as one that strips their reasoning, has no such prefixes and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparsebp_cli.errors import DataError
from sparsebp_cli.source.conversation import ASSISTANT, Conversation, Trained
from sparsebp_cli.worker.chat_template import ChatRequest, RenderedChat, marks_generation, render_chats

Span = tuple[int, int, float]  # first character, the one after the last, and the weight of their tokens

WAYS_OUT = (
    "give dataset.chat_template a template that marks the assistant's turns with {% generation %}, or train_on: last"
)


@dataclass(frozen=True)
class ChatText:
    """A conversation as the model reads it."""

    text: str
    spans: Sequence[Span]  # in order, apart; what is in none of them is not trained


def write_chats(
    conversations: Sequence[Conversation], template: str, tokens: Mapping[str, object], train_on: Trained
) -> list[ChatText]:
    """Write conversations by a template. Raise DataError, with the row, for one that the template refuses, or whose
    trained characters cannot be told."""
    marked = marks_generation(template)
    writers = [_choose_writer(one, train_on, marked=marked) for one in conversations]
    requests = [list(writer.requests()) for writer in writers]
    answers = iter(render_chats(template, tokens, [each for some in requests for each in some]))
    return [writer.read([next(answers) for _ in some]) for writer, some in zip(writers, requests, strict=True)]


@dataclass(frozen=True)
class _Writer:
    """Writes one conversation; this one trains all of it."""

    conversation: Conversation
    train_on: Trained

    def requests(self) -> Iterator[ChatRequest]:
        """Yield what is to be rendered, the whole conversation first."""
        yield ChatRequest(self.conversation.messages, self.conversation.tools)

    def read(self, rendered: Sequence[RenderedChat]) -> ChatText:
        """Return the text and its spans."""
        text = self.check(rendered[0])
        return ChatText(text, [(0, len(text), 1.0)])

    def check(self, rendered: RenderedChat) -> str:
        """Return a text, or raise for what the template refuses."""
        if rendered.error:
            raise DataError(f"{self.conversation.place}: the chat template refuses the messages: {rendered.error}")
        return rendered.text


class _MarkedWriter(_Writer):
    """Trains what the template marks."""

    def read(self, rendered: Sequence[RenderedChat]) -> ChatText:
        text, spans, one = self.check(rendered[0]), rendered[0].spans, self.conversation
        turns = [number for number, message in enumerate(one.messages) if message["role"] == ASSISTANT]
        if self.train_on == "assistant" and all(one.weights[number] == 1.0 for number in turns):
            return ChatText(text, [(begin, end, 1.0) for begin, end in spans])
        if len(spans) != len(turns):
            raise DataError(
                f"{one.place}: the chat template marks {len(spans)} parts as generated and there are {len(turns)} "
                "messages of the assistant: their weights, or train_on: last, need one for each"
            )
        chosen = [
            (begin, end, one.weights[number])
            for number, (begin, end) in zip(turns, spans, strict=True)
            if one.is_trained(number, self.train_on)
        ]
        return ChatText(text, chosen)


class _PrefixWriter(_Writer):
    """Trains what is between the prefixes before and after each message."""

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
            # A template may refuse to write no messages: this prefix counts where there is one and where it fits.
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
            raise self._inconsistent(number, f"it refuses the first {some} alone ({prefix.error})")
        if not text.startswith(prefix.text):
            raise self._inconsistent(
                number, f"what it writes for the first {some} alone is not the beginning of the whole conversation"
            )
        return len(prefix.text)

    def _inconsistent(self, number: int, reason: str) -> DataError:
        place = f"{self.conversation.place}, message {number}"
        return DataError(f"{place}: the chat template does not tell what is trained: {reason}; {WAYS_OUT}")


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
    """Trains all that follows a prompt, as TRL does for a prompt and a completion of messages."""

    def requests(self) -> Iterator[ChatRequest]:
        one = self.conversation
        yield ChatRequest(one.messages, one.tools)
        yield ChatRequest(one.messages[: one.num_given], one.tools, generation_prompt=True)

    def read(self, rendered: Sequence[RenderedChat]) -> ChatText:
        text, one = self.check(rendered[0]), self.conversation
        begin = self._find(text, rendered[1], one.num_given, after=False)
        return ChatText(text, [(begin, len(text), 1.0)])


def mark_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> np.ndarray:
    """Return the weight of each token, 0 outside of all spans, as float64. A token is in the first span that it
    overlaps, as transformers' ``return_assistant_tokens_mask`` has it."""
    border_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    weight_T = np.zeros(len(border_T2))
    for begin, end, weight in reversed(spans):
        weight_T[(border_T2[:, 0] < end) & (border_T2[:, 1] > begin)] = weight
    return weight_T
