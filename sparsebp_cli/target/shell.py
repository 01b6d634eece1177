"""Shell lines on this machine or on another one over SSH. An unknown or changed host key is refused, never accepted."""

from __future__ import annotations

import re
import shlex
from urllib.parse import urlsplit

from sparsebp_cli.target.tool import Tool

# Refused, not asked for: accepting a host key is something that a user does, by hand, once.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=15")
SSH_SILENCE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
BROKEN = 255  # ssh's own exit code


def shell_words(host: str | None, lines: str) -> list[str]:
    """Return the command that runs shell lines.

    Args:
        host: ``ssh://[USER@]HOST[:PORT]``; None: this machine.
        lines: For a POSIX shell, whatever the login shell there is.

    Returns:
        Words.
    """
    if host is None:
        return ["sh", "-c", lines]
    return [*ssh_words(host), f"exec sh -c {shlex.quote(lines)}"]


def ssh_words(host: str) -> list[str]:
    """Return the words of ssh up to the command.

    Args:
        host: ``ssh://[USER@]HOST[:PORT]``.

    Returns:
        Words.
    """
    place = urlsplit(host)
    port = ["-p", str(place.port)] if place.port else []
    user = f"{place.username}@" if place.username else ""
    return [*SSH, *SSH_SILENCE, *port, f"{user}{place.hostname}", "--"]


def make_tool(host: str | None, name: str) -> Tool:
    """Return the tool for :func:`shell_words`.

    Args:
        host: As there.
        name: Of the place on this machine, for error lines.

    Returns:
        A tool that knows ssh's own failures from those of the command.
    """
    return Tool(host or name, _is_answer if host else _always)


def _is_answer(code: int, errors: str) -> bool:
    return code != BROKEN and not re.search(r"^kex_exchange_identification|^ssh: ", errors, re.MULTILINE)


def _always(_code: int, _errors: str) -> bool:
    return True
