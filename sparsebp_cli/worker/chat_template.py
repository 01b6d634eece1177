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


def _as_texts(value: object) -> object:
    """Return a message, or a part of one, for a template that takes texts alone: arguments of calls as their JSON, a
    content of one text part as this text."""
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
    """Return the text of a content of one text part."""
    part = content[0] if isinstance(content, list) and len(content) == 1 else None
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
    return text if isinstance(text, str) else None


def _reads_objects(value: object, text: str) -> bool:
    """Return whether a template has written the objects of a message, and not what Python makes of them, or nothing."""
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
        # The limit counts from the start of the process, so it is moved on; hence no hard one, which nobody may raise.
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
    except Exception as error:  # whatever a template raises, which is the user's to correct
        return _line(error=(str(error).strip().splitlines() or [type(error).__name__])[0])
    if len(texts[0]) > MOST_CHARACTERS:
        return _line(error=f"writes {len(texts[0]):,} characters; allowed: {MOST_CHARACTERS:,}")
    return _line(texts[0], spans[0] if spans else ())


def _line(text: str = "", spans: Sequence[tuple[int, int]] = (), error: str = "") -> dict[str, object]:
    return {"text": text, "spans": list(spans), "error": error}


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
