"""Run a shell on the target's machine, local or over SSH, and separate its answers from other printed text.

A login shell may print text (``.bashrc``, a quota, a maintenance notice), and so may the lines of ``setup``. So each
answer is enclosed in random markers, drawn for each command, on standard output and standard error. Text outside the
markers is never read as data.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, cast
from urllib.parse import urlsplit

from sparsebp_cli.errors import UnreachableError
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.target.contract import CheckResult
from sparsebp_cli.target.tool import CommandResult, Tool, always

# ssh must never prompt. A user accepts a host key by hand, once; unknown keys are errors here. The user's configuration
# may set a terminal and a command for interactive logins, which would keep ssh from running any other command.
SSH = (
    "ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=15",
    "-o", "RequestTTY=no", "-o", "RemoteCommand=none",
)  # fmt: skip
SSH_SILENCE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
BROKEN = 255  # ssh's own exit code
CHUNK = 1 << 16
MIXED = "its login shell sends errors to standard output, so SparseBP cannot read answers: look for 2>&1 in its profile"
TERMINAL = "its login shell changes the ends of lines, so answers cannot be read: its profile must not open a terminal"
RESET = "set +eufx +o pipefail; trap - EXIT HUP INT TERM USR1"  # options that lines of setup may have set


class SetupError(UnreachableError):
    """A line of ``setup`` failed on the target, so the command after it did not run."""


class Shell:
    """Runs POSIX shell lines after the lines of ``setup``. Bash runs these as in a job; each must succeed.

    The setup lines and the command share their own shell. The command sees their exports, their output goes to standard
    error, and shell options that they set are reset.
    """

    greeting: str

    def __init__(self, host: str | None, name: str, setup: Sequence[str] = (), *, ignored: Sequence[str] = ()) -> None:
        """Reach ``ssh://[USER@]HOST[:PORT]``. None is this machine, which errors call ``name``. Variables with a prefix
        in ``ignored`` are unset there before the lines of setup."""
        self._host, self._place, self._setup = host, host or name, setup
        names = "\\|".join(f"{prefix}[A-Za-z0-9_]*" for prefix in ignored)
        self._unset = f"unset -v $(env | sed -n 's/^\\({names}\\)=.*/\\1/p') _\n" if ignored else ""
        self._tool = Tool(self._place, _is_refusal if host else always)
        self.greeting = ""  # text printed before the last answer; empty for none

    def run(self, lines: str, *, given: bytes = b"") -> CommandResult:
        """Run lines until they end; see :meth:`Tool.run`. Also raise ``SetupError``."""
        mark = _draw_mark()
        return self._unframe(self._tool.run(self._frame(lines, mark), given=given), mark)

    def check(self) -> Iterator[CheckResult]:
        """Yield a warning if something was printed before the last answer."""
        if self.greeting:
            said = shorten(self.greeting.splitlines()[-1])
            yield CheckResult(
                "warn", "shell", f"the login shell prints {said!r} before each answer; SparseBP ignores this text"
            )

    def write(self, lines: str, feed: Callable[[IO[bytes]], None]) -> CommandResult:
        """Run lines whose standard input ``feed`` writes; see :meth:`Tool.write`. Also raise ``SetupError``."""
        mark = _draw_mark()
        return self._unframe(self._tool.write(self._frame(lines, mark), feed), mark)

    @contextmanager
    def read(self, lines: str) -> Iterator[IO[bytes]]:
        """Yield the standard output of the lines, which the caller reads to its end; see :meth:`Tool.read`."""
        mark = _draw_mark()
        with self._tool.read(self._frame(lines, mark)) as stream:
            framed = _FramedStream(stream, mark, self._place)
            yield cast("IO[bytes]", framed)
            whole = framed.is_whole()
        if not whole:
            raise UnreachableError(f"{self._place}: a transfer broke off before its end")

    def _frame(self, lines: str, mark: str) -> list[str]:
        """Return the command that prints markers around the output of the lines."""
        setup = "".join(
            # POSIX: if eval fails before ||, set -e has no effect; a syntax error ends only this subshell.
            f"printf '\\n%s setup %d\\n' {mark} {number} >&2\neval {shlex.quote(line)} </dev/null >&2 9>&- || exit\n"
            for number, line in enumerate(self._setup)
        )
        reset = f"{RESET}\n" if setup else ""
        script = (
            f"(\n{self._unset}{setup}{reset}printf '\\n%s errors begin\\n' {mark} >&2\n"
            f"printf '\\n%s begin\\n' {mark} >&9\n"
            f"{{ {lines}\n}} >&9 9>&-\n) 9>&1 >&2\ncode=$?\n"
            f"printf '\\n%s errors end\\n' {mark} >&2; printf '\\n%s end %03d\\n' {mark} $code\nexit $code"
        )
        return shell_command(self._host, script, "bash" if setup else "sh")

    def _unframe(self, answer: CommandResult, mark: str) -> CommandResult:
        begin, end = f"\n{mark} begin\n".encode(), re.compile(rf"\n{mark} end (\d{{3}})\n".encode())
        if _is_mixed(answer.out, mark):
            raise UnreachableError(f"{self._place}: {MIXED}")
        if f"\n{mark} begin\r".encode() in answer.out:
            raise UnreachableError(f"{self._place}: {TERMINAL}")
        before, begun, rest = answer.out.partition(begin)
        closed = end.search(rest if begun else answer.out)
        if begun and closed:
            self.greeting = before.decode(errors="replace").strip()
            err = answer.err.rpartition(f"\n{mark} errors begin\n")[2].partition(f"\n{mark} errors end\n")[0]
            return CommandResult(int(closed[1]), rest[: closed.start()], err)
        if closed:
            raise self._describe_setup(answer.err, mark, int(closed[1]))
        if answer.code == 0:
            shown = shorten((answer.text or answer.err).strip()[-200:])
            raise UnreachableError(f"{self._place}: the shell there ended before its answer; it printed {shown!r}")
        return answer  # the login shell refused, so our shell never ran

    def _describe_setup(self, err: str, mark: str, code: int) -> SetupError:
        numbers = re.findall(rf"^{mark} setup (\d+)$", err, re.MULTILINE)
        line = self._setup[int(numbers[-1])] if numbers else ""
        said = CommandResult(code, b"", err.rpartition(f"{mark} setup {numbers[-1] if numbers else ''}\n")[2])
        said = CommandResult(code, b"", said.err.partition(f"\n{mark} errors end\n")[0])
        return SetupError(f"{self._place}: target.setup: {line!r} failed there: {said.problem}")


class _FramedStream:
    """A stream of the text between the markers."""

    def __init__(self, stream: IO[bytes], mark: str, place: str) -> None:
        self._stream, self._begin = stream, f"\n{mark} begin\n".encode()
        self._mark, self._place = mark, place
        self._end = re.compile(rf"\n{mark} end (\d{{3}})\n".encode())
        # A marker may arrive in two parts, so hold back as many bytes while none was found.
        self._length = len(f"\n{mark} end 000\n")
        self._kept, self._code = b"", -1
        self._begun = self._over = False

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes, fewer only at the end; -1 reads to the end."""
        while (size < 0 or self._num_free() < size) and self._fill():
            pass
        taken = self._num_free() if size < 0 else min(size, self._num_free())
        data, self._kept = self._kept[:taken], self._kept[taken:]
        return data

    def is_whole(self) -> bool:
        """Read the rest, and return whether the lines ended with exit code 0."""
        while self.read(CHUNK):
            pass
        return self._code == 0

    def _num_free(self) -> int:
        if not self._begun:
            return 0
        return len(self._kept) if self._over else max(0, len(self._kept) - self._length)

    def _fill(self) -> bool:
        """Read more data, and return whether there was any."""
        data = b"" if self._over else self._stream.read(CHUNK)
        if not data:
            self._over = True
            return False
        known = len(self._kept)
        self._kept += data
        if not self._begun and self._begin in self._kept:
            if _is_mixed(self._kept, self._mark):
                raise UnreachableError(f"{self._place}: {MIXED}")
            self._begun, known, self._kept = True, 0, self._kept.partition(self._begin)[2]
        if self._begun and (found := self._end.search(self._kept, max(0, known - self._length))):
            self._kept, self._code, self._over = self._kept[: found.start()], int(found[1]), True
        elif not self._begun:
            self._kept = self._kept[-3 * len(self._begin) :]  # a shell may print any amount before
        return True


