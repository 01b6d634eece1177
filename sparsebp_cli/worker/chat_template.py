"""Render chat templates with transformers' sandbox, in a separate process.

A template is a stranger's code. The sandbox denies it access to files and Python. This module also limits CPU time and
memory for each conversation, which no thread or signal could enforce inside one long C call.
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

from sparsebp_cli.errors import DataError
from sparsebp_cli.run import interpreter

CPU_SECONDS = 10  # for one conversation; a large model's template takes less than a millisecond
MEMORY_BYTES = 1 << 30  # in addition to the process's memory before the first conversation
MOST_CHARACTERS = 1 << 24  # of a rendered conversation
# The current date that templates see. A resumed run must render the same text, so the date is fixed: the fallback of
# Llama 3.1's template.
TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to render."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[object] | None = None
    generation_prompt: bool = False  # whether to append the header of an assistant's turn


@dataclass(frozen=True)
class RenderedChat:
    """The result of rendering one conversation."""

    text: str = ""
    spans: Sequence[tuple[int, int]] = ()  # character ranges that the template marks as generated
    error: str = ""  # the template's own refusal, or an exception in it


def render_chats(template: str, tokens: Mapping[str, object], requests: Sequence[ChatRequest]) -> list[RenderedChat]:
    """Render conversations. ``tokens`` maps the names that templates read to special tokens. Raise DataError for a
    template that cannot be parsed, or exceeds its time or memory."""
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
            raise DataError(f"the chat template needs too much time or memory: one conversation may take {allowed}")
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DataError(f"the process that renders the chat template failed: {last}")
    return [_read(json.loads(line)) for line in lines]


def marks_generation(template: str) -> bool:
    """Return whether a template marks the assistant's text."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _read(line: dict[str, Any]) -> RenderedChat:
    return RenderedChat(line["text"], [(begin, end) for begin, end in line["spans"]], line["error"])


def main(source: TextIO, target: TextIO) -> None:
    """Render the conversations of a request, and write one line for each as soon as it is rendered."""
    from transformers.utils import chat_template_utils

    class FixedClock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]  # noqa: ARG003 - the date is fixed
            return TODAY

    # The name that strftime_now reads: transformers has no argument for a clock. See decision 76.
    vars(chat_template_utils)["datetime"] = FixedClock
    request = json.load(source)
    # RLIMIT_AS limits the whole address space, so add the process's current size.
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    size += request["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    # SIGXCPU would otherwise write a core file with the process's memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in _render_all(chat_template_utils, request):
        target.write(json.dumps(line) + "\n")
        target.flush()


def _as_texts(value: object) -> object:
    """Return a message, or a part of one, for a template that reads only texts. Arguments of calls become JSON text; a
    content of one text part becomes this text."""
    if isinstance(value, list):
        return [_as_texts(part) for part in value]
    if not isinstance(value, dict):
        return value
    found = {key: _as_texts(part) for key, part in value.items()}
    if isinstance(arguments := found.get("arguments"), dict):
        found["arguments"] = json.dumps(arguments, ensure_ascii=False)
    if (text := _find_text(found.get("content"))) is not None:
        found["content"] = text
    return found


def _find_text(content: object) -> str | None:
    """Return the text of a content that has a single text part; None for other contents."""
    part = content[0] if isinstance(content, list) and len(content) == 1 else None
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
    return text if isinstance(text, str) else None


def _reads_objects(value: object, text: str) -> bool:
    """Return whether a template wrote a message's objects correctly, not in Python's notation, and lost none."""
    if isinstance(value, list):
        return all(_reads_objects(part, text) for part in value)
    if not isinstance(value, dict):
        return True
    arguments, content = value.get("arguments"), _find_text(value.get("content"))
    is_python = isinstance(arguments, dict) and str(arguments) != json.dumps(arguments) and str(arguments) in text
    is_lost = content is not None and (content.strip() not in text or str(value["content"]) in text)
    return not is_python and not is_lost and all(_reads_objects(part, text) for part in value.values())


def _render_all(transformers: Any, request: dict[str, Any]) -> Iterator[dict[str, object]]:
    from jinja2 import TemplateSyntaxError

    for messages, tools, generation_prompt in request["jobs"]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # The limit counts from the start of the process, so move it on; it must be soft, because a hard limit cannot be
        # raised.
        soft = int(used.ru_utime + used.ru_stime) + request["cpu_seconds"] + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        try:
            line = _render(transformers, request, messages, tools, generation_prompt)
            if line["error"] or not _reads_objects(messages, str(line["text"])):
                others = _as_texts(messages)
                second = (
                    _render(transformers, request, others, tools, generation_prompt) if others != messages else line
                )
                line = line if second["error"] else second
        except TemplateSyntaxError as error:
            yield {"broken": f"line {error.lineno}: {error.message}"}
            return
        yield line


def _render(
    transformers: Any, request: dict[str, Any], messages: object, tools: object, generation_prompt: object
) -> dict[str, object]:
    from jinja2 import TemplateSyntaxError

    try:
        texts, spans = transformers.render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=request["template"],
            return_assistant_tokens_mask=marks_generation(request["template"]),
            add_generation_prompt=generation_prompt,
            **request["tokens"],
        )
    except TemplateSyntaxError:
        raise
    except MemoryError:
        return _line(error=f"needs more than {MEMORY_BYTES >> 20} MiB of memory")
    except Exception as error:  # a template may raise anything; the user must correct it
        return _line(error=(str(error).strip().splitlines() or [type(error).__name__])[0])
    if len(texts[0]) > MOST_CHARACTERS:
        return _line(error=f"writes {len(texts[0]):,} characters; allowed: {MOST_CHARACTERS:,}")
    return _line(texts[0], spans[0] if spans else ())


def _line(text: str = "", spans: Sequence[tuple[int, int]] = (), error: str = "") -> dict[str, object]:
    return {"text": text, "spans": list(spans), "error": error}


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
