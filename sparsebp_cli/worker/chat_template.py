"""Chat templates, rendered by transformers' sandbox in a process of their own.

A template is code of a stranger. The sandbox keeps it from files and from Python; here it also gets a limited share of
CPU time and memory for each conversation, which no thread or signal could enforce inside of one long C call.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from sparsebp_cli import interpreter
from sparsebp_cli.errors import DataError

CPU_SECONDS = 10  # for one conversation; a template of a large model takes less than a millisecond
MEMORY_BYTES = 1 << 30  # beyond what the process has before the first conversation
MOST_CHARACTERS = 1 << 24  # of a rendered conversation
# What templates read as today's date. A resumed run must render the same text, so it is one day for all: the one that
# Llama 3.1's template falls back to.
TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to be rendered."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[object] | None = None
    generation_prompt: bool = False  # whether the header of an assistant's turn follows


@dataclass(frozen=True)
class RenderedChat:
    """What a template made of a conversation."""

    text: str = ""
    spans: Sequence[tuple[int, int]] = ()  # characters that the template marks as generated
    error: str = ""  # the template's own refusal, or an exception in it


def render_chats(template: str, tokens: Mapping[str, object], requests: Sequence[ChatRequest]) -> list[RenderedChat]:
    """Render conversations. ``tokens`` are the special tokens by the names that templates read. Raise DataError for a
    template that cannot be parsed, or needs more than its share of time or memory."""
    if not requests:
        return []
    jobs = [[list(one.messages), one.tools, one.generation_prompt] for one in requests]
    limits = {"cpu_seconds": CPU_SECONDS, "memory_bytes": MEMORY_BYTES}
    content = json.dumps({"template": template, "tokens": dict(tokens), "jobs": jobs} | limits, default=str)
    command = interpreter.command("-m", __name__)
    environment = interpreter.environment()
    done = subprocess.run(command, input=content.encode(), env=environment, capture_output=True, check=False)
    lines = done.stdout.decode().splitlines()
    if lines and "broken" in (first := json.loads(lines[0])):
        raise DataError(f"the chat template is broken: {first['broken']}")
    if done.returncode:
        if done.returncode in (-24, -9):  # SIGXCPU, then SIGKILL
            allowed = f"{CPU_SECONDS} seconds of CPU time and {MEMORY_BYTES >> 20} MiB"
            raise DataError(f"the chat template does not end: one conversation may take {allowed}")
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DataError(f"the process that renders the chat template failed: {last}")
    return [_read(json.loads(line)) for line in lines]


def marks_generation(template: str) -> bool:
    """Return whether a template marks what the assistant generates."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _read(line: dict[str, Any]) -> RenderedChat:
    return RenderedChat(line["text"], [(begin, end) for begin, end in line["spans"]], line["error"])


def main(source: TextIO, target: TextIO) -> None:
    """Render the conversations of a request and write one line for each, as soon as it is known."""
    from transformers.utils import chat_template_utils

    class FixedClock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]  # noqa: ARG003 - there is one day
            return TODAY

    # The name that its strftime_now reads: no argument gives it a clock. See decision 76.
    vars(chat_template_utils)["datetime"] = FixedClock
    request = json.load(source)
    # RLIMIT_AS bounds the whole address space, so what the process has by now is added.
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    size += request["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    # SIGXCPU would write the memory of the process to a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in _render_all(chat_template_utils, request):
        target.write(json.dumps(line) + "\n")
        target.flush()


class _Arguments(dict[str, object]):
    """Arguments of a tool call, which write themselves as JSON where a template takes them for a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class _TextPart(list[object]):
    """A content of one part, a text, which writes itself where a template takes it for a text."""

    def __str__(self) -> str:
        return str(self[0]["text"])  # type: ignore[index]

    __add__ = _Arguments.__add__  # type: ignore[assignment]
    __radd__ = _Arguments.__radd__


def _revive(value: object) -> object:
    """Return a message, or a part of one, whose objects write themselves as a template would write a text."""
    if isinstance(value, list):
        return [_revive(part) for part in value]
    if not isinstance(value, dict):
        return value
    found = {key: _revive(part) for key, part in value.items()}
    if isinstance(arguments := found.get("arguments"), dict):
        found["arguments"] = _Arguments(arguments)
    content = found.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        is_text = content[0].get("type", "text") == "text" and isinstance(content[0].get("text"), str)
        found["content"] = _TextPart(content) if is_text else content
    return found


def _render_all(transformers: Any, request: dict[str, Any]) -> Iterator[dict[str, object]]:
    from jinja2 import TemplateSyntaxError

    template, marks = request["template"], marks_generation(request["template"])
    for messages, tools, generation_prompt in request["jobs"]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # The limit counts from the start of the process, so it is moved on; hence no hard one, which nobody may raise.
        soft = int(used.ru_utime + used.ru_stime) + request["cpu_seconds"] + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        try:
            texts, spans = transformers.render_jinja_template(
                conversations=[_revive(messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=generation_prompt,
                **request["tokens"],
            )
        except TemplateSyntaxError as error:
            yield {"broken": f"line {error.lineno}: {error.message}"}
            return
        except MemoryError:
            yield _line(error=f"needs more than {MEMORY_BYTES >> 20} MiB of memory")
        except Exception as error:  # whatever a template raises, which is the user's to correct
            yield _line(error=(str(error).strip().splitlines() or [type(error).__name__])[0])
        else:
            text = texts[0]
            if len(text) > MOST_CHARACTERS:
                yield _line(error=f"writes {len(text):,} characters; allowed: {MOST_CHARACTERS:,}")
            else:
                yield _line(text, spans[0] if spans else ())


def _line(text: str = "", spans: Sequence[tuple[int, int]] = (), error: str = "") -> dict[str, object]:
    return {"text": text, "spans": list(spans), "error": error}


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