def _is_mixed(out: bytes, mark: str) -> bool:
    """Return whether standard error was redirected to standard output: then the error marker precedes the other one."""
    return f"\n{mark} errors begin\n".encode() in out


def shell_command(host: str | None, lines: str, program: str = "sh") -> list[str]:
    """Return the command that runs shell lines on ``ssh://[USER@]HOST[:PORT]``; None is this machine. ``exec`` makes
    the lines independent of the user's login shell there."""
    if host is None:
        return [program, "-c", lines]
    return [*ssh_command(host), f"exec {program} -c {shlex.quote(lines)}"]


def ssh_command(host: str) -> list[str]:
    """Return the ssh command up to the remote command, for ``ssh://[USER@]HOST[:PORT]``."""
    place = urlsplit(host)
    port = ["-p", str(place.port)] if place.port else []
    user = f"{place.username}@" if place.username else ""
    # After the host, ssh still reads options up to `--`.
    return [*SSH, *SSH_SILENCE, *port, f"{user}{place.hostname}", "--"]


def _draw_mark() -> str:
    return f"sparsebp-{secrets.token_hex(16)}"


def _is_refusal(code: int, errors: str) -> bool:
    return code != BROKEN and not re.search(r"^kex_exchange_identification|^ssh: ", errors, re.MULTILINE)
