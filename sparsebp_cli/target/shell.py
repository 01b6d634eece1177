"""Commands that run shell lines here or on another machine over SSH. An unknown or changed host key is refused."""

from __future__ import annotations

import re
import shlex
from urllib.parse import urlsplit

from sparsebp_cli.target.tool import Tool

# ssh must never prompt. A user accepts a host key by hand, once; an unknown one is an error here.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=15")
SSH_SILENCE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
BROKEN = 255  # ssh's own exit code


def shell_command(host: str | None, lines: str) -> list[str]:
    """Return the command that runs POSIX shell lines on ``ssh://[USER@]HOST[:PORT]``; None is this machine.

    ``exec sh`` makes the lines independent of the user's login shell there.
    """
    if host is None:
        return ["sh", "-c", lines]
    return [*ssh_command(host), f"exec sh -c {shlex.quote(lines)}"]


def ssh_command(host: str) -> list[str]:
    """Return the words of ssh up to the remote command, for ``ssh://[USER@]HOST[:PORT]``."""
    place = urlsplit(host)
    port = ["-p", str(place.port)] if place.port else []
    user = f"{place.username}@" if place.username else ""
    return [*SSH, *SSH_SILENCE, *port, f"{user}{place.hostname}", "--"]


def make_tool(host: str | None, name: str) -> Tool:
    """Return the tool that runs commands of :func:`shell_command`; error lines call this machine ``name``."""
    return Tool(host or name, _is_refusal if host else _always)


def _is_refusal(code: int, errors: str) -> bool:
    return code != BROKEN and not re.search(r"^kex_exchange_identification|^ssh: ", errors, re.MULTILINE)


def _always(_code: int, _errors: str) -> bool:
    return True
